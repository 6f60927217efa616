"""Seconds to pack a million short sequences into blocks, for each placement, and in plain Python.

The lengths are lognormal, from a fixed seed, with a mean of 20 tokens. `pack_sequences` packs lists and gives lists.
`pack_blocks` packs arrays and gives arrays. The plain baseline is the split placement written in the simplest way: one
list of all tokens is cut into slices. The baseline checks nothing and passes on the integers it was given, while
`pack_sequences` makes new ones.

Everything is measured in one process after all code is compiled. The contestants take turns, and medians are printed.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from composer_packing.packing.blocks import pack_blocks, pack_sequences

SEQUENCES, ROUNDS, VOCAB_SIZE = 1_000_000, 3, 50_000
BLOCK_LENGTHS = (512, 2048)

PLACEMENTS: dict[str, dict[str, Any]] = {
    "split": {},
    "next block": {"split": False},
    "best fit": {"split": False, "best_fit": True},
}


def plain(sequences: list[list[int]], max_seq_length: int) -> tuple[list[list[int]], list[list[int]]]:
    """The result of `pack_sequences`, in plain Python."""
    tokens: list[int] = []
    for sequence in sequences:
        tokens.extend(sequence[:max_seq_length])
    blocks = [tokens[at : at + max_seq_length] for at in range(0, len(tokens), max_seq_length)]
    masks = [[1] * len(block) for block in blocks]
    if blocks:
        padding = [0] * (max_seq_length - len(blocks[-1]))
        blocks[-1] += padding
        masks[-1] += padding
    return blocks, masks


def seconds(pack: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    started = time.perf_counter()
    result = pack(*arguments, **options)
    took = time.perf_counter() - started
    del result  # the time to free the memory is not counted
    return took


def main() -> None:
    """Print a table."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(20) - 0.8**2 / 2, 0.8, SEQUENCES), 1, 512).astype(np.int64)
    arrays = np.split(rng.integers(0, VOCAB_SIZE, lengths.sum()), np.cumsum(lengths)[:-1])
    lists = [array.tolist() for array in arrays]
    assert plain(lists[:1000], 512) == pack_sequences(lists[:1000], 512)
    print(f"{SEQUENCES:,} sequences, {lengths.sum():,} tokens, seconds:")
    print(f"{'block':>6} {'placement':24}{'lists':>8}{'arrays':>8}")
    for block in BLOCK_LENGTHS:
        for how in PLACEMENTS.values():
            pack_blocks(arrays[:1000], block, **how)
        took: dict[str, list[list[float]]] = {}
        for _ in range(ROUNDS):
            took.setdefault("plain Python, split", []).append([seconds(plain, lists, block)])
            for name, how in PLACEMENTS.items():
                of_lists = seconds(pack_sequences, lists, block, **how)
                took.setdefault(name, []).append([of_lists, seconds(pack_blocks, arrays, block, **how)])
        for name, rounds in took.items():
            medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
            print(f"{block:6} {name:24}" + "".join(f"{median:8.2f}" for median in medians))


if __name__ == "__main__":
    main()
