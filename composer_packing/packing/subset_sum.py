"""Subset sum: rows are filled to the last slot, by looking at many waiting documents at once.

Rows are filled one after the other:

1. A row begins with the document that has waited longest.
2. While the row has room for many more documents, the next documents in waiting order are added.
3. The last slots are filled from the next `CANDIDATES` documents that fit. Of all their subsets, the one is taken that
   comes closest to filling the row. This is a subset-sum problem, and it is solved exactly.

Documents of 3, 4, 4, 1 and 5 tokens wait in this order, for a row of eight slots::

    a          aaa.....    a has waited longest
    b, c, d    aaa.....    5 slots are free; b and d have 4 + 1 = 5 tokens, so no further document is looked at
    b and d    aaabbbbd    c and e wait for the next row

The set of sums of the first `n` candidates is a set of bits, one bit for each number of slots. One more candidate of
length `l` adds the same bits, shifted by `l` (Bellman, 1957, "Dynamic Programming").

As every row begins with the document that has waited longest, a document with `n` others before it in line is in one of
the next `n // rows + 1` batches.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.source_batch import SourceBatch

CANDIDATES = 32
"""Number of documents from which the last slots of a row are filled."""

READ_AHEAD = 4 * CANDIDATES
"""Number of documents to read beyond those of a batch: enough for its last row, although some are too long for it."""

_BITS = 64


@compiled
def _move_up(sums: NDArray[np.uint64], length: int, moved: NDArray[np.uint64]) -> None:
    """Write to `moved` all sums, and all sums with `length` added."""
    words, bits = length // _BITS, np.uint64(length % _BITS)
    over = np.uint64(_BITS - 1) - bits
    moved[:words] = sums[:words]
    if words < len(sums):
        moved[words] = sums[words] | (sums[0] << bits)
    stay, upper, lower = sums[words + 1 :], sums[1:], sums[: len(sums) - words - 1]
    both = moved[words + 1 :]
    for word in range(len(both)):
        # Two shifts to the right: a single shift by 64 bits would be undefined.
        both[word] = stay[word] | (upper[word] << bits) | ((lower[word] >> np.uint64(1)) >> over)


@compiled
def _holds(sums: NDArray[np.uint64], number: int) -> bool:
    return bool((sums[number // _BITS] >> np.uint64(number % _BITS)) & np.uint64(1))


@compiled
def place_subset_sum(
    documents: DocumentTable, order: NDArray[np.int64], rows: int, row_len: int, shortest: int
) -> NDArray[np.int64]:
    """Choose a row for each document so that rows are filled to the last slot, if possible.

    Args:
        documents: the table.
        order: int64 `(waiting,)`, indices in the table, in waiting order.
        rows: number of rows to fill.
        row_len: slots in a row.
        shortest: lower bound of all lengths.

    Returns:
        int64 `(waiting,)`: the row of each document, -1 for a document that must wait.
    """
    row_of = np.full(len(order), NO_ROW)
    candidates = np.empty(CANDIDATES, np.int64)
    sums = np.empty((CANDIDATES + 1, row_len // _BITS + 1), np.uint64)
    tokens = 0
    for i in range(len(order)):
        tokens += documents[order[i]].length
    # With this much room, all candidates together would fill the row about twice.
    enough = CANDIDATES * tokens // (2 * max(len(order), 1))

    oldest = 0
    for row in range(rows):
        while oldest < len(order) and row_of[oldest] != NO_ROW:
            oldest += 1
        room = row_len
        at = oldest
        while at < len(order) and (room == row_len or room > enough):
            if row_of[at] == NO_ROW:
                if documents[order[at]].length > room:
                    break
                row_of[at] = row
                room -= documents[order[at]].length
            at += 1

        found, words = 0, room // _BITS + 1
        sums[0, :words] = 0
        sums[0, 0] = 1
        while at < len(order) and found < CANDIDATES and room >= shortest and not _holds(sums[found], room):
            if row_of[at] == NO_ROW and documents[order[at]].length <= room:
                _move_up(sums[found][:words], documents[order[at]].length, sums[found + 1][:words])
                candidates[found] = at
                found += 1
            at += 1
        filled = room
        while not _holds(sums[found], filled):
            filled -= 1
        for candidate in range(found, 0, -1):
            if not _holds(sums[candidate - 1], filled):
                row_of[candidates[candidate - 1]] = row
                filled -= documents[order[candidates[candidate - 1]]].length
    return row_of


class SubsetSumSequencePacker(SequencePacker):
    """Fills every row to the last slot from many waiting documents. This module explains how.

    Before a batch is packed, documents are read until `READ_AHEAD` of them would be left after a batch of average
    documents, or until another source batch might overfill the buffer. A document with `n` others before it in line is
    in one of the next `n // rows + 1` batches, and usually in one of the next three.
    """

    def _place(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        waiting, shape = self._waiting, self.shape
        slots = rows * shape.out_pseq_len
        while True:
            tokens, documents = waiting.account.waiting, len(waiting)
            left = documents - documents * slots // tokens if tokens > slots else 0
            enough = left >= READ_AHEAD or left + shape.src_batch_size > shape.buffer_size
            if enough or self._read(source) is None:
                break
        return place_subset_sum(waiting.documents, waiting.order, rows, shape.out_pseq_len, waiting.shortest)

    def _line_up(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        return left
