"""Fuller rows, shorter waits: every row is filled from many waiting documents at once."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from composer_packing.sequence_packer import SequencePacker
from composer_packing.source_batch import SourceBatch
from composer_packing.subset_sum import READ_AHEAD, place_subset_sum


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
