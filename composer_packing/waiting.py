"""The waiting buffer: documents read but not yet placed, in one token array and one table.

A source batch is copied in at one go, in the narrowest type that holds its tokens. What leaves stays where it
is until the array is full; then what still waits is moved to its front. The array is at least twice as large as
that, so that a token is moved less than once on average, and memory grows with what waits, not with what was read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_packing.documents import BLOCK, DOCUMENT, Documents, LossMask, Tokens
from composer_packing.moving import Entered, enter, move_to_front
from composer_packing.policies import OverLong
from composer_packing.source_batch import (
    FlatSourceBatch,
    SourceBatch,
    check_ids,
    checked,
    flat_source_batch,
    token_dtype,
)

IDLE_READS = 1000
"""Source batches in a row that may give no document."""


@dataclass
class TokenAccount:
    """Where the tokens of all documents read so far are: `read` is the sum of all others.

    Attributes:
        read: tokens read.
        waiting: in documents that wait for a row.
        emitted: in batches.
        truncated: cut off documents that were longer than a row.
        dropped: in documents that were dropped as longer than a row.
        left_over: in documents that still waited when an epoch ended whose tail is not carried.
        without_targets: in examples that were dropped as nothing that a row holds of them is to be learned.
        over_long_documents: not tokens, but documents that were longer than a row.
        documents_without_targets: not tokens, but the examples that were dropped.
    """

    read: int = 0
    waiting: int = 0
    emitted: int = 0
    truncated: int = 0
    dropped: int = 0
    left_over: int = 0
    without_targets: int = 0
    over_long_documents: int = 0
    documents_without_targets: int = 0

    def since(self, before: "TokenAccount") -> "TokenAccount":
        """The difference to an earlier account."""
        return TokenAccount(**{name: number - getattr(before, name) for name, number in vars(self).items()})


class WaitingBuffer:
    """Documents in waiting order.

    Args:
        src_batch_size: documents that a source batch has at most.
        max_document_len: tokens that a document or piece has at most, which is a row as a rule.
        over_long: what becomes of those that have more.
        vocab_size: ids lie below it; None for any id.
        numbered: the source gives each document's number, which is kept.
        loss_masked: the source gives a loss mask, which is kept; documents in which nothing is to be learned are
            dropped, the first token left aside, which nothing comes before.

    Attributes:
        tokens: holds every document's tokens, and `BLOCK` more at least.
        loss_mask: theirs, or empty.
        documents: the table.
        order: int64 `(waiting,)`, places in the table, the first in line first.
        shortest: no document is shorter.
        num_added: documents and pieces that were ever added.
        num_gone: those of them that wait no longer.
        account: where all tokens are.
    """

    def __init__(
        self,
        src_batch_size: int,
        max_document_len: int,
        over_long: OverLong = OverLong.ERROR,
        vocab_size: int | None = None,
        numbered: bool = False,
        loss_masked: bool = False,
    ) -> None:
        self.tokens: Tokens = np.empty(BLOCK, np.uint16 if vocab_size is None else token_dtype(vocab_size))
        self.loss_mask: LossMask = np.empty(BLOCK if loss_masked else 0, np.uint8)
        self.documents: Documents = np.empty(0, DOCUMENT)
        self.order = np.empty(0, np.int64)
        self.num_added = self.num_gone = 0
        self.shortest = max_document_len
        self.account = TokenAccount()
        self._src_batch_size = src_batch_size
        self._max_document_len = max_document_len
        self._over_long = over_long
        self._vocab_size = vocab_size
        self._numbered = numbered
        self._loss_masked = loss_masked
        self._tokens_end = self._documents_end = 0
        self._idle_reads = 0

    def __len__(self) -> int:
        return len(self.order)

    def read(self, source: Iterator[SourceBatch], epoch: int, batch: int) -> int | None:
        """Add the next source batch and say how many documents it gave; None where the source has ended.

        Args:
            source: what to read.
            epoch: the current one.
            batch: batches packed so far.

        Raises:
            ValueError: `IDLE_READS` source batches in a row gave no document, or as `append` says.
            TypeError: as `append` says.
        """
        for source_batch in source:
            if not isinstance(source_batch, FlatSourceBatch):
                source_batch = flat_source_batch(source_batch, numbered=self._numbered, loss_masked=self._loss_masked)
            added = self.append(source_batch, epoch, batch)
            self._idle_reads = 0 if added else self._idle_reads + 1
            if self._idle_reads == IDLE_READS:
                raise ValueError(
                    f"{IDLE_READS} source batches in a row gave no document to pack; so far "
                    f"{self.account.over_long_documents} were longer than {self._max_document_len} tokens, and of "
                    f"{self.account.documents_without_targets} nothing that a row holds was to be learned"
                )
            return added
        return None

    def append(self, source_batch: FlatSourceBatch, epoch: int = 0, batch: int = 0) -> int:
        """Add the non-empty documents of a source batch and say how many they are, pieces counted one by one.

        Args:
            source_batch: what to add.
            epoch: in which it was read.
            batch: batches packed before it was read.

        Raises:
            TypeError: the source batch is not made of one-dimensional integers, or its numbers or loss mask are needed
                and missing.
            ValueError: it holds more documents than promised, its parts do not go together, an id is out of range, or a
                document is longer than a row and that is an error. Nothing of it has been added then.
        """
        tokens, lengths, numbers, loss_mask = checked(source_batch, self._numbered, self._loss_masked)
        if len(lengths) > self._src_batch_size:
            raise ValueError(
                f"the source gave {len(lengths)} documents at once, more than src_batch_size={self._src_batch_size} "
                f"(batch_size of from_composer)"
            )
        if self._vocab_size is None:
            self._widen(tokens.dtype)
        self._make_room(len(tokens), len(lengths) + len(tokens) // self._max_document_len)
        tokens_end = self._tokens_end + len(tokens)
        entered = Entered(
            *enter(
                tokens,
                lengths,
                numbers,
                loss_mask,
                self.tokens[self._tokens_end : tokens_end],
                self.loss_mask[self._tokens_end : tokens_end],
                self.documents[self._documents_end :],
                self.order,
                (self._tokens_end, self._documents_end, epoch, batch, self.num_added),
                self._max_document_len,
                {OverLong.TRUNCATE: self._max_document_len, OverLong.DROP: 0}.get(self._over_long, len(tokens)),
            )
        )
        self._check(entered, len(tokens))
        self.order = entered.order
        self._tokens_end = tokens_end
        self._documents_end += entered.documents
        self.num_added += entered.documents
        self.shortest = min(self.shortest, entered.shortest)
        self.account.over_long_documents += entered.over_long
        self.account.read += len(tokens)
        self.account.waiting += entered.kept
        self.account.without_targets += entered.tokens_without_targets
        self.account.documents_without_targets += entered.without_targets
        cut_off = len(tokens) - entered.kept - entered.tokens_without_targets
        if self._over_long is OverLong.DROP:
            self.account.dropped += cut_off
        else:
            self.account.truncated += cut_off
        return entered.documents

    def emit(self, left: NDArray[np.int64], num_tokens: int) -> None:
        """Forget what has been placed in a batch.

        Args:
            left: int64 `(waiting,)`, places in the table of what still waits, in waiting order.
            num_tokens: tokens of what was placed.
        """
        self.num_gone += len(self.order) - len(left)
        self.account.emitted += num_tokens
        self.account.waiting -= num_tokens
        self.order = left

    def clear(self) -> None:
        """Forget all that waits; it is left over."""
        self.num_gone += len(self.order)
        self.account.left_over += self.account.waiting
        self.account.waiting = 0
        self.order = self.order[:0]

    def _check(self, entered: Entered, num_tokens: int) -> None:
        if entered.least < 0 or entered.longest > num_tokens or entered.total != num_tokens:
            raise ValueError(
                f"a FlatSourceBatch has {num_tokens} tokens, but its lengths, from {entered.least} to "
                f"{entered.longest}, come to {entered.total}"
            )
        check_ids(entered.smallest, entered.largest, self._vocab_size)
        if entered.longest > self._max_document_len and self._over_long is OverLong.ERROR:
            raise ValueError(
                f"a document of {entered.longest} tokens does not fit a row of {self._max_document_len} slots; "
                f"give another over_long policy, or cut or split it before it is packed"
            )

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """See to it that the token array holds ids of this type."""
        types: tuple[Any, ...] = np.uint16, np.uint32, np.int64
        needed = next((wider for wider in types if np.can_cast(dtype, wider)), np.int64)
        if self.tokens.dtype.itemsize < np.dtype(needed).itemsize:
            self.tokens = self.tokens.astype(needed)

    def _make_room(self, tokens: int, documents: int) -> None:
        """See to it that so much more can be added."""
        if self._fits(tokens, documents):
            return
        is_waiting = np.zeros(self._documents_end, np.bool_)
        is_waiting[self.order] = True
        self.order = (np.cumsum(is_waiting) - 1)[self.order]
        self._documents_end = len(self.order)
        self._tokens_end, self.shortest = move_to_front(
            self.tokens, self.loss_mask, self.documents, is_waiting, self._max_document_len
        )
        if not self._fits(2 * tokens + self._tokens_end, 2 * documents + self._documents_end):
            self.tokens = _grown(self.tokens, self._tokens_end, tokens)
            if self._loss_masked:
                self.loss_mask = _grown(self.loss_mask, self._tokens_end, tokens)
            self.documents = _grown(self.documents, self._documents_end, documents)

    def _fits(self, tokens: int, documents: int) -> bool:
        tokens_end, documents_end = self._tokens_end + tokens, self._documents_end + documents
        return tokens_end + BLOCK <= len(self.tokens) and documents_end <= len(self.documents)


def _grown(array: NDArray[Any], end: int, more: int) -> NDArray[Any]:
    """A copy of what lies before `end`, with room for three times as much and as is to be added."""
    grown = np.empty(4 * (end + more) + BLOCK, array.dtype)
    grown[:end] = array[:end]
    return grown
