"""Resident memory after thousands of batches, for three sizes of the buffer.

The claim: resident memory stays flat over 20,000 batches, and grows with the buffer, not with the data.

Each line comes from a process of its own. The process packs batches of `ROWS` rows of `ROW_LEN` slots with keyed masks
and drops them. It prints its resident memory in MB, less the resident memory before the packer was made; all kernels
are compiled before that. The documents have lognormal lengths and are drawn as they are read, so that nothing but the
packer can keep them. The last line reads Python lists, for fewer batches, and also counts the objects that Python has
allocated, as a reference that is never released would show there first. The script needs Linux. `make benchmark` runs
it.

Best fit leaves long documents waiting, and more of them the longer it runs. So the same number of documents comes to
more tokens over time, and its arrays may grow once more after thousands of batches. The bound is `buffer_size`
documents of the greatest length.
"""

import gc
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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
from composer_packing.packing.source_batch import SourceBatch

ROWS, ROW_LEN, SIZE, LONGEST = 4, 2048, 32, 1024
VOCAB_SIZE, MASK, PAD = 50_000, 4, 0


class Case(NamedTuple):
    """What a process packs, and after how many batches it measures."""

    name: str
    strategy: type[SequencePacker]
    buffer: int
    lists: bool
    looks: tuple[int, ...]


LOOKS = (1_000, 5_000, 10_000, 20_000)
CASES = (
    Case("best fit", GreedyBestFitSequencePacker, 320, False, LOOKS),
    Case("subset sum", SubsetSumSequencePacker, 320, False, LOOKS),
    Case("best fit, buffer x 4", GreedyBestFitSequencePacker, 4 * 320, False, LOOKS),
    Case("subset sum, buffer x 4", SubsetSumSequencePacker, 4 * 320, False, LOOKS),
    Case("best fit, buffer x 16", GreedyBestFitSequencePacker, 16 * 320, False, LOOKS),
    Case("subset sum, buffer x 16", SubsetSumSequencePacker, 16 * 320, False, LOOKS),
    Case("subset sum, lists", SubsetSumSequencePacker, 320, True, (500, 1_000, 2_000, 4_000)),
)


def source(lists: bool) -> Iterator[SourceBatch]:
    """Endless source batches, all different."""
    rng = np.random.default_rng(0)
    for number in itertools.count(step=SIZE):
        lengths = np.clip(rng.lognormal(5.25, 0.85, SIZE), 8, LONGEST).astype(np.int64)
        tokens = rng.integers(5, VOCAB_SIZE, lengths.sum(), np.uint16)
        numbers = np.arange(number, number + SIZE)
        if lists:
            documents = np.split(tokens, lengths.cumsum()[:-1])
            yield [{"input_ids": ids.tolist(), "document": int(of)} for ids, of in zip(documents, numbers, strict=True)]
        else:
            yield FlatSourceBatch(tokens, lengths, numbers)


def packer(case: Case) -> SequencePacker:
    """The packer of a case."""
    shape = BatchShape(SIZE, ROWS, ROW_LEN, case.buffer)
    keyed_masking = KeyedMasking(17, VOCAB_SIZE, range(5))
    labels = LabelSettings(pad_token_id=PAD, mask_token_id=MASK, keyed_masking=keyed_masking)
    return case.strategy(source(case.lists), shape, labels)


def resident() -> float:
    """Resident memory of this process in MB."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def grown(case: Case) -> tuple[list[float], int]:
    """Megabytes above the start at each measurement, and the growth in Python objects since the first of them."""
    for _ in itertools.islice(packer(case._replace(buffer=2 * SIZE)), 20):
        pass
    baseline = resident()
    batches = iter(packer(case))
    looks, objects = [], []
    for look, before in zip(case.looks, (0, *case.looks), strict=False):
        for _ in itertools.islice(batches, look - before):
            pass
        looks.append(resident() - baseline)
        objects.append(sys.getallocatedblocks())
    return looks, objects[-1] - objects[0]


def main() -> None:
    """Print a table."""
    print(" " * 25 + "MB after" + "".join(f"{look:9,}" for look in LOOKS) + " batches    objects since the first")
    context = multiprocessing.get_context("spawn")
    for case in CASES:
        with context.Pool(1) as pool:  # a process for each case, as memory that one case frees would serve the next
            looks, objects = pool.apply(grown, (case,))
        if case.looks != LOOKS:
            print(" " * 25 + "MB after" + "".join(f"{look:9,}" for look in case.looks) + " batches")
        print(f"{case.name:33}" + "".join(f"{look:9.2f}" for look in looks) + f"{objects:16}")


if __name__ == "__main__":
    main()
