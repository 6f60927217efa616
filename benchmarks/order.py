"""How full rows are, how long documents wait and how far they move, for each strategy. The machine does not matter.

Document lengths are lognormal, from a fixed seed. Each strategy packs 200 batches. The wait of a document is the number
of batches that were packed since it was read. Its displacement is how many documents earlier or later it comes than in
reading order.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from composer_packing import (
    BatchShape,
    FlatSourceBatch,
    GreedyBestFitSequencePacker,
    KeyedMasking,
    LabelSettings,
    SequencePacker,
    SubsetSumSequencePacker,
)
from composer_packing.batch.contract import Batch

BATCHES = 200

# Mean and deviation of the logarithm, shortest, longest; row length, rows, documents per source batch, buffer size.
WORKLOADS = {
    "medium": ((5.25, 0.85, 8, 1024), (8192, 16, 400, 4000)),
    "long": ((7.0, 1.1, 16, 8192), (8192, 16, 8, 80)),
    "short": ((3.2, 0.65, 4, 256), (1024, 128, 4000, 40_000)),
    "medium, small buffer": ((5.25, 0.85, 8, 1024), (2048, 4, 8, 9)),
    "up to the row's length": ((6.5, 1.0, 8, 1024), (1024, 8, 16, 160)),
    "one row": ((5.0, 1.0, 8, 512), (512, 1, 4, 40)),
}


class Endless:
    """Endless source batches. The ids of the tokens do not matter."""

    def __init__(self, mean: float, deviation: float, shortest: int, longest: int, size: int) -> None:
        self.lognormal = mean, deviation
        self.between = shortest, longest
        self.size = size

    def __iter__(self) -> Iterator[FlatSourceBatch]:
        rng = np.random.default_rng(3)
        for first in itertools.count(0, self.size):
            lengths = np.clip(rng.lognormal(*self.lognormal, self.size), *self.between).astype(np.int64)
            yield FlatSourceBatch(np.zeros(lengths.sum(), np.uint16), lengths, np.arange(first, first + self.size))


def batches(strategy: type[SequencePacker], workload: str, count: int = BATCHES) -> list[Batch]:
    """The first batches of a workload."""
    lengths, (row_len, rows, size, buffer_size) = WORKLOADS[workload]
    shape = BatchShape(size, rows, row_len, buffer_size)
    packer = strategy(Endless(*lengths, size), shape, LabelSettings(keyed_masking=KeyedMasking(0, 10, (0,))))
    return list(itertools.islice(packer, count))


def efficiency(given: list[Batch]) -> float:
    """The share of slots that hold a token."""
    return float(sum(sum(batch["num_tokens"]) for batch in given) / sum(batch["input_ids"].numel() for batch in given))


def mean_displacement(given: list[Batch]) -> float:
    """By how many documents a document has moved, on average."""
    documents = sum(sum(batch["num_documents"]) for batch in given)
    return float(sum(batch["displacement_documents"] for batch in given) / documents)


def longest_wait(given: list[Batch]) -> int:
    """Batches that were packed while the document that waited longest waited."""
    return max(int(batch["longest_wait_batches"]) for batch in given)


def main() -> None:
    """Print a table."""
    print(f"{'':24}{'strategy':12}{'efficiency':>12}{'lowest':>9}{'longest wait':>14}{'displacement':>14}")
    for name in WORKLOADS:
        for strategy in (GreedyBestFitSequencePacker, SubsetSumSequencePacker):
            given = batches(strategy, name)
            print(
                f"{name:24}{strategy.__name__.split('Sequence')[0]:14}{efficiency(given):10.5f}"
                f"{min(efficiency([batch]) for batch in given):9.4f}"
                f"{longest_wait(given):14}{mean_displacement(given):14.1f}"
            )


if __name__ == "__main__":
    main()
