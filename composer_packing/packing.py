"""Best fit and row filling: which row each document goes to, and writing it there.

Each document goes to the row with the least room left that still holds it, the lowest such row on a
tie. A document that fits nowhere waits for a later batch. Three rows of eight slots, documents
`a`..`f` of lengths 5, 4, 3, 6, 3, 2 in reading order::

    a -> row 0   aaaaa...   ........   ........    all rows are empty: the lowest
    b -> row 1   aaaaa...   bbbb....   ........    no room for 4 in row 0
    c -> row 0   aaaaaccc   bbbb....   ........    3 left over 4 and 8 left
    d -> row 2   aaaaaccc   bbbb....   dddddd..
    e -> row 1   aaaaaccc   bbbbeee.   dddddd..
    f -> row 2   aaaaaccc   bbbbeee.   ddddddff    one slot of padding in 24

Placing looks at lengths only and costs one pass over the rows per document; filling moves each token
once. Both are compiled, release the interpreter's lock, and see a whole waiting buffer per call.
This file knows numpy and numba, nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])

NO_ROW = -1
"""What stands for a row where a document fits none."""

NO_DOCUMENT = -1
"""What stands for a document where a segment is padding."""


def compiled(function: Function) -> Function:
    """Compile `function` with numba, without the interpreter's lock, cached on disk where that works."""
    try:
        jitted: Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written: a read-only install without a HOME
        jitted = numba.njit(nogil=True)(function)
    return jitted


class FilledRows(NamedTuple):
    """Rows before masking.

    Attributes:
        input_ids: int64 `(rows, row_len)`.
        attention_mask: int64 `(rows, row_len)`.
        cu_seqlens: int32, of all rows.
        offsets: int64 `(rows + 1,)`, where each row begins in `cu_seqlens`.
        longest: int64 `(rows,)`, longest segment of each row, which may be the padding.
        document_at: int64, beside `cu_seqlens`: which document ends there, -1 for padding and at 0.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    offsets: NDArray[np.int64]
    longest: NDArray[np.int64]
    document_at: NDArray[np.int64]


@compiled
def find_best_fit(remaining_spaces: NDArray[np.int64], seq_len: int) -> int:
    """Row with the least room that holds `seq_len` tokens, the lowest on a tie; -1 where none does.

    Args:
        remaining_spaces: int64 `(rows,)`, free slots of each row.
        seq_len: length of the document in tokens.
    """
    best = NO_ROW
    for row in range(len(remaining_spaces)):
        if remaining_spaces[row] >= seq_len and (best == NO_ROW or remaining_spaces[row] < remaining_spaces[best]):
            best = row
    return best


@compiled
def place_documents(lengths: NDArray[np.int64], remaining_spaces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Place documents one after the other by best fit.

    Args:
        lengths: int64 `(documents,)`, in reading order.
        remaining_spaces: int64 `(rows,)`, free slots of each row; lowered in place.

    Returns:
        int64 `(documents,)`: the row of each document, -1 where it has to wait.
    """
    row_of_document = np.empty(len(lengths), np.int64)
    for document in range(len(lengths)):
        row = find_best_fit(remaining_spaces, lengths[document])
        row_of_document[document] = row
        if row != NO_ROW:
            remaining_spaces[row] -= lengths[document]
    return row_of_document


@compiled
def fill_rows(
    tokens: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    row_of_document: NDArray[np.int64],
    input_ids: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
    pad_token_id: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Lay the placed documents end to end in their rows and pad the rest.

    Args:
        tokens: int64, all documents' tokens.
        starts: int64 `(documents,)`, where each document begins in `tokens`.
        lengths: int64 `(documents,)`, each at least 1.
        row_of_document: int64 `(documents,)`, from `place_documents`; -1 is passed over.
        input_ids: int64 `(rows, row_len)`, written whole.
        attention_mask: int64 `(rows, row_len)`, written whole: 1 where a document's token lies.
        pad_token_id: what stands in the slots no document holds.

    Returns:
        `cu_seqlens` of all rows in one int32 array; int64 `(rows + 1,)` offsets, row `r` owning
        `cu_seqlens[offsets[r]:offsets[r + 1]]`; int64 `(rows,)` longest segment of each row; and beside
        `cu_seqlens` the int64 place in `lengths` of the document that ends there. Padding is a segment of
        its own.
    """
    rows, row_len = input_ids.shape
    filled = np.zeros(rows, np.int64)
    segments = np.zeros(rows, np.int64)
    for document in range(len(lengths)):
        row = row_of_document[document]
        if row != NO_ROW:
            filled[row] += lengths[document]
            segments[row] += 1

    offsets = np.zeros(rows + 1, np.int64)
    for row in range(rows):
        padded = 1 if filled[row] < row_len else 0
        offsets[row + 1] = offsets[row] + 1 + segments[row] + padded
    cu_seqlens = np.zeros(offsets[rows], np.int32)
    document_at = np.full(offsets[rows], NO_DOCUMENT)
    longest = np.zeros(rows, np.int64)

    next_segment = offsets[:-1] + 1
    filled[:] = 0
    for document in range(len(lengths)):
        row = row_of_document[document]
        if row == NO_ROW:
            continue
        start, length, at = starts[document], lengths[document], filled[row]
        for i in range(length):
            input_ids[row, at + i] = tokens[start + i]
            attention_mask[row, at + i] = 1
        filled[row] = at + length
        cu_seqlens[next_segment[row]] = at + length
        document_at[next_segment[row]] = document
        next_segment[row] += 1
        longest[row] = max(longest[row], length)

    for row in range(rows):
        at = filled[row]
        if at < row_len:
            input_ids[row, at:] = pad_token_id
            attention_mask[row, at:] = 0
            cu_seqlens[offsets[row + 1] - 1] = row_len
            longest[row] = max(longest[row], row_len - at)
    return cu_seqlens, offsets, longest, document_at


def filled_rows(
    tokens: NDArray[np.int64],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    row_of_document: NDArray[np.int64],
    row_len: int,
    pad_token_id: int,
) -> FilledRows:
    """Lay documents out in new rows.

    Args:
        row_of_document: as in `fill_rows`; it places a document at least, and in each row up to its largest.
        row_len: slots per row.

    The other arguments are those of `fill_rows`.
    """
    input_ids = np.empty((row_of_document.max() + 1, row_len), np.int64)
    attention_mask = np.empty_like(input_ids)
    segments = fill_rows(tokens, starts, lengths, row_of_document, input_ids, attention_mask, pad_token_id)
    return FilledRows(input_ids, attention_mask, *segments)
