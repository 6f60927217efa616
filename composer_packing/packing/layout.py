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

Placing looks at lengths only. Rows are kept sorted by room, so that a document costs a binary search and
a short shift, and once no row has room for the shortest document nothing more is looked at. Filling
moves each token once. All of it is compiled and releases the interpreter's lock.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable, Tokens


class Layout(NamedTuple):
    """Where the documents of a batch lie.

    Attributes:
        documents: int64 `(placed,)`, their places in the table, row by row.
        first: int64 `(rows + 1,)`; row `r` holds `documents[first[r]:first[r + 1]]`.
        num_documents: int64 `(rows,)`, documents of each row.
        num_tokens: int64 `(rows,)`, real tokens of each row.
        cu_seqlens: int32 `(sum of segments,)`, of all rows. Padding is a segment of its own.
        segments: int64 `(rows,)`, entries of each row in `cu_seqlens`.
        max_seqlen: int64 `(rows,)`, longest segment of each row, which may be the padding.
        left: int64 `(waiting - placed,)`, places of those that were not placed, in waiting order.
        longest_wait: batches packed since the document that waited longest was read.
        displacement: sum over documents of how many places they lie before or behind their place in reading order.
    """

    documents: NDArray[np.int64]
    first: NDArray[np.int64]
    num_documents: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    segments: NDArray[np.int64]
    max_seqlen: NDArray[np.int64]
    left: NDArray[np.int64]
    longest_wait: int
    displacement: int


@compiled
def _lay_out(
    documents: DocumentTable,
    order: NDArray[np.int64],
    row_of: NDArray[np.int64],
    row_len: int,
    batch: int,
    emitted: int,
) -> tuple[Any, ...]:
    rows = num_placed = 0
    for row in row_of:
        rows = max(rows, row + 1)
        num_placed += row != NO_ROW
    first, following = np.zeros(rows + 1, np.int64), np.zeros(rows, np.int64)
    num_documents, num_tokens, max_seqlen = (
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
        np.zeros(rows, np.int64),
    )
    segments = np.empty(rows, np.int64)
    left = np.empty(len(order) - num_placed, np.int64)
    passed_over = 0
    for i in range(len(order)):
        row = row_of[i]
        if row == NO_ROW:
            left[passed_over] = order[i]
            passed_over += 1
        else:
            length = documents[order[i]].length
            num_documents[row] += 1
            num_tokens[row] += length
            max_seqlen[row] = max(max_seqlen[row], length)
    num_segments = 0
    for row in range(rows):
        following[row] = first[row]
        first[row + 1] = first[row] + num_documents[row]
        segments[row] = num_documents[row] + 1
        if num_tokens[row] < row_len:
            segments[row] += 1
            max_seqlen[row] = max(max_seqlen[row], row_len - num_tokens[row])
        num_segments += segments[row]

    placed = np.empty(num_placed, np.int64)
    for i in range(len(order)):
        row = row_of[i]
        if row != NO_ROW:
            placed[following[row]] = order[i]
            following[row] += 1

    cu_seqlens = np.empty(num_segments, np.int32)
    longest_wait = displacement = entry = 0
    for row in range(rows):
        end = 0
        cu_seqlens[entry] = end
        for i in range(first[row], first[row + 1]):
            document = documents[placed[i]]
            entry += 1
            end += document.length
            cu_seqlens[entry] = end
            longest_wait = max(longest_wait, batch - document.batch)
            displacement += abs(emitted + i - document.serial)
        if end < row_len:
            entry += 1
            cu_seqlens[entry] = row_len
        entry += 1
    return placed, first, num_documents, num_tokens, cu_seqlens, segments, max_seqlen, left, longest_wait, displacement


def lay_out(
    documents: DocumentTable,
    order: NDArray[np.int64],
    row_of: NDArray[np.int64],
    row_len: int,
    batch: int = 0,
    emitted: int = 0,
) -> Layout:
    """Put the placed documents in the order of their rows.

    Args:
        documents: the table.
        order: int64 `(waiting,)`, places in it, in waiting order.
        row_of: int64 `(waiting,)`, the row of each, -1 for none; the rows that are taken are the lowest.
        row_len: slots per row.
        batch: batches packed so far.
        emitted: documents placed so far.
    """
    return Layout(*_lay_out(documents, order, row_of, row_len, batch, emitted))


@compiled
def fill_rows(
    tokens: Tokens,
    documents: DocumentTable,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    pad_token_id: int,
    input_ids: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
) -> None:
    """Write the documents of each row end to end and pad the rest.

    Args:
        tokens: all documents' tokens.
        documents: the table.
        placed: `Layout.documents`.
        first: `Layout.first`.
        pad_token_id: what stands in the slots no document holds.
        input_ids: int64 `(rows, row_len)`, written whole.
        attention_mask: int64 `(rows, row_len)`, written whole: 1 where a document's token lies.
    """
    for row in range(len(input_ids)):
        at = 0
        for document in documents[placed[first[row] : first[row + 1]]]:
            start, end = document.start, at + document.length
            input_ids[row, at:end] = tokens[start : start + document.length]
            at = end
        input_ids[row, at:] = pad_token_id
        attention_mask[row, :at] = 1
        attention_mask[row, at:] = 0
