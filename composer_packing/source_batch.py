"""What the loader hands the packer: documents one by one, or many of them in one token array.

A `FlatSourceBatch` costs the packer next to nothing, and a worker process little to hand over. Three
documents of 3, 0 and 2 tokens::

    tokens    11 12 13 31 32
    lengths   3 0 2
    numbers   7 8 9

`flat_source_batch` makes one from documents: give it to a DataLoader as `collate_fn`, and the work is done in
its workers.
"""

import array
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class FlatSourceBatch(NamedTuple):
    """Documents end to end.

    Attributes:
        tokens: uint16, uint32 or any other integers, `(tokens,)`: ids of all documents.
        lengths: integers `(documents,)`, in tokens; 0 is passed over.
        numbers: integers `(documents,)`, what the source calls each; None where keyed masks are not drawn.
    """

    tokens: NDArray[np.integer[Any]]
    lengths: NDArray[np.integer[Any]]
    numbers: NDArray[np.integer[Any]] | None = None


SourceBatch = FlatSourceBatch | Sequence[Mapping[str, Any]]
"""A flat one, or `{"input_ids": ids}` per document, with `"document": number` for keyed masks."""


def token_dtype(vocab_size: int | None) -> Any:
    """The narrowest of uint16, uint32 and int64 that holds every id below `vocab_size`; None for any id."""
    if vocab_size is None or vocab_size > 2**32:
        return np.int64
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def flat_source_batch(
    documents: Sequence[Mapping[str, Any]], vocab_size: int | None = None, numbered: bool = False
) -> FlatSourceBatch:
    """Put documents end to end; a `collate_fn`, as `functools.partial(flat_source_batch, vocab_size=50368)`.

    Args:
        documents: `{"input_ids": ids}` each; ids are a list, numpy array or CPU tensor of integers,
            one-dimensional.
        vocab_size: ids lie below it and are stored in 16 or 32 bits accordingly; None for any id, as int64.
        numbered: each has `"document": number` too, which is kept, for keyed masks.

    Raises:
        TypeError: `documents`, a document or its number is something else.
        ValueError: an id is negative, or not below `vocab_size` or 2**63; `vocab_size` is not at least 1.
    """
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"{vocab_size=} must be at least 1")
    try:
        ids = [document["input_ids"] for document in documents]
    except (TypeError, KeyError, IndexError) as error:
        raise TypeError(
            f"a source batch must be a list of {{'input_ids': ids}}, one per document; "
            f"got {type(documents).__name__}: {str(documents)[:80]}"
        ) from error
    tokens, lengths = end_to_end("input_ids", ids, vocab_size)
    return FlatSourceBatch(tokens, lengths, _numbers(documents) if numbered else None)


def end_to_end(
    name: str, sequences: Sequence[Any], vocab_size: int | None = None
) -> tuple[NDArray[np.integer[Any]], NDArray[np.int64]]:
    """Ids of all sequences in one array, in the type `token_dtype` says, and how many each has.

    Args:
        name: what errors call a sequence.
        sequences: a list, numpy array or CPU tensor of integers each, one-dimensional.
        vocab_size: ids lie below it; None for any id.

    Raises:
        TypeError: a sequence is something else.
        ValueError: an id is negative, or not below `vocab_size` or 2**63.
    """
    try:
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    except TypeError as error:
        raise TypeError(_which_is_wrong(name, sequences)) from error
    tokens, dtype = _joined(name, sequences, vocab_size), token_dtype(vocab_size)
    if len(tokens):
        check_ids(int(tokens.min()), int(tokens.max()), vocab_size)
    return tokens.view(np.int64) if dtype is np.int64 else tokens.astype(dtype), lengths


def check_ids(smallest: int, largest: int, vocab_size: int | None) -> None:
    """Raise ValueError unless ids between these two lie below `vocab_size`, or for None below 2**63."""
    bound = 2**63 if vocab_size is None else min(vocab_size, 2**63)
    if smallest < 0 or largest >= bound:
        wrong = smallest if smallest < 0 else largest
        raise ValueError(f"token ids must lie between 0 and {bound - 1}; got {wrong}")


def _joined(name: str, sequences: Sequence[Any], vocab_size: int | None) -> NDArray[np.int64] | NDArray[np.uint64]:
    """Ids of all sequences end to end, int64, or uint64 from lists."""
    if all(type(sequence) is list for sequence in sequences):
        return _joined_lists(name, sequences, vocab_size)
    try:
        arrays = [np.asarray(sequence) for sequence in sequences if len(sequence)]
        joined = np.empty(sum(map(len, arrays)), np.int64)
        return np.concatenate(arrays, out=joined, casting="same_kind") if arrays else joined
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(_which_is_wrong(name, sequences)) from error


def _joined_lists(name: str, sequences: Sequence[list[int]], vocab_size: int | None) -> NDArray[np.uint64]:
    """Three times as fast as numpy, which finds out the type of every single item first."""
    ids = array.array("Q")
    try:
        for sequence in sequences:
            ids.fromlist(sequence)
    except TypeError as error:
        raise TypeError(_which_is_wrong(name, sequences)) from error
    except OverflowError:
        check_ids(min(sequence), max(sequence), vocab_size)
        raise
    return np.frombuffer(ids, np.uint64)


def _numbers(documents: Sequence[Mapping[str, Any]]) -> NDArray[np.int64]:
    try:
        numbers = (operator.index(document["document"]) for document in documents)
        return np.fromiter(numbers, np.int64, len(documents))
    except (TypeError, KeyError, OverflowError) as error:
        wrong = next(
            number for number in (document.get("document") for document in documents) if not _is_number(number)
        )
        raise TypeError(
            f"keyed masks need the number of each document, below 2**63, as {{'input_ids': ids, 'document': number}}; "
            f"got {wrong!r:.80} for one"
        ) from error


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and -(2**63) <= operator.index(value) < 2**63


def _which_is_wrong(name: str, sequences: Sequence[Any]) -> str:
    """Say which is the first that is no flat sequence of int64 ids."""
    for sequence in sequences:
        try:
            if len(sequence):
                np.concatenate([np.asarray(sequence)], out=np.empty(len(sequence), np.int64), casting="same_kind")
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return (
                f"{name} must be a flat sequence of integers that fit int64; got "
                f"{type(sequence).__name__}: {str(sequence)[:80]}"
            )
    raise AssertionError("every sequence is well formed")
