"""The subset-sum strategy: rows are filled to the last slot from many waiting documents at once.

Rows are filled one after another, in three steps:

1. The row takes the document that has waited longest.
2. While the row has room for many more documents, it takes further documents in waiting order.
3. The row looks at the next `CANDIDATES` waiting documents that fit into the room left. It takes those of them that
   together come closest to filling the room. This is a subset-sum problem, and it is solved exactly.

Documents `a` to `e` of lengths 3, 4, 4, 1 and 5 in waiting order, and a row of eight slots::

    a          aaa.....    has waited longest
    b, c, d    5 slots are left, and 4 + 1 = 5: no need to look at e
    b and d    aaabbbbd    c and e wait for the next row

The sums that the first `n` candidates can reach are kept as a set of bits, one bit for each number of slots. A
candidate of length `l` adds the same set shifted up by `l` (Bellman, 1957, "Dynamic Programming").

Every row begins with the document that has waited longest. So no document waits for ever: a document with `n` others
before it in waiting order, including those of its own source batch, is in one of the next `n // rows + 1` batches.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.source_batch import SourceBatch

CANDIDATES = 32
"""Number of documents that the rest of a row is filled from."""

READ_AHEAD = 4 * CANDIDATES
"""Documents to read beyond those of a batch. They are enough candidates for the last row, even if some do not fit."""

_BITS = 64


class SubsetSumSequencePacker(SequencePacker):
    """Begins each row with the document that has waited longest, and fills the row from many documents at once.

    Before a batch is packed, documents are read until `READ_AHEAD` documents would be left after a batch of average
    documents, or until another source batch could overfill the buffer. A document with `n` others before it in waiting
    order is in one of the next `n // rows + 1` batches, and usually in one of the next three.
    """

    def _choose_rows(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        waiting, shape = self._waiting, self.shape
        slots = rows * shape.out_pseq_len
        while True:
            tokens, documents = waiting.account.waiting, len(waiting)
            left = documents - documents * slots // tokens if tokens > slots else 0
            enough = left >= READ_AHEAD or left + shape.src_batch_size > shape.buffer_size
            if enough or self._read(source) is None:
                break
        return place_subset_sum(waiting.documents.table, waiting.order, rows, shape.out_pseq_len, waiting.shortest)

    def _next_order(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        return left


@compiled
def place_subset_sum(
    table: DocumentTable, order: NDArray[np.int64], rows: int, row_len: int, shortest: int
) -> NDArray[np.int64]:
    """Choose a row for each document so that rows are filled to the last slot if that is possible.

    Args:
        table: the table of documents.
        order: int64 `(waiting,)`, indices into the table, in waiting order.
        rows: rows to fill.
        row_len: slots of a row.
        shortest: no document is shorter.

    Returns:
        int64 `(waiting,)`: the row of each document, `NO_ROW` for a document that has to wait.
    """
    row_of = np.full(len(order), NO_ROW)
    candidates = np.empty(CANDIDATES, np.int64)
    sums = np.empty((CANDIDATES + 1, row_len // _BITS + 1), np.uint64)
    tokens = 0
    for i in range(len(order)):
        tokens += table[order[i]].length
    # Candidates of average length would together fill this much room about twice.
    much_room = CANDIDATES * tokens // (2 * max(len(order), 1))

    oldest = 0
    for row in range(rows):
        while oldest < len(order) and row_of[oldest] != NO_ROW:
            oldest += 1
        # Steps 1 and 2: the oldest document, and further documents in waiting order.
        room = row_len
        at = oldest
        while at < len(order) and (room == row_len or room > much_room):
            if row_of[at] == NO_ROW:
                if table[order[at]].length > room:
                    break
                row_of[at] = row
                room -= table[order[at]].length
            at += 1

        # Step 3: collect candidates until some of them fill the room exactly.
        found, words = 0, room // _BITS + 1
        sums[0, :words] = 0
        sums[0, 0] = 1
        while at < len(order) and found < CANDIDATES and room >= shortest and not _holds(sums[found], room):
            if row_of[at] == NO_ROW and table[order[at]].length <= room:
                _add_shifted(sums[found][:words], table[order[at]].length, sums[found + 1][:words])
                candidates[found] = at
                found += 1
            at += 1
        filled = room
        while not _holds(sums[found], filled):
            filled -= 1
        # Walk back: a candidate is taken if the sum cannot be reached without it.
        for candidate in range(found, 0, -1):
            if not _holds(sums[candidate - 1], filled):
                row_of[candidates[candidate - 1]] = row
                filled -= table[order[candidates[candidate - 1]]].length
    return row_of


@compiled
def _add_shifted(sums: NDArray[np.uint64], length: int, result: NDArray[np.uint64]) -> None:
    """Write the sums to `result`, and each sum with `length` added. A sum beyond the last bit is left out."""
    words, bits = length // _BITS, np.uint64(length % _BITS)
    carried = np.uint64(_BITS - 1) - bits
    result[:words] = sums[:words]
    if words < len(sums):
        result[words] = sums[words] | (sums[0] << bits)
    unshifted, upper, lower = sums[words + 1 :], sums[1:], sums[: len(sums) - words - 1]
    rest = result[words + 1 :]
    for word in range(len(rest)):
        # Two shifts to the right, because a shift by all 64 bits is not defined.
        rest[word] = unshifted[word] | (upper[word] << bits) | ((lower[word] >> np.uint64(1)) >> carried)


@compiled
def _holds(sums: NDArray[np.uint64], number: int) -> bool:
    """Whether `number` is one of the sums."""
    return bool((sums[number // _BITS] >> np.uint64(number % _BITS)) & np.uint64(1))
