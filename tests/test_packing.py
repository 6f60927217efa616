import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_packing import find_best_fit
from composer_packing.packing import fill_rows, place_documents
from tests import reference


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


def test_best_fit_gives_minus_one_where_nothing_fits() -> None:
    assert row([2, 1], 3) == -1


def test_the_picture_in_the_docstring_is_what_happens() -> None:
    spaces = np.array([8, 8, 8])
    rows = place_documents(np.array([5, 4, 3, 6, 3, 2]), spaces)
    assert rows.tolist() == [0, 1, 0, 2, 1, 2]
    assert spaces.tolist() == [0, 1, 0]


def test_filling_lays_documents_end_to_end_and_makes_padding_a_segment() -> None:
    tokens = np.array([11, 12, 13, 99, 21, 31, 32])
    ids = np.zeros((2, 4), np.int64)
    mask = np.zeros((2, 4), np.int64)
    cu_seqlens, offsets, longest, document_at = fill_rows(
        tokens,
        starts=np.array([0, 3, 4, 5]),
        lengths=np.array([3, 1, 1, 2]),
        row_of_document=np.array([0, -1, 0, 1]),
        input_ids=ids,
        attention_mask=mask,
        pad_token_id=7,
    )
    assert ids.tolist() == [[11, 12, 13, 21], [31, 32, 7, 7]]
    assert mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert document_at.tolist() == [-1, 0, 2, -1, 3, -1]
    assert offsets.tolist() == [0, 3, 6]
    assert cu_seqlens.tolist() == [0, 3, 4, 0, 2, 4]
    assert cu_seqlens.dtype == np.int32
    assert longest.tolist() == [3, 2]


@pytest.mark.slow
def test_compiling_works_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """As with a read-only install and no home: numba looks in the user's cache only, and that is a file."""
    blocker = tmp_path / "file"
    blocker.touch()
    environment = os.environ | {
        "NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator",
        "HOME": str(blocker),
        "XDG_CACHE_HOME": str(blocker),
    }
    code = "import numpy; from composer_packing import find_best_fit as f; print(f(numpy.array([4, 2]), 2))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "1", done.stderr
