"""Best fit, the published strategy: each document goes to the row with the least room that still holds it.

On a tie the lowest such row is taken. A document that fits no row waits for a later batch. Documents `a`..`f` of 5, 4,
3, 6, 3 and 2 tokens come in this order, for three rows of eight slots::

    a -> row 0   aaaaa...   ........   ........    all rows are empty: the lowest row
    b -> row 1   aaaaa...   bbbb....   ........    row 0 has no room for 4 tokens
    c -> row 0   aaaaaccc   bbbb....   ........    row 0 has 3 free slots, the others have more
    d -> row 2   aaaaaccc   bbbb....   dddddd..
    e -> row 1   aaaaaccc   bbbbeee.   dddddd..
    f -> row 2   aaaaaccc   bbbbeee.   ddddddff    one slot of 24 is padding

Only lengths matter for this. The rows are kept sorted by their room, so that a document costs a binary search and a
short shift. When no row has room for the shortest document, the rest of the documents is not looked at.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_ROW, DocumentTable
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.source_batch import SourceBatch


@compiled
def find_best_fit(remaining_spaces: NDArray[np.int64], seq_len: int) -> int:
    """The row with the least room that still holds `seq_len` tokens, the lowest row on a tie. -1 if no row holds them.

    Args:
        remaining_spaces: int64 `(rows,)`, free slots of each row.
        seq_len: length of the document, in tokens.
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
    """Choose a row for each document by best fit, one document after the other.

    Args:
        documents: the table.
        order: int64 `(waiting,)`, indices in the table, in waiting order.
        by_room: the rows, as `empty_rows` gives them; changed in place.
        shortest: lower bound of all lengths.

    Returns:
        int64 `(waiting,)`: the row of each document, -1 for a document that must wait; and how many got a row.
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


class GreedyBestFitSequencePacker(SequencePacker):
    """Packs by best fit, document by document, as published with ModernBERT. This module has a picture.

    A batch takes documents from the front of the waiting buffer. When all have been tried, more are read, until so many
    have found no row that a further source batch might overfill the buffer. Documents without a row wait for the next
    batch, in reverse order. So a document that is hard to place may wait for hundreds of batches.
    """

    def _place(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        waiting, by_room = self._waiting, empty_rows(rows, self.shape.out_pseq_len)
        placements = [np.empty(0, np.int64)]
        tried = skipped = 0
        while len(waiting) > tried or self._refill(source, self.shape.buffer_size - skipped):
            row_of, placed = place_best_fit(waiting.documents, waiting.order[tried:], by_room, waiting.shortest)
            placements.append(row_of)
            skipped += len(row_of) - placed
            tried = len(waiting)
        return np.concatenate(placements)

    def _refill(self, source: Iterator[SourceBatch], limit: int) -> bool:
        """Read source batches until another one might overfill the buffer. Returns whether documents were added."""
        shape, total = self.shape, 0
        while shape.buffer_size - total > shape.src_batch_size and total + shape.src_batch_size <= limit:
            added = self._read(source)
            if added is None:
                break
            total += added
        return total > 0

    def _line_up(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        # As published: each document is put back to the front, so the last one without a row comes first.
        return left[::-1].copy()
