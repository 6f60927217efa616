"""Documents of a tokenized split as a map-style dataset, and examples of fine-tuning, which have a loss mask."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from composer_packing.common.jit import compiled
from composer_packing.packing.source_batch import FlatSourceBatch

Document = dict[str, Any]
"""`{"input_ids": ids, "document": number}`: ids one-dimensional, and the place in the dataset; for examples
`"loss_mask"` too.
"""


class DocumentDataset(Dataset[Document]):
    """Documents end to end in one array; the long ones in pieces of `max_seq_len`, so that no token is lost.

    Where there is a loss mask they are examples: long ones are cut, as a response means nothing without its prompt, and
    those of which nothing is left to learn are dropped.

    Args:
        tokens: ids of all documents end to end.
        offsets: int64 `(documents + 1,)`, where each document begins.
        max_seq_len: longest piece, in tokens.
        loss_mask: uint8, one entry for each token, 1 where it is to be learned; None where all are.

    Attributes:
        has_loss_mask: they are examples.
        num_documents: whole documents.
        num_tokens: tokens of all of them, without what is cut off or dropped.
        num_long: documents that are longer and come in pieces, or are cut.
        num_dropped: examples of which nothing is left to learn.
        are_texts: False, as they are ids already.
    """

    are_texts: bool = False

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger[Any]],
        offsets: NDArray[np.int64],
        max_seq_len: int,
        loss_mask: NDArray[np.uint8] | None = None,
    ) -> None:
        self._tokens = np.asarray(tokens)  # of a memory map too, a plain array
        self._loss_mask = None if loss_mask is None else np.asarray(loss_mask)
        if self._loss_mask is None:
            self._starts, self._ends = _in_pieces(offsets, max_seq_len)
        else:
            self._starts, self._ends = _cut(offsets, max_seq_len, self._loss_mask)
        self.has_loss_mask = self._loss_mask is not None
        self.num_documents = len(offsets) - 1
        self.num_tokens = int((self._ends - self._starts).sum())
        self.num_long = int((np.diff(offsets) > max_seq_len).sum())
        self.num_dropped = 0 if self._loss_mask is None else self.num_documents - len(self)

    @property
    def fingerprint(self) -> str:
        """Of all documents and their order, 16 hexadecimal digits."""
        digest = blake2b(digest_size=8)
        for array in (self._tokens, self._starts, self._ends, self._loss_mask):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Document:
        where = slice(self._starts[index], self._ends[index])
        document = {"input_ids": self._tokens[where], "document": index}
        return document if self._loss_mask is None else document | {"loss_mask": self._loss_mask[where]}

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Several documents at once, as the loader asks for them."""
        numbers = np.asarray(indices, np.int64)
        starts, ends = self._starts[numbers], self._ends[numbers]
        loss_mask = None if self._loss_mask is None else _gathered(self._loss_mask, starts, ends)
        return FlatSourceBatch(_gathered(self._tokens, starts, ends), ends - starts, numbers, loss_mask)


Stretches = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Where some begin, and where they end."""


def _in_pieces(offsets: NDArray[np.int64], max_seq_len: int) -> Stretches:
    """All documents, the long ones in pieces."""
    pieces = -(-np.diff(offsets) // max_seq_len)
    first_piece = np.cumsum(pieces) - pieces
    place_in_document = np.arange(pieces.sum()) - np.repeat(first_piece, pieces)
    starts = np.repeat(offsets[:-1], pieces) + max_seq_len * place_in_document
    return starts, np.minimum(starts + max_seq_len, np.repeat(offsets[1:], pieces))


def _cut(offsets: NDArray[np.int64], max_seq_len: int, loss_mask: NDArray[np.uint8]) -> Stretches:
    """The first tokens of all examples of which something is left to learn."""
    starts, ends = offsets[:-1], np.minimum(offsets[1:], offsets[:-1] + max_seq_len)
    learned_before = np.concatenate([[0], np.cumsum(loss_mask, dtype=np.int64)])
    # Nothing comes before a first token, so that none predicts it.
    kept = learned_before[ends] > learned_before[np.minimum(starts + 1, ends)]
    return starts[kept], ends[kept]


@compiled
def _gathered(
    tokens: NDArray[np.unsignedinteger[Any]], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.unsignedinteger[Any]]:
    """The stretches from `starts` to `ends`, end to end."""
    joined = np.empty((ends - starts).sum(), tokens.dtype)
    at = 0
    for start, end in zip(starts, ends):  # noqa: B905 (not in compiled code)
        joined[at : at + end - start] = tokens[start:end]
        at += end - start
    return joined
