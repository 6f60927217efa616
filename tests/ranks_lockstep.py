"""Run by `composer -n 2`: which batches each rank hands over. Prints a JSON line."""

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from composer.utils import dist

from composer_packing.batch import Batch
from composer_packing.leaving import run
from composer_packing.lockstep import Lockstep

Counts = int | tuple[int, ...]

CASES: dict[str, tuple[Counts, Counts]] = {
    "ten against eleven": (10, 11),
    "one against thirty": (1, 30),
    "sometimes none": (3, (0, 2, 0, 1)),
}
"""Batches that an epoch of each rank has; several numbers take turns."""

EPOCHS = 3


class Numbered:
    """Batches of one row that hold nothing but their number, from 0 on over all epochs."""

    def __init__(self, counts: Counts) -> None:
        self.counts = (counts,) if isinstance(counts, int) else counts
        self.epoch = 0
        self.given = 0

    def __iter__(self) -> Iterator[Batch]:
        count = self.counts[self.epoch % len(self.counts)]
        self.epoch += 1
        for _ in range(count):
            yield {
                "input_ids": torch.full((1, 2), self.given),
                "labels": torch.zeros((1, 2), dtype=torch.int64),
                "attention_mask": torch.ones((1, 2), dtype=torch.int64),
                "cu_seqlens": [torch.tensor([0, 2], dtype=torch.int32)],
                "max_seqlen": [2],
            }
            self.given += 1


def handed_over(batches: Lockstep) -> list[list[int]]:
    epochs = [[int(batch["input_ids"][0, 0]) for batch in batches] for _ in range(EPOCHS)]
    batches.close()
    return epochs


def main(arguments: list[str]) -> int:
    rank = dist.get_global_rank()
    made = {name: Lockstep(Numbered(counts[rank]), prefetch=2) for name, counts in CASES.items()}
    dist.initialize_dist("cpu")  # a Trainer may do so only after the data has been made
    found: dict[str, Any] = {name: handed_over(batches) for name, batches in made.items()}
    found["threads"] = [thread.name for thread in threading.enumerate() if "composer_packing" in thread.name]
    ranks = dist.all_gather_object(found)
    if rank == 0:
        print(json.dumps(ranks))
    return 0


run(main, sys.argv[1:])
