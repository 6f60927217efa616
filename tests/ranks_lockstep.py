"""Run by `composer -n 2`: which batches each rank hands over. Prints a JSON line."""

import json
import sys
import threading
from typing import Any

from composer.utils import dist

from composer_packing.leaving import run
from composer_packing.lockstep import Lockstep
from tests.reference import RESULT
from tests.test_lockstep import Numbered

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


def main(arguments: list[str]) -> int:
    rank = dist.get_global_rank()
    made = {name: Lockstep(Numbered(*counts[rank]), prefetch=2) for name, counts in CASES.items()}
    dist.initialize_dist("cpu")  # a Trainer may do so only after the data has been made
    found: dict[str, Any] = {name: handed_over(batches) for name, batches in made.items()}
    found["threads"] = [thread.name for thread in threading.enumerate() if "composer_packing" in thread.name]
    ranks = dist.all_gather_object(found)
    if rank == 0:
        print(RESULT + json.dumps(ranks))
    return 0


run(main, sys.argv[1:])
