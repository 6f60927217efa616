"""Nanoseconds per token of packing and masking, beside a plain implementation and the cost of writing alone.

Everything is measured in one process, in turns, and given as medians; on a shared machine only the ratios
mean something. Run it as `make benchmark`. The contestants:

- ours: `GreedyBestFitSequencePacker`, from int64 arrays and from Python lists.
- plain: the same batches by numpy, one document at a time with a compiled best fit.
- floor: writing the three int64 output arrays and nothing else.
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing import GreedyBestFitSequencePacker, find_best_fit
from composer_packing.waiting import SourceBatch

BATCHES, ROUNDS = 12, 7
VOCAB_SIZE, MASK, PAD, IGNORE = 50_000, 4, 0, -100


class Workload(NamedTuple):
    """Lognormal document lengths, cut to a range, and the shape of a batch."""

    name: str
    mean: float
    deviation: float
    shortest: int
    longest: int
    row_len: int
    rows: int

    def documents(self) -> list[NDArray[np.int64]]:
        """Enough documents for all batches of a round and the buffer."""
        rng = np.random.default_rng(0)
        tokens = 2 * (BATCHES + 12) * self.row_len * self.rows
        lengths = rng.lognormal(self.mean, self.deviation, tokens // self.shortest)
        lengths = np.clip(lengths, self.shortest, self.longest).astype(np.int64)
        lengths = lengths[: np.searchsorted(lengths.cumsum(), tokens)]
        return np.split(rng.integers(5, VOCAB_SIZE, lengths.sum()), lengths.cumsum()[:-1])


WORKLOADS = (
    Workload("medium documents", 5.25, 0.85, 8, 1024, 8192, 16),
    Workload("long documents", 7.0, 1.1, 16, 8192, 8192, 16),
    Workload("short documents", 3.2, 0.65, 4, 256, 1024, 128),
)


def ours(batches: list[SourceBatch], size: int, workload: Workload) -> Iterator[NDArray[np.int64]]:
    """Attention masks of our packer's batches."""
    packer = GreedyBestFitSequencePacker(
        batches, size, workload.longest, workload.rows, workload.row_len, 10 * size, PAD, MASK
    )
    for batch in packer:
        yield batch["attention_mask"].numpy()


def plain(batches: list[SourceBatch], size: int, workload: Workload) -> Iterator[NDArray[np.int64]]:
    """Attention masks of the same batches, made without our kernels."""
    rows, row_len, buffer_size = workload.rows, workload.row_len, 10 * size
    rng = np.random.default_rng(42)
    waiting: deque[NDArray[np.int64]] = deque()
    reader = iter(batches)
    while True:
        ids = np.full((rows, row_len), PAD, np.int64)
        room = np.full(rows, row_len)
        skipped: list[NDArray[np.int64]] = []
        while True:
            if not waiting:
                limit = buffer_size - len(skipped)
                while buffer_size - len(waiting) > size and len(waiting) + size <= limit:
                    batch = next(reader, [])
                    if not batch:
                        break
                    waiting.extend(np.asarray(document["input_ids"]) for document in batch)
                if not waiting:
                    break
            document = waiting.popleft()
            row = find_best_fit(room, len(document))
            if row < 0:
                skipped.append(document)
                continue
            at = row_len - room[row]
            ids[row, at : at + len(document)] = document
            room[row] -= len(document)
        waiting.extendleft(skipped)
        if (room == row_len).any():
            return
        real = (np.arange(row_len) < (row_len - room)[:, None]).astype(np.int64)
        draw = rng.random(ids.shape)
        np.where((draw < 0.3) & (real == 1), ids, IGNORE)
        ids = np.where(draw < 0.24, MASK, ids)
        words = rng.integers(0, ids.max() + 1, ids.shape)
        np.where((draw >= 0.24) & (draw < 0.27), words, ids)
        yield real


def floor(workload: Workload) -> Iterator[NDArray[np.int64]]:
    """Three arrays of the batch's shape, written once."""
    while True:
        ids, labels, real = (np.full((workload.rows, workload.row_len), number) for number in (5, IGNORE, 1))
        assert ids.shape == labels.shape
        yield real


def nanoseconds_per_token(masks: Iterator[NDArray[np.int64]]) -> float:
    """Over `BATCHES` batches, after one to warm up."""
    next(masks)
    started = time.perf_counter_ns()
    taken = list(itertools.islice(masks, BATCHES))
    spent = time.perf_counter_ns() - started
    return spent / sum(int(mask.sum()) for mask in taken)


def main() -> None:
    """Print a table."""
    columns = ("ours, arrays", "ours, lists", "plain, arrays", "plain, lists", "floor", "efficiency")
    print(" " * 18 + "".join(f"{column:>14}" for column in columns))
    for workload in WORKLOADS:
        arrays = [{"input_ids": document} for document in workload.documents()]
        lists = [{"input_ids": document["input_ids"].tolist()} for document in arrays]
        size = len(arrays) // (2 * (BATCHES + 12))
        sources: list[list[SourceBatch]] = [
            [kind[at : at + size] for at in range(0, len(kind), size)] for kind in (arrays, lists)
        ]
        contestants: list[Callable[[], Any]] = [
            *(partial(contestant, source, size, workload) for contestant in (ours, plain) for source in sources),
            partial(floor, workload),
        ]
        times = [[nanoseconds_per_token(contestant()) for contestant in contestants] for _ in range(ROUNDS)]
        efficiency = np.mean([mask.mean() for mask in itertools.islice(ours(sources[0], size, workload), BATCHES)])
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        print(f"{workload.name:18}" + "".join(f"{median:14.2f}" for median in medians) + f"{efficiency:14.4f}")


if __name__ == "__main__":
    main()
