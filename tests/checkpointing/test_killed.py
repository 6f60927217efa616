import os
import re
import sys
from typing import Any

import pytest

from tests.tools.killed_runs import INTERVAL, KILLS
from tests.tools.running import result_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `killed_runs` found. One program for all tests of this file.

    A failure shows the seed. The seed draws the same kinds and moments of kills again.
    """
    seed = os.environ.get("KILLED_RUNS_SEED", "1")
    print(f"to draw the same kills again: KILLED_RUNS_SEED={seed}")
    folder = str(tmp_path_factory.mktemp("killed"))
    told: dict[str, Any] = result_of(sys.executable, "-m", "tests.tools.killed_runs", folder, seed)
    return told


def test_a_run_that_is_killed_twenty_times_is_fed_the_same_batches_as_an_undisturbed_run(
    found: dict[str, Any],
) -> None:
    expected = {(rank, batch): (epoch, digest) for rank, batch, epoch, digest in found["undisturbed"]}
    assert len(expected) == 300, "two ranks, 150 batches"
    attempts = found["attempts"]
    assert sum(attempt["how"] not in ("undisturbed", "disk full") for attempt in attempts) == KILLS == 20
    fed = set()
    last, may_lose = -1, INTERVAL
    for attempt in attempts:
        for rank, batch, epoch, digest in attempt["journal"]:
            assert expected[rank, batch] == (epoch, digest), attempt["how"]
            fed.add((rank, batch))
        batches = [batch for _, batch, _, _ in attempt["journal"]]
        if batches:
            assert last + 1 - may_lose <= min(batches) <= last + 1, "at most the batches after the last checkpoint"
            last, may_lose = max(batches), INTERVAL
        if "cut off" in attempt["how"]:
            may_lose = 2 * INTERVAL + 2  # the checkpoint before it is whole; SIGTERM or an interval has written it
    assert fed == set(expected)


def test_each_way_to_end_a_run_gives_its_exit_code(found: dict[str, Any]) -> None:
    attempts = found["attempts"]
    kinds = {attempt["how"].removesuffix(", cut off") for attempt in attempts}
    assert kinds == {"first rank", "second rank", "both", "SIGTERM", "disk full", "undisturbed"}
    for attempt in attempts:
        how, codes = attempt["how"].removesuffix(", cut off"), attempt["codes"]
        if how == "SIGTERM":
            assert codes == [143, 143] or (codes[0] == 143 and not attempt["journal"]), "it was killed while it started"
        elif how == "disk full":
            assert codes[0] == 2
            assert codes[1] not in (0, -9), "it does not have to be killed"
        elif how == "undisturbed":
            assert codes == [0, 0]
        else:
            killed = {"first rank": [0], "second rank": [1], "both": [0, 1]}[how]
            assert all(codes[rank] == -9 for rank in killed)
            assert 0 not in codes
            if attempt["journal"]:
                assert codes.count(-9) == len(killed), "the other rank ends by itself"


def test_a_run_says_from_where_it_resumed_what_was_cut_off_and_when_it_is_finished(found: dict[str, Any]) -> None:
    out = found["out"]
    assert "resumed    after batch " in out
    assert re.search(r"stopped    by SIGTERM after batch \d+; the same command resumes from \S+-rank0.pt", out)
    assert "is passed over: it is cut off or damaged (a run was killed, or the disk was full)" in out
    assert "File too large: make room and run the same command, which resumes from the last checkpoint" in out
    assert out.splitlines()[-1].startswith("finished   ")
    assert found["attempts"][-1]["journal"] == []
