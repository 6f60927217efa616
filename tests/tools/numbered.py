"""Batches that say which they are."""

from collections.abc import Iterator

import torch

from composer_packing.batch.contract import Batch


class Numbered:
    """Batches of one row that hold nothing but their number, from 0 on over all epochs."""

    def __init__(self, *counts: int, targets: int = 1, fails_at: int | None = None) -> None:
        self.counts = counts
        self.targets = targets
        self.fails_at = fails_at
        self.epoch = 0
        self.given = 0

    def __iter__(self) -> Iterator[Batch]:
        count = self.counts[self.epoch % len(self.counts)]
        self.epoch += 1
        for _ in range(count):
            if self.given == self.fails_at:
                raise OSError("record 37 is broken")
            yield {
                "input_ids": torch.full((1, 2), self.given),
                "labels": torch.tensor([[5 if self.targets else -100, -100]]),
                "attention_mask": torch.ones((1, 2), dtype=torch.int64),
                "cu_seqlens": [torch.tensor([0, 2], dtype=torch.int32)],
                "max_seqlen": [2],
            }
            self.given += 1
