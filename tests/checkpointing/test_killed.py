import re
import sys
from typing import Any

import pytest

from tests.tools.killed_runs import INTERVAL, KILLS
from tests.tools.running import result_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `killed_runs` found."""
    told: dict[str, Any] = result_of(
        sys.executable, "-m", "tests.tools.killed_runs", str(tmp_path_factory.mktemp("killed")), "1"
    )
    return told


def test_a_run_that_is_killed_twenty_times_is_fed_what_one_in_peace_is_fed_batch_by_batch(
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
            assert last + 1 - may_lose <= min(batches) <= last + 1, "at most what came behind the last checkpoint"
            last, may_lose = max(batches), INTERVAL
        if "cut off" in attempt["how"]:
            may_lose = 2 * INTERVAL + 2  # the one before it is whole, wherever SIGTERM or an interval has put it
    assert fed == set(expected)


def test_each_way_to_end_a_run_gives_its_exit_code(found: dict[str, Any]) -> None:
    attempts = found["attempts"]
    kinds = {attempt["how"].removesuffix(", cut off") for attempt in attempts}
    assert kinds == {"first rank", "second rank", "both", "SIGTERM", "disk full", "undisturbed"}
    for attempt in attempts:
        how, codes = attempt["how"].removesuffix(", cut off"), attempt["codes"]
        if how == "SIGTERM":
            assert codes == [143, 143] or (codes[0] == 143 and not attempt["journal"]), "or while it started"
        elif how == "disk full":
            assert codes[0] == 2
            assert codes[1] not in (0, -9), "and does not have to be killed"
        elif how == "undisturbed":
            assert codes == [0, 0]
        else:
            killed = {"first rank": [0], "second rank": [1], "both": [0, 1]}[how]
            assert all(codes[rank] == -9 for rank in killed)
            assert 0 not in codes
            if attempt["journal"]:
                assert codes.count(-9) == len(killed), "the other need not be killed too"


def test_a_run_says_where_it_went_on_what_was_cut_off_and_when_it_is_finished(found: dict[str, Any]) -> None:
    out = found["out"]
    assert "resumed    after batch " in out
    assert re.search(r"stopped    by SIGTERM after batch \d+; the same command resumes from \S+-rank0.pt", out)
    assert "is cut off or damaged, as a run was killed or a disk full: it is passed over" in out
    assert "File too large: make room and run the same command, which goes on from the last checkpoint" in out
    assert out.splitlines()[-1].startswith("finished   ")
    assert found["attempts"][-1]["journal"] == []
