"""The waiting buffer: documents read but not yet placed, as slices of one token array.

Documents are copied in once and never one by one afterwards. Those that leave give their slots back when
they outweigh those that stay: the rest is then moved to the front in one go, so that a token is moved
less than once on average and memory grows with what waits, not with what was read.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_packing.packing import compiled

SourceBatch = Sequence[Mapping[str, Any]]
"""What the loader hands the packer: `{"input_ids": ids}` per document, with `"document": number` for keyed masks."""


class WaitingBuffer:
    """Documents in reading order.

    Args:
        src_batch_size: documents that a source batch has at most.
        buffer_size: documents that may wait at most.
        numbered: the source gives each document's number, which is kept.

    Attributes:
        tokens: int64, holds every document's tokens.
        starts: int64 `(documents,)`, where each document begins in `tokens`.
        lengths: int64 `(documents,)`, each at least 1.
        numbers: int64 `(documents,)`, what the source calls each; 0 where it is not numbered.
        epochs: int64 `(documents,)`, in which each was read.
    """

    def __init__(self, src_batch_size: int, buffer_size: int, numbered: bool = False) -> None:
        self.tokens = np.empty(1024, np.int64)
        self.starts = np.empty(0, np.int64)
        self.lengths = np.empty(0, np.int64)
        self.numbers = np.empty(0, np.int64)
        self.epochs = np.empty(0, np.int64)
        self._src_batch_size = src_batch_size
        self._buffer_size = buffer_size
        self._numbered = numbered
        self._end = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def refill(self, source: Iterator[SourceBatch], limit: int, epoch: int) -> int:
        """Read source batches until another might overfill the buffer; say how many documents were added.

        Args:
            source: what to read.
            limit: documents that may be added at most.
            epoch: the current one.

        Raises:
            ValueError: a source batch holds more documents than promised, or as `append` says.
            TypeError: as `append` says.
        """
        added = 0
        while self._buffer_size - added > self._src_batch_size and added + self._src_batch_size <= limit:
            try:
                source_batch = next(source)
            except StopIteration:
                break
            added += self.append(source_batch, epoch)
            if len(source_batch) > self._src_batch_size:
                raise ValueError(
                    f"the source gave {len(source_batch)} documents at once; src_batch_size={self._src_batch_size}"
                )
        return added

    def append(self, source_batch: SourceBatch, epoch: int) -> int:
        """Add the non-empty documents of a source batch and say how many they are.

        Args:
            source_batch: `{"input_ids": ids}` per document; ids are a list, numpy array or CPU tensor of
                integers, one-dimensional. Where documents are numbered, `"document"` is the number.
            epoch: in which it was read.

        Raises:
            TypeError: the source batch, a document or its number is something else.
            ValueError: an id is negative or beyond int64.
        """
        present = _not_empty(source_batch)
        documents = [document["input_ids"] for document in present]
        if not documents:
            return 0
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        total = int(lengths.sum())
        self._make_room(total)
        try:
            new = np.concatenate(documents, out=self.tokens[self._end : self._end + total], casting="same_kind")
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise TypeError(_which_is_wrong(documents)) from error
        if new.min() < 0:  # an unsigned id that does not fit has wrapped
            raise ValueError(f"token ids must lie between 0 and 2**63 - 1; got {new.min()}")
        self.starts = np.concatenate([self.starts, self._end + np.cumsum(lengths) - lengths])
        self.lengths = np.concatenate([self.lengths, lengths])
        self.numbers = np.concatenate([self.numbers, self._numbers(present)])
        self.epochs = np.concatenate([self.epochs, np.full(len(documents), epoch)])
        self._end += total
        return len(documents)

    def keep(self, documents: NDArray[np.int64]) -> None:
        """Keep these documents, given by their places, in this order; forget the others."""
        self.starts = self.starts[documents]
        self.lengths = self.lengths[documents]
        self.numbers = self.numbers[documents]
        self.epochs = self.epochs[documents]
        waiting_tokens = int(self.lengths.sum())
        if self._end > 2 * waiting_tokens:
            self.tokens[:waiting_tokens] = _gathered(self.tokens, self.starts, self.lengths, waiting_tokens)
            self.starts = np.cumsum(self.lengths) - self.lengths
            self._end = waiting_tokens

    def _numbers(self, documents: SourceBatch) -> NDArray[np.int64]:
        if not self._numbered:
            return np.zeros(len(documents), np.int64)
        try:
            numbers = (operator.index(document["document"]) for document in documents)
            return np.fromiter(numbers, np.int64, len(documents))
        except (TypeError, KeyError, OverflowError) as error:
            raise TypeError(
                f"keyed masks need the number of each document, as {{'input_ids': ids, 'document': number}}; "
                f"got {str(documents)[:80]}"
            ) from error

    def _make_room(self, tokens: int) -> None:
        needed = self._end + tokens
        if needed > len(self.tokens):
            grown = np.empty(max(needed, 2 * len(self.tokens)), np.int64)
            grown[: self._end] = self.tokens[: self._end]
            self.tokens = grown


@compiled
def _gathered(
    tokens: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], total: int
) -> NDArray[np.int64]:
    """The documents' tokens end to end, in a new array."""
    gathered = np.empty(total, np.int64)
    at = 0
    for document in range(len(lengths)):
        for i in range(lengths[document]):
            gathered[at + i] = tokens[starts[document] + i]
        at += lengths[document]
    return gathered


def _not_empty(source_batch: SourceBatch) -> SourceBatch:
    """The documents that have tokens."""
    try:
        return [document for document in source_batch if len(document["input_ids"])]
    except (TypeError, KeyError, IndexError) as error:
        raise TypeError(
            f"a source batch must be a list of {{'input_ids': ids}}, one per document; "
            f"got {type(source_batch).__name__}: {str(source_batch)[:80]}"
        ) from error


def _which_is_wrong(documents: list[Any]) -> str:
    """Name the first document that is no flat sequence of int64 ids."""
    for document in documents:
        try:
            ids = np.asarray(document)
            np.concatenate([ids], out=np.empty(len(document), np.int64), casting="same_kind")
        except (TypeError, ValueError, OverflowError, RuntimeError):
            return (
                f"input_ids must be a flat sequence of integers that fit int64; got "
                f"{type(document).__name__}: {str(document)[:80]}"
            )
    raise AssertionError("every document is well formed")
