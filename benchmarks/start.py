"""Seconds from the start of a process to its first batch, with and without a compile cache.

The claim: with a warm compile cache, the first batch comes within 3 seconds of the start, and the core adds less than a
second to importing torch.

Each figure is the time from the start of an interpreter until it prints that it is done. Each measurement is a process
of its own, and the lines take turns. The script prints the median, the fastest and the slowest. The compile cache lies
in a temporary folder. Each turn begins with an empty cache, which the first process fills and the next ones read.
`make benchmark` runs this script. The lines:

- import torch: nothing else.
- import composer_packing: torch and the core of this package.
- first batch, warm cache: also a `BufferedIterable` over a `SubsetSumSequencePacker` with keyed masks, and its first
  batch of `ROWS` rows of `ROW_LEN` slots.
- first batch, empty cache: the same, and everything has to be compiled.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROUNDS, WARM_PER_ROUND = 3, 3
ROWS, ROW_LEN, SIZE, VOCAB_SIZE, MASK, PAD = 16, 8192, 512, 50_000, 4, 0


def import_torch() -> None:
    import torch  # noqa: F401


def import_core() -> None:
    import torch  # noqa: F401

    import composer_packing  # noqa: F401


def first_batch() -> None:
    from composer_packing import (
        BatchShape,
        BufferedIterable,
        FlatSourceBatch,
        KeyedMasking,
        LabelSettings,
        SubsetSumSequencePacker,
    )

    def source_batch(number: int) -> FlatSourceBatch:
        rng = np.random.default_rng(number)
        lengths = rng.integers(8, 512, SIZE)
        tokens = rng.integers(5, VOCAB_SIZE, lengths.sum(), np.uint16)
        return FlatSourceBatch(tokens, lengths, np.arange(number * SIZE, (number + 1) * SIZE))

    shape = BatchShape(SIZE, ROWS, ROW_LEN, 10 * SIZE)
    keyed_masking = KeyedMasking(17, VOCAB_SIZE, range(5))
    labels = LabelSettings(pad_token_id=PAD, mask_token_id=MASK, keyed_masking=keyed_masking)
    packer = SubsetSumSequencePacker(map(source_batch, range(1000)), shape, labels)
    next(iter(BufferedIterable(packer, 5)))


def seconds(goal: str, cache: str) -> float:
    """Seconds from the start of a process until it has reached a goal."""
    started = time.monotonic()
    child = subprocess.run(
        [sys.executable, __file__, goal],
        env=os.environ | {"NUMBA_CACHE_DIR": cache},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(child.stdout) - started  # this clock is the same in all processes


def main() -> None:
    """Print a table."""
    took: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as cache:
            took.setdefault("first batch, empty cache", []).append(seconds("first_batch", cache))
            for _ in range(WARM_PER_ROUND):
                took.setdefault("first batch, warm cache", []).append(seconds("first_batch", cache))
                took.setdefault("import torch", []).append(seconds("import_torch", cache))
                took.setdefault("import composer_packing", []).append(seconds("import_core", cache))
    print(" " * 25 + "   seconds   fastest   slowest")
    for name, times in sorted(took.items(), key=lambda item: statistics.median(item[1])):
        print(f"{name:25}{statistics.median(times):10.2f}{min(times):10.2f}{max(times):10.2f}")
    added = statistics.median(took["import composer_packing"]) - statistics.median(took["import torch"])
    print(f"{'added to torch':25}{added:10.2f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        {"import_torch": import_torch, "import_core": import_core, "first_batch": first_batch}[sys.argv[1]]()
        print(time.monotonic(), flush=True)
    else:
        main()
