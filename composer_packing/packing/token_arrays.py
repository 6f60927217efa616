"""Sequences of token ids or loss masks: checked, and put end to end in one array of a narrow type."""

import array
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.errors import one_line
from composer_packing.packing.document_table import LossMask, Tokens


def token_dtype(vocab_size: int | None) -> Any:
    """The narrowest of uint16, uint32 and int64 that holds every id below `vocab_size`; int64 for None."""
    if vocab_size is None or vocab_size > 2**32:
        return np.int64
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def concatenate_ids(
    name: str, sequences: Sequence[Any], vocab_size: int | None = None, values: str = "token ids"
) -> tuple[Tokens, NDArray[np.int64]]:
    """The ids of all sequences in one array, and the length of each sequence.

    Args:
        name: what errors call a sequence.
        sequences: a one-dimensional list, numpy array or CPU tensor of integers each.
        vocab_size: all ids must lie below it; None for any id.
        values: what errors call the ids.

    Returns:
        The ids, `(ids,)` in the type that `token_dtype` gives; and the lengths, int64 `(sequences,)`.

    Raises:
        TypeError: a sequence has another type.
        ValueError: an id is negative, or not below `vocab_size` or 2**63.
    """
    try:
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    except TypeError as error:
        raise TypeError(_describe_wrong_sequence(name, sequences)) from error
    tokens, dtype = _concatenate(name, sequences, vocab_size, values), token_dtype(vocab_size)
    if len(tokens):
        check_ids(int(tokens.min()), int(tokens.max()), vocab_size, values)
    return tokens.view(np.int64) if dtype is np.int64 else tokens.astype(dtype), lengths


def concatenate_loss_masks(masks: Sequence[Any], lengths: NDArray[np.int64]) -> LossMask:
    """The loss masks of all documents in one array.

    Args:
        masks: a list, numpy array or CPU tensor of 0 and 1, or of bools, each.
        lengths: int64 `(documents,)`, tokens of each document.

    Returns:
        uint8 `(tokens,)`.

    Raises:
        TypeError: a mask has another type.
        ValueError: a mask holds another value than 0 and 1, or is not as long as its document.
    """
    joined, mask_lengths = concatenate_ids("each loss mask", masks, 2, "values of loss masks")
    for index in np.flatnonzero(mask_lengths != lengths)[:1]:
        raise ValueError(f"loss mask {index} has {mask_lengths[index]} values for {lengths[index]} tokens")
    return joined.astype(np.uint8)


def check_ids(smallest: int, largest: int, vocab_size: int | None, values: str = "token ids") -> None:
    """Raise ValueError unless ids between these two lie below `vocab_size`, or below 2**63 for None."""
    bound = 2**63 if vocab_size is None else min(vocab_size, 2**63)
    if smallest < 0 or largest >= bound:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"{values} must lie between 0 and {bound - 1}; got {wrong}")


def _concatenate(
    name: str, sequences: Sequence[Any], vocab_size: int | None, values: str
) -> NDArray[np.int64] | NDArray[np.uint64]:
    """The ids of all sequences end to end: int64, or uint64 if all sequences are lists."""
    if all(type(sequence) is list for sequence in sequences):
        return _concatenate_lists(name, sequences, vocab_size, values)
    try:
        arrays = [np.asarray(sequence) for sequence in sequences if len(sequence)]
        joined = np.empty(sum(map(len, arrays)), np.int64)
        return np.concatenate(arrays, out=joined, casting="same_kind") if arrays else joined
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(_describe_wrong_sequence(name, sequences)) from error


def _concatenate_lists(
    name: str, sequences: Sequence[list[int]], vocab_size: int | None, values: str
) -> NDArray[np.uint64]:
    """The same for lists. `array` is three times as fast as numpy, which looks up the type of every item first."""
    ids = array.array("Q")
    try:
        for sequence in sequences:
            ids.fromlist(sequence)
        return np.frombuffer(ids, np.uint64)
    except OverflowError:
        with contextlib.suppress(TypeError):  # the sequence also holds an item that is not a number
            check_ids(min(sequence), max(sequence), vocab_size, values)
        raise TypeError(_describe_wrong_sequence(name, sequences)) from None
    except TypeError as error:
        raise TypeError(_describe_wrong_sequence(name, sequences)) from error


def _describe_wrong_sequence(name: str, sequences: Sequence[Any]) -> str:
    """An error text that shows the first sequence that is not a flat sequence of int64 ids."""
    for sequence in sequences:
        try:
            if len(sequence):
                np.concatenate([np.asarray(sequence)], out=np.empty(len(sequence), np.int64), casting="same_kind")
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return f"{name} must be a flat sequence of integers that fit int64; got {one_line(sequence)}"
    raise AssertionError("every sequence is well formed")
