"""The layout of a batch: the order of the documents in each row, and the rows as token ids.

Four documents in waiting order, and the row that the strategy has chosen for each::

    document    aaa   b   c   dd            row 0   dd..
    row           1   -   1   0      -->    row 1   aaac        b found no row and waits

Laying out looks at lengths only. Filling the rows then copies each token once. Both are compiled and release the
interpreter's lock. As in `ingest`, calls of compiled code are given plain arrays and give plain tuples.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentArrays, DocumentTable, Tokens
from composer_packing.packing.ingest import copy_tokens


class Layout(NamedTuple):
    """Where the documents of a batch lie.

    Attributes:
        documents: int64 `(placed,)`, indices into the table of the documents in the batch, row by row.
        first: int64 `(rows + 1,)`; row `r` holds `documents[first[r]:first[r + 1]]`.
        num_documents: int64 `(rows,)`, documents of each row.
        num_tokens: int64 `(rows,)`, real tokens of each row.
        cu_seqlens: int32 `(sum of segments,)`, boundaries of the segments of all rows, row after row: 0 and the end of
            each segment. The padding at the end of a row is a segment too.
        segments: int64 `(rows,)`, entries of each row in `cu_seqlens`.
        max_seqlen: int64 `(rows,)`, longest segment of each row, which may be the padding.
        left: int64 `(waiting - placed,)`, indices into the table of the documents without a row, in waiting order.
        longest_wait: batches packed since the document was read that has waited longest.
        displacement: sum over the documents of how far each lies from its position in reading order, in documents.
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


def lay_out(
    table: DocumentTable,
    order: NDArray[np.int64],
    row_of: NDArray[np.int64],
    row_len: int,
    batch: int = 0,
    emitted: int = 0,
) -> Layout:
    """Put the documents of a batch in the order of their rows.

    Args:
        table: the table of documents.
        order: int64 `(waiting,)`, indices into the table, in waiting order.
        row_of: int64 `(waiting,)`, the row of each document, `NO_ROW` for none. Rows are used from 0 on, without gaps.
        row_len: slots of a row.
        batch: batches packed so far.
        emitted: documents placed so far.
    """
    return Layout(*_lay_out(table, order, row_of, row_len, batch, emitted))


@compiled
def _lay_out(
    table: DocumentTable,
    order: NDArray[np.int64],
    row_of: NDArray[np.int64],
    row_len: int,
    batch: int,
    emitted: int,
) -> tuple[Any, ...]:
    """Give the fields of `Layout`."""
    rows = 0
    for row in row_of:
        rows = max(rows, row + 1)
    documents, first, left = _sort_by_row(order, row_of, rows)
    num_documents = np.diff(first)
    num_tokens, max_seqlen = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
    segments = num_documents + 1
    cu_seqlens = np.empty(len(documents) + 2 * rows, np.int32)  # an upper bound
    longest_wait = displacement = entry = 0
    for row in range(rows):
        end = 0
        cu_seqlens[entry] = end
        for i in range(first[row], first[row + 1]):
            document = table[documents[i]]
            entry += 1
            end += document.length
            cu_seqlens[entry] = end
            max_seqlen[row] = max(max_seqlen[row], document.length)
            longest_wait = max(longest_wait, batch - document.batch)
            displacement += abs(emitted + i - document.serial)
        num_tokens[row] = end
        if end < row_len:
            entry += 1
            cu_seqlens[entry] = row_len
            max_seqlen[row] = max(max_seqlen[row], row_len - end)
            segments[row] += 1
        entry += 1
    return (
        documents,
        first,
        num_documents,
        num_tokens,
        cu_seqlens[:entry],
        segments,
        max_seqlen,
        left,
        longest_wait,
        displacement,
    )


@compiled
def _sort_by_row(
    order: NDArray[np.int64], row_of: NDArray[np.int64], rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The documents in the order of their rows, where each row starts, and the documents without a row."""
    first = np.zeros(rows + 1, np.int64)
    for row in row_of:
        if row != NO_ROW:
            first[row + 1] += 1
    first = np.cumsum(first)
    # A counting sort: it keeps the waiting order within a row.
    documents, left = np.empty(first[-1], np.int64), np.empty(len(order) - first[-1], np.int64)
    next_in_row, num_left = first.copy(), 0
    for i in range(len(order)):
        row = row_of[i]
        if row == NO_ROW:
            left[num_left] = order[i]
            num_left += 1
        else:
            documents[next_in_row[row]] = order[i]
            next_in_row[row] += 1
    return documents, first, left


def fill_rows(
    documents: DocumentArrays,
    layout: Layout,
    pad_token_id: int,
    input_ids: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
) -> None:
    """Write the documents of each row end to end, and pad the rest of the row.

    Args:
        documents: the documents.
        layout: which document lies in which row.
        pad_token_id: id for the slots without a document.
        input_ids: int64 `(rows, row_len)`, written whole.
        attention_mask: int64 `(rows, row_len)`, written whole: 1 for a document's token, 0 for padding.
    """
    _fill_rows(
        documents.tokens, documents.table, layout.documents, layout.first, pad_token_id, input_ids, attention_mask
    )


@compiled
def _fill_rows(
    tokens: Tokens,
    table: DocumentTable,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    pad_token_id: int,
    input_ids: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
) -> None:
    for row in range(len(input_ids)):
        at = 0
        for document in table[placed[first[row] : first[row + 1]]]:
            start, end = document.start, at + document.length
            copy_tokens(tokens[start : start + document.length], input_ids[row, at:end])
            at = end
        input_ids[row, at:] = pad_token_id
        attention_mask[row, :at] = 1
        attention_mask[row, at:] = 0
