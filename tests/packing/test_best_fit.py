import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_packing import find_best_fit
from composer_packing.packing.best_fit import empty_rows, place_best_fit
from composer_packing.packing.document_table import NO_ROW
from tests.tools import ROOT, reference
from tests.tools.tables import table


def row(spaces: list[int], length: int) -> int:
    return int(find_best_fit(np.array(spaces), length))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 20))
def test_best_fit_agrees_with_trying_every_row(spaces: list[int], length: int) -> None:
    expected = reference.best_fit(spaces, length)
    assert row(spaces, length) == (-1 if expected is None else expected)


def test_best_fit_takes_the_fullest_row_that_still_holds_the_document() -> None:
    assert row([8, 4, 5], 4) == 1
    assert row([8, 3, 5], 4) == 2


def test_best_fit_takes_the_lowest_row_on_a_tie() -> None:
    assert row([2, 4, 4], 3) == 1


def test_best_fit_gives_minus_one_if_no_row_fits() -> None:
    assert row([2, 1], 3) == -1


@given(st.integers(1, 9), st.integers(1, 40), st.lists(st.integers(1, 40), max_size=60), st.integers(0, 60))
def test_placing_many_documents_is_best_fit_one_by_one_also_in_two_calls(
    rows: int, row_len: int, lengths: list[int], first: int
) -> None:
    room = [row_len] * rows
    expected = []
    for length in lengths:
        best = reference.best_fit(room, length)
        expected.append(NO_ROW if best is None else best)
        if best is not None:
            room[best] -= length
    by_room, documents = empty_rows(rows, row_len), table(lengths)
    order = np.arange(len(lengths))
    shortest = min(lengths, default=1)
    placements = [place_best_fit(documents, part, by_room, shortest) for part in (order[:first], order[first:])]
    assert [row for row_of, _ in placements for row in row_of.tolist()] == expected
    assert sum(placed for _, placed in placements) == sum(row != NO_ROW for row in expected)


def test_the_picture_in_the_docstring_is_what_happens() -> None:
    by_room = empty_rows(3, 8)
    row_of, placed = place_best_fit(table([5, 4, 3, 6, 3, 2]), np.arange(6), by_room, 1)
    assert row_of.tolist() == [0, 1, 0, 2, 1, 2]
    assert placed == 6
    assert (by_room // 3).tolist() == [0, 0, 1]


@pytest.mark.slow
def test_compiling_works_if_no_cache_can_be_written(tmp_path: Path) -> None:
    """As with a read-only install and no home folder: numba tries only the user's cache, whose folder is a file."""
    blocker = tmp_path / "file"
    blocker.touch()
    environment = os.environ | {
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator",
        "HOME": str(blocker),
        "XDG_CACHE_HOME": str(blocker),
    }
    code = "import numpy; from composer_packing import find_best_fit as f; print(f(numpy.array([4, 2]), 2))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=500)
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.slow
def test_no_compiled_function_reads_or_writes_beyond_its_arrays(tmp_path: Path) -> None:
    """Compiled code does not check its indices. Here its tests run once with such checks, and compile everything again.

    The test of every type of token is left out: it takes as long to compile as all the others, and uses no other index.
    """
    names = ("best_fit", "layout", "waiting_buffer", "subset_sum", "next_tokens", "keyed_mlm", "blocks")
    files = [f"tests/packing/test_{name}.py" for name in names]
    chosen = ["-m", "not slow", "-k", "not tokens_of_any_integer_type"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files],
        env=os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout
