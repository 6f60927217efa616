"""The layout of a batch: which documents lie in which row, in which order; and writing them there.

`lay_out` turns "document 3 goes to row 1" into the order of documents row by row, the boundaries `cu_seqlens`, and the
documents that are left. `fill_rows` copies the tokens to their slots. Both are compiled and run without the
interpreter's lock.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable, Tokens


class Layout(NamedTuple):
    """Which documents lie in which row of a batch.

    Attributes:
        documents: int64 `(placed,)`, indices of the documents in the table, row by row.
        first: int64 `(rows + 1,)`; row `r` holds `documents[first[r]:first[r + 1]]`.
        num_documents: int64 `(rows,)`, documents of each row.
        num_tokens: int64 `(rows,)`, real tokens of each row.
        cu_seqlens: int32 `(entries,)`, the boundaries of all rows, row after row. Padding is a segment of its own.
        entries_per_row: int64 `(rows,)`, entries of each row in `cu_seqlens`.
        max_seqlen: int64 `(rows,)`, longest segment of each row, which may be the padding.
        left: int64 `(waiting - placed,)`, indices of the documents that found no row, in waiting order.
        longest_wait: the longest wait of a document, in batches packed since it was read.
        displacement: sum over all documents of their distance from their position in reading order.
    """

    documents: NDArray[np.int64]
    first: NDArray[np.int64]
    num_documents: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    entries_per_row: NDArray[np.int64]
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
    entries_per_row = np.empty(rows, np.int64)
    left = np.empty(len(order) - num_placed, np.int64)
    num_left = 0
    for i in range(len(order)):
        row = row_of[i]
        if row == NO_ROW:
            left[num_left] = order[i]
            num_left += 1
        else:
            length = documents[order[i]].length
            num_documents[row] += 1
            num_tokens[row] += length
            max_seqlen[row] = max(max_seqlen[row], length)
    num_entries = 0
    for row in range(rows):
        following[row] = first[row]
        first[row + 1] = first[row] + num_documents[row]
        entries_per_row[row] = num_documents[row] + 1
        if num_tokens[row] < row_len:
            entries_per_row[row] += 1
            max_seqlen[row] = max(max_seqlen[row], row_len - num_tokens[row])
        num_entries += entries_per_row[row]

    placed = np.empty(num_placed, np.int64)
    for i in range(len(order)):
        row = row_of[i]
        if row != NO_ROW:
            placed[following[row]] = order[i]
            following[row] += 1

    cu_seqlens = np.empty(num_entries, np.int32)
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
    return (
        placed,
        first,
        num_documents,
        num_tokens,
        cu_seqlens,
        entries_per_row,
        max_seqlen,
        left,
        longest_wait,
        displacement,
    )


def lay_out(
    documents: DocumentTable,
    order: NDArray[np.int64],
    row_of: NDArray[np.int64],
    row_len: int,
    batch: int = 0,
    emitted: int = 0,
) -> Layout:
    """Order the documents that found a row by their rows.

    Args:
        documents: the table.
        order: int64 `(waiting,)`, indices in the table, in waiting order.
        row_of: int64 `(waiting,)`, the row of each document, -1 for none. The rows with documents are the first ones.
        row_len: slots in a row.
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
    """Write the documents of each row one after the other, and pad the rest of the row.

    Args:
        tokens: all documents' tokens.
        documents: the table.
        placed: `Layout.documents`.
        first: `Layout.first`.
        pad_token_id: stands in slots that hold no document.
        input_ids: int64 `(rows, row_len)`, all of it is written.
        attention_mask: int64 `(rows, row_len)`, all of it is written: 1 for a token of a document, else 0.
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
