"""The published strategy: greedy best fit, document by document."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.source_batch import SourceBatch


class GreedyBestFitSequencePacker(SequencePacker):
    """Each document goes to the row with the least room that holds it; see `packing` for a picture.

    A batch takes documents from the front of the waiting buffer and refills the buffer from the source until so
    many have found no room that another source batch might overfill it; those wait for the next batch. The
    last to find no room comes first then, and a document that is hard to place may wait for very long.
    """

    def _place(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        waiting, by_room = self._waiting, empty_rows(rows, self.out_pseq_len)
        placements = [np.empty(0, np.int64)]
        tried = skipped = 0
        while len(waiting) > tried or self._refill(source, self.buffer_size - skipped):
            row_of, placed = place_best_fit(waiting.documents, waiting.order[tried:], by_room, waiting.shortest)
            placements.append(row_of)
            skipped += len(row_of) - placed
            tried = len(waiting)
        return np.concatenate(placements)

    def _refill(self, source: Iterator[SourceBatch], limit: int) -> bool:
        """Read source batches until another might overfill the buffer; say whether documents were added."""
        total = 0
        while self.buffer_size - total > self.src_batch_size and total + self.src_batch_size <= limit:
            added = self._read(source)
            if added is None:
                break
            total += added
        return total > 0

    def _in_line(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        # As published: each is put back to the front, so that the last skipped comes first.
        return left[::-1].copy()


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


def empty_rows(rows: int, row_len: int) -> NDArray[np.int64]:
    """Empty rows as `place_best_fit` takes them: int64 `(rows,)`, sorted, `room * rows + row` for each row."""
    return row_len * rows + np.arange(rows)


@compiled
def place_best_fit(
    documents: DocumentTable, order: NDArray[np.int64], by_room: NDArray[np.int64], shortest: int
) -> tuple[NDArray[np.int64], int]:
    """Place documents one after the other by best fit.

    Args:
        documents: the table.
        order: int64 `(waiting,)`, places in it, in waiting order.
        by_room: the rows, as `empty_rows` gives them; changed in place.
        shortest: no document is shorter.

    Returns:
        int64 `(waiting,)`: the row of each document, -1 where it has to wait; and how many were placed.
    """
    rows = len(by_room)
    row_of = np.full(len(order), NO_ROW)
    placed = 0
    for i in range(len(order)):
        if by_room[-1] < shortest * rows:
            break
        needed = documents[order[i]].length * rows
        if by_room[-1] < needed:
            continue
        at = np.searchsorted(by_room, needed)
        row_of[i] = by_room[at] % rows
        placed += 1
        fuller = by_room[at] - needed
        while at > 0 and by_room[at - 1] > fuller:
            by_room[at] = by_room[at - 1]
            at -= 1
        by_room[at] = fuller
    return row_of, placed
