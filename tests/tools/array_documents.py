"""Documents in memory as a map-style dataset, in the place of shards."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from composer_packing.packing.source_batch import FlatSourceBatch


class DocumentDataset(Dataset[FlatSourceBatch]):
    """Documents end to end in one array. A long one comes in pieces, each a document with a number of its own.

    Args:
        tokens: ids of all documents end to end.
        offsets: int64 `(documents + 1,)`, where each document begins.
        max_seq_len: longest piece, in tokens.
        loss_mask: uint8, one entry for each token; examples are not longer than `max_seq_len`.

    Attributes:
        are_texts: False, as the documents are ids already.
    """

    are_texts: bool = False

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger[Any]],
        offsets: NDArray[np.int64],
        max_seq_len: int,
        loss_mask: NDArray[np.uint8] | None = None,
    ) -> None:
        pieces = [
            (start, min(start + max_seq_len, end))
            for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            for start in range(begin, end, max_seq_len)
        ]
        self._tokens, self._loss_mask = tokens, loss_mask
        self._starts, self._ends = np.array(pieces, np.int64).reshape(-1, 2).T

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self._tokens)

    @property
    def fingerprint(self) -> str:
        """Hash of all documents and their order, 16 hexadecimal digits."""
        digest = blake2b(digest_size=8)
        for array in (self._tokens, self._starts, self._ends, self._loss_mask):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Several documents at once."""
        numbers = np.asarray(indices, np.int64)
        starts, ends = self._starts[numbers], self._ends[numbers]
        slots = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)] or [numbers])
        loss_mask = None if self._loss_mask is None else self._loss_mask[slots]
        return FlatSourceBatch(self._tokens[slots], ends - starts, numbers, loss_mask)
