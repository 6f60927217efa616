"""The published strategy: greedy best fit, document by document."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.packing import empty_rows, place_best_fit
from composer_packing.sequence_packer import SequencePacker
from composer_packing.source_batch import SourceBatch


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
