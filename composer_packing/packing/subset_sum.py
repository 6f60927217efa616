"""Filling rows to the last slot: a look at many waiting documents at once.

Rows are filled one after the other. A row takes the document that has waited longest, and further ones in
waiting order while it has room for many more. What is left is filled with those of the next `CANDIDATES`
documents that fit it which together come closest to it: a subset-sum problem, solved exactly. Five documents of
lengths 3, 4, 4, 1, 5 in waiting order and a row of eight slots::

    a          aaa.....    it has waited longest
    b, c, d    5 slots are left, and 4 + 1 come to 5: no need to look further
    b and d    aaabbbbd    c and e wait for the next row

The sums that some of the first `n` candidates come to are a set of bits, one for each number of slots; a
candidate of length `l` adds the same set moved up by `l` (Bellman, 1957, "Dynamic Programming").

Every row begins with the document that has waited longest. So a document that `n` others wait before, those of its own
source batch included, is in one of the next `n // rows + 1` batches.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.source_batch import SourceBatch

CANDIDATES = 32
"""Documents among which a row is filled up."""

READ_AHEAD = 4 * CANDIDATES
"""Documents to read besides those of a batch: enough for its last row, though some are too long for that."""

_BITS = 64


@compiled
def _move_up(sums: NDArray[np.uint64], length: int, moved: NDArray[np.uint64]) -> None:
    """Write to `moved` the sums, and each of them with `length` added."""
    words, bits = length // _BITS, np.uint64(length % _BITS)
    over = np.uint64(_BITS - 1) - bits
    moved[:words] = sums[:words]
    if words < len(sums):
        moved[words] = sums[words] | (sums[0] << bits)
    stay, upper, lower = sums[words + 1 :], sums[1:], sums[: len(sums) - words - 1]
    both = moved[words + 1 :]
    for word in range(len(both)):
        # Two shifts, as one by all 64 bits is not defined.
        both[word] = stay[word] | (upper[word] << bits) | ((lower[word] >> np.uint64(1)) >> over)


@compiled
def _holds(sums: NDArray[np.uint64], number: int) -> bool:
    return bool((sums[number // _BITS] >> np.uint64(number % _BITS)) & np.uint64(1))


@compiled
def place_subset_sum(
    documents: DocumentTable, order: NDArray[np.int64], rows: int, row_len: int, shortest: int
) -> NDArray[np.int64]:
    """Place documents so that rows are filled to the last slot where that is possible.

    Args:
        documents: the table.
        order: int64 `(waiting,)`, places in it, in waiting order.
        rows: to fill.
        row_len: slots per row.
        shortest: no document is shorter.

    Returns:
        int64 `(waiting,)`: the row of each document, -1 where it has to wait.
    """
    row_of = np.full(len(order), NO_ROW)
    candidates = np.empty(CANDIDATES, np.int64)
    sums = np.empty((CANDIDATES + 1, row_len // _BITS + 1), np.uint64)
    tokens = 0
    for i in range(len(order)):
        tokens += documents[order[i]].length
    # So much room that all candidates together fill it about twice.
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
    """Each row begins with the document that has waited longest and is filled up exactly; see `subset_sum`.

    Before a batch is packed documents are read until, after a batch of average ones, `READ_AHEAD` would be left, or
    another source batch might overfill the buffer. A document that `n` others wait before is in one of the next
    `n // rows + 1` batches, and in one of the next three as a rule.
    """

    def _place(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        waiting, slots = self._waiting, rows * self.out_pseq_len
        while True:
            tokens, documents = waiting.account.waiting, len(waiting)
            left = documents - documents * slots // tokens if tokens > slots else 0
            enough = left >= READ_AHEAD or left + self.src_batch_size > self.buffer_size
            if enough or self._read(source) is None:
                break
        return place_subset_sum(waiting.documents, waiting.order, rows, self.out_pseq_len, waiting.shortest)

    def _in_line(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        return left
