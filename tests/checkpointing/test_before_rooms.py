"""The package gives the same batches as before it was divided into rooms, bit for bit."""

import json
import sys
from typing import Any

import pytest

from tests.tools import ROOT
from tests.tools.running import result_of

RECORDED = ROOT / "tests" / "golden" / "before_rooms"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("before_rooms")
    found: dict[str, Any] = result_of(sys.executable, "-m", "tests.tools.ranks_before_rooms", str(folder))
    return found


@pytest.mark.parametrize("ranks", ["2 ranks", "1 rank"])
def test_a_run_resumes_from_an_old_checkpoint_with_the_same_batches(found: dict[str, Any], ranks: str) -> None:
    recorded = json.loads((RECORDED / "fed.json").read_text())
    assert len(recorded[ranks]) == 8 * int(ranks[0])
    assert found["fed"][ranks] == recorded[ranks]


def test_the_first_fifty_batches_of_every_objective_and_strategy_are_the_same(found: dict[str, Any]) -> None:
    recorded = json.loads((RECORDED / "batches.json").read_text())
    assert len(recorded) == 3 * 2 * (1 + 2)
    assert {len(hashes.split()) for hashes in recorded.values()} == {50}
    assert found["batches"] == recorded
