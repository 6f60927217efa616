"""A program of its own: which batches each of two ranks hands over. Prints a JSON line."""

import json
import tempfile
import threading
from pathlib import Path
from typing import Any

from composer.utils import dist

from composer_packing.batch.lockstep import Lockstep
from tests.tools.forked import on_ranks
from tests.tools.numbered import Numbered
from tests.tools.reference import RESULT

CASES = {
    "ten against eleven": ([10], [11]),
    "one against thirty": ([1], [30]),
    "sometimes none": ([3], [0, 2, 0, 1]),
}
"""Batches that an epoch of each rank has, first rank first; several numbers take turns."""

EPOCHS = 3


def handed_over(batches: Lockstep) -> list[list[int]]:
    epochs = [[int(batch["input_ids"][0, 0]) for batch in batches] for _ in range(EPOCHS)]
    batches.close()
    return epochs


def all_handed_over() -> dict[str, Any]:
    """Of each case, and of the threads that are left."""
    rank = dist.get_global_rank()
    made = {name: Lockstep(Numbered(*counts[rank]), prefetch=2) for name, counts in CASES.items()}
    dist.initialize_dist("cpu")  # a Trainer may do so only after the data has been made
    found: dict[str, Any] = {name: handed_over(batches) for name, batches in made.items()}
    found["threads"] = [thread.name for thread in threading.enumerate() if "composer_packing" in thread.name]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(RESULT + json.dumps(on_ranks(2, all_handed_over, Path(folder))))
