"""The published strategy: greedy best fit, one document after another.

Each document goes to the row with the least room left that still holds it. On a tie it goes to the lowest of these
rows. A document that fits no row waits for a later batch. Three rows of eight slots, and documents `a` to `f` of
lengths 5, 4, 3, 6, 3 and 2 in reading order::

                   row 0      row 1      row 2
    a -> row 0     aaaaa...   ........   ........    all rows are empty: the lowest
    b -> row 1     aaaaa...   bbbb....   ........    row 0 has no room for 4
    c -> row 0     aaaaaccc   bbbb....   ........    3 slots are left in row 0, 4 and 8 in the others
    d -> row 2     aaaaaccc   bbbb....   dddddd..
    e -> row 1     aaaaaccc   bbbbeee.   dddddd..
    f -> row 2     aaaaaccc   bbbbeee.   ddddddff    one slot of padding in 24

The rows are kept sorted by room. So a document costs a binary search and a short shift, and the search ends as soon as
no row has room for the shortest document.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.source_batch import SourceBatch


class GreedyBestFitSequencePacker(SequencePacker):
    """Puts each document into the row with the least room that holds it: the published strategy.

    A batch takes documents from the front of the waiting buffer and refills the buffer from the source. It stops when
    so many documents have found no room that another source batch could overfill the buffer. In the next batch the last
    document without room comes first. A document that is hard to place may wait for very long.
    """

    def _choose_rows(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        waiting, by_room = self._waiting, empty_rows(rows, self.shape.out_pseq_len)
        placements = [np.empty(0, np.int64)]
        tried = skipped = 0
        while len(waiting) > tried or self._refill(source, self.shape.buffer_size - skipped):
            row_of, placed = place_best_fit(waiting.documents.table, waiting.order[tried:], by_room, waiting.shortest)
            placements.append(row_of)
            skipped += len(row_of) - placed
            tried = len(waiting)
        return np.concatenate(placements)

    def _refill(self, source: Iterator[SourceBatch], limit: int) -> bool:
        """Read source batches while the next one cannot exceed `limit` documents; say whether documents were added."""
        total, size = 0, self.shape.src_batch_size
        while self.shape.buffer_size - total > size and total + size <= limit:
            added = self._read(source)
            if added is None:
                break
            total += added
        return total > 0

    def _next_order(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        # As published: the documents are put back to the front one by one, so the last one comes first.
        return left[::-1].copy()


@compiled
def find_best_fit(remaining_spaces: NDArray[np.int64], seq_len: int) -> int:
    """Row with the least room that holds `seq_len` tokens, the lowest on a tie; -1 if no row holds them.

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
    """Empty rows as `place_best_fit` takes them: int64 `(rows,)`, `room * rows + row` for each row, sorted."""
    return row_len * rows + np.arange(rows)


@compiled
def place_best_fit(
    table: DocumentTable, order: NDArray[np.int64], by_room: NDArray[np.int64], shortest: int
) -> tuple[NDArray[np.int64], int]:
    """Choose a row for each document by best fit, one document after another.

    Args:
        table: the table of documents.
        order: int64 `(waiting,)`, indices into the table, in waiting order.
        by_room: the rows as `empty_rows` gives them; changed in place.
        shortest: no document is shorter.

    Returns:
        int64 `(waiting,)`, the row of each document, `NO_ROW` for a document that has to wait; and the number of
        documents with a row.
    """
    rows = len(by_room)
    row_of = np.full(len(order), NO_ROW)
    placed = 0
    for i in range(len(order)):
        if by_room[-1] < shortest * rows:
            break
        needed = table[order[i]].length * rows
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
