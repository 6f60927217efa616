"""Documents of a tokenized split as a map-style dataset."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from composer_packing.compiling import compiled
from composer_packing.source_batch import FlatSourceBatch

Document = dict[str, Any]
"""`{"input_ids": ids, "document": number}`: ids one-dimensional, and the place in the dataset."""


class DocumentDataset(Dataset[Document]):
    """Documents end to end in one array; the long ones in pieces of `max_seq_len`, so that no token is lost.

    Args:
        tokens: ids of all documents end to end.
        offsets: int64 `(documents + 1,)`, where each document begins.
        max_seq_len: longest piece, in tokens.

    Attributes:
        num_documents: whole documents.
        num_tokens: tokens of all of them.
        num_split: documents that are longer and come in pieces.
    """

    def __init__(self, tokens: NDArray[np.unsignedinteger[Any]], offsets: NDArray[np.int64], max_seq_len: int) -> None:
        self._tokens = np.asarray(tokens)  # of a memory map too, a plain array
        pieces = -(-np.diff(offsets) // max_seq_len)
        first_piece = np.cumsum(pieces) - pieces
        place_in_document = np.arange(pieces.sum()) - np.repeat(first_piece, pieces)
        self._starts = np.repeat(offsets[:-1], pieces) + max_seq_len * place_in_document
        self._ends = np.minimum(self._starts + max_seq_len, np.repeat(offsets[1:], pieces))
        self.num_documents = len(pieces)
        self.num_tokens = int(offsets[-1])
        self.num_split = int((pieces > 1).sum())

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Document:
        return {"input_ids": self._tokens[self._starts[index] : self._ends[index]], "document": index}

    def __getitems__(self, indices: Sequence[int]) -> FlatSourceBatch:
        """Several documents at once, as the loader asks for them."""
        numbers = np.fromiter(indices, np.int64, len(indices))
        starts, ends = self._starts[numbers], self._ends[numbers]
        return FlatSourceBatch(_gathered(self._tokens, starts, ends), ends - starts, numbers)


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
