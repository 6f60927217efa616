"""The waiting buffer: documents that were read but have no row yet, in one token array and one table.

A source batch is copied in at once, in the narrowest type that holds its tokens. A document that leaves stays in the
arrays until they are full. Then the documents that still wait are copied to the front of new arrays::

    full    aaaa bbb cc dddd      a, b and d were packed and have left; c waits
    new     cc ..............     at least twice as many slots as are filled

So a token is moved less than once on average, and memory grows with what waits, not with what was read. A written slot
never changes. A snapshot therefore only remembers the arrays and the order of that moment, and copies nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.common.snapshots import share_of
from composer_packing.packing.document_table import BLOCK, DOCUMENT, DocumentTable, LossMask, Tokens
from composer_packing.packing.ingest import Appended, append_documents, compact
from composer_packing.packing.options import OverLong
from composer_packing.packing.source_batch import (
    FlatSourceBatch,
    SourceBatch,
    flat_source_batch,
    validate_source_batch,
)
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.token_arrays import check_ids, token_dtype

MOST_IDLE_READS = 1000
"""Source batches in a row that may give no document."""


class TokenState(TypedDict):
    """Tokens in a saved state: their bytes, as PyTorch cannot save every token type, and the name of the type."""

    tokens: torch.Tensor
    token_dtype: str


class BufferState(TokenState):
    """Saved state of a waiting buffer: the documents that wait, first in line first, and the counts.

    `documents` has a column for each name of `DOCUMENT` but `start`.
    """

    num_added: int
    num_gone: int
    idle_reads: int
    account: dict[str, int]
    account_before: dict[str, int]
    loss_mask: torch.Tensor
    documents: dict[str, torch.Tensor]


class WaitingBuffer:
    """Documents in waiting order.

    Args:
        src_batch_size: documents in a source batch, at most.
        max_document_len: greatest length of a document or piece, in tokens.
        over_long: what becomes of longer documents.
        vocab_size: all ids must lie below this number; None for any id.
        numbered: the source gives the number of each document. The buffer keeps it.
        loss_masked: the source gives a loss mask. The buffer keeps it, and drops documents in which nothing is to be
            learned.

    Attributes:
        tokens: the tokens of every document, and at least `BLOCK` more slots.
        loss_mask: the loss mask of these tokens, or empty.
        documents: the table.
        order: int64 `(waiting,)`, indices in the table, the first in line first.
        shortest: lower bound of all lengths. Placing stops early by it; which row a document gets does not depend on
            it.
        num_added: documents and pieces that were ever added.
        num_gone: documents and pieces that no longer wait.
        account: what became of all tokens.
        account_before: the same at the start of the epoch.
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
        self.documents: DocumentTable = np.empty(0, DOCUMENT)
        self.order = np.empty(0, np.int64)
        self.num_added = self.num_gone = 0
        self.shortest = max_document_len
        self.account, self.account_before = TokenAccount(), TokenAccount()
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

    def start_epoch(self) -> None:
        """Remember the account at the start of an epoch."""
        self.account_before = replace(self.account)

    def read(self, source: Iterator[SourceBatch], epoch: int, batch: int) -> int | None:
        """Add the next source batch. Returns how many documents it gave, or None if the source has ended.

        Args:
            source: gives the source batch.
            epoch: the current epoch.
            batch: batches packed so far.

        Raises:
            ValueError: `MOST_IDLE_READS` source batches in a row gave no document, or as `append` says.
            TypeError: as `append` says.
        """
        source_batch = next(source, None)
        if source_batch is None:
            return None
        if not isinstance(source_batch, FlatSourceBatch):
            source_batch = flat_source_batch(source_batch, numbered=self._numbered, loss_masked=self._loss_masked)
        added = self.append(source_batch, epoch, batch)
        self._idle_reads = 0 if added else self._idle_reads + 1
        if self._idle_reads == MOST_IDLE_READS:
            raise ValueError(
                f"{MOST_IDLE_READS} source batches in a row gave no document to pack; so far "
                f"{self.account.over_long_documents} documents were longer than {self._max_document_len} tokens, "
                f"and in {self.account.documents_without_targets} nothing was to be learned"
            )
        return added

    def append(self, source_batch: FlatSourceBatch, epoch: int = 0, batch: int = 0) -> int:
        """Add the non-empty documents of a source batch. Returns how many documents and pieces were added.

        Args:
            source_batch: the documents.
            epoch: the epoch in which they were read.
            batch: batches packed before they were read.

        Raises:
            TypeError: a part of the source batch is not a one-dimensional array of integers, or numbers or a loss mask
                are needed and missing.
            ValueError: there are more documents than promised, the parts do not fit each other, an id is out of range,
                or a document is too long and the policy is `error`. Nothing was added then.
        """
        tokens, lengths, numbers, loss_mask = validate_source_batch(source_batch, self._numbered, self._loss_masked)
        if len(lengths) > self._src_batch_size:
            raise ValueError(
                f"the source gave {len(lengths)} documents at once, more than src_batch_size={self._src_batch_size} "
                f"(batch_size of from_composer)"
            )
        if self._vocab_size is None:
            self._widen(tokens.dtype)
        self._make_room(len(tokens), len(lengths) + len(tokens) // self._max_document_len)
        tokens_end = self._tokens_end + len(tokens)
        appended = Appended(
            *append_documents(
                tokens,
                lengths,
                numbers,
                loss_mask,
                self.tokens[self._tokens_end : tokens_end],
                self.loss_mask[self._tokens_end : tokens_end],
                self.documents[self._documents_end :],
                self._tokens_end,
                self._max_document_len,
                {OverLong.TRUNCATE: self._max_document_len, OverLong.DROP: 0}.get(self._over_long, len(tokens)),
            )
        )
        self._check(appended, len(tokens))
        documents_end = self._documents_end + appended.documents
        new = self.documents[self._documents_end : documents_end]
        new["epoch"] = epoch
        new["batch"] = batch
        new["serial"] = np.arange(self.num_added, self.num_added + appended.documents)
        self.order = np.concatenate([self.order, np.arange(self._documents_end, documents_end)])
        self._tokens_end, self._documents_end = tokens_end, documents_end
        self.num_added += appended.documents
        self.shortest = min(self.shortest, appended.shortest)
        self._count(appended, len(tokens))
        return appended.documents

    def emit(self, left: NDArray[np.int64], num_tokens: int) -> None:
        """Remove the documents that were placed in a batch.

        Args:
            left: int64 `(waiting,)`, indices of the documents that still wait, the first in line first.
            num_tokens: tokens of the documents that were placed.
        """
        self.num_gone += len(self.order) - len(left)
        self.account.emitted += num_tokens
        self.account.waiting -= num_tokens
        self.order = left

    def clear(self) -> None:
        """Remove all documents. They count as left over."""
        self.num_gone += len(self.order)
        self.account.left_over += self.account.waiting
        self.account.waiting = 0
        self.order = self.order[:0]

    def snapshot(self) -> partial[BufferState]:
        """A function that gives the state of this moment. Nothing is copied before it is called."""
        counts = {"num_added": self.num_added, "num_gone": self.num_gone, "idle_reads": self._idle_reads}
        accounts = {"account": vars(self.account).copy(), "account_before": vars(self.account_before)}
        return partial(_copy_state, self.tokens, self.loss_mask, self.documents, self.order, counts | accounts)

    def load_state_dict(self, state: BufferState) -> None:
        """Continue with the documents and counts of a saved state."""
        columns = {name: column.numpy() for name, column in state["documents"].items()}
        tokens, lengths = _tokens_of(state), columns["length"]
        self.tokens = np.empty(len(tokens) + BLOCK, tokens.dtype)
        self.tokens[: len(tokens)] = tokens
        self.loss_mask = np.empty(len(self.tokens) if self._loss_masked else 0, np.uint8)
        self.loss_mask[: len(tokens)] = state["loss_mask"].numpy()
        self.documents = np.empty(len(lengths), DOCUMENT)
        self.documents["start"] = np.cumsum(lengths) - lengths
        for name, column in columns.items():
            self.documents[name] = column
        self.order = np.arange(len(lengths))
        self.shortest = int(lengths.min(initial=self._max_document_len))
        self._tokens_end, self._documents_end = len(tokens), len(lengths)
        self.num_added, self.num_gone = state["num_added"], state["num_gone"]
        self._idle_reads = state["idle_reads"]
        self.account = TokenAccount(**state["account"])
        self.account_before = TokenAccount(**state["account_before"])

    def _count(self, appended: Appended, num_tokens: int) -> None:
        account = self.account
        account.over_long_documents += appended.over_long
        account.read += num_tokens
        account.waiting += appended.kept
        account.without_targets += appended.tokens_without_targets
        account.documents_without_targets += appended.without_targets
        cut_off = num_tokens - appended.kept - appended.tokens_without_targets
        if self._over_long is OverLong.DROP:
            account.dropped += cut_off
        else:
            account.truncated += cut_off

    def _check(self, appended: Appended, num_tokens: int) -> None:
        if appended.least < 0 or appended.longest > num_tokens or appended.total != num_tokens:
            raise ValueError(
                f"a FlatSourceBatch has {num_tokens} tokens, but its lengths, from {appended.least} to "
                f"{appended.longest}, come to {appended.total}"
            )
        check_ids(appended.smallest, appended.largest, self._vocab_size)
        if appended.longest > self._max_document_len and self._over_long is OverLong.ERROR:
            raise ValueError(
                f"a document of {appended.longest} tokens does not fit a row of {self._max_document_len} slots; "
                f"give another over_long policy, or cut or split it before it is packed"
            )

    def _widen(self, dtype: np.dtype[Any]) -> None:
        """Make sure that the token array can hold ids of this type."""
        types: tuple[Any, ...] = np.uint16, np.uint32, np.int64
        needed = next((wider for wider in types if np.can_cast(dtype, wider)), np.int64)
        if self.tokens.dtype.itemsize < np.dtype(needed).itemsize:
            self.tokens = self.tokens.astype(needed)

    def _make_room(self, tokens: int, documents: int) -> None:
        """Make sure that so many tokens and documents can be added."""
        if self._fits(tokens, documents):
            return
        self._tokens_end, self._documents_end = int(self.documents["length"][self.order].sum()), len(self.order)
        slots, entries = len(self.tokens), len(self.documents)
        if slots < 2 * (self._tokens_end + tokens) + BLOCK or entries < 2 * (self._documents_end + documents):
            slots, entries = 4 * (self._tokens_end + tokens) + BLOCK, 4 * (self._documents_end + documents)
        old = self.tokens, self.loss_mask, self.documents, self.order
        self.tokens, self.loss_mask, self.documents = _copy_to_new_arrays(*old, slots, entries)
        self.order = np.arange(self._documents_end)
        lengths = self.documents["length"][: self._documents_end]
        self.shortest = int(lengths.min(initial=self._max_document_len))

    def _fits(self, tokens: int, documents: int) -> bool:
        tokens_end, documents_end = self._tokens_end + tokens, self._documents_end + documents
        return tokens_end + BLOCK <= len(self.tokens) and documents_end <= len(self.documents)


def redeal_buffers(states: Sequence[BufferState], rank: int, world_size: int) -> BufferState:
    """The state of one rank's buffer after the documents that waited on other ranks are dealt out again.

    The documents that were first in line come first, then the second ones, and so on. Counts that only a whole run has
    are shared out evenly.

    Args:
        states: of all ranks that saved.
        rank: the rank that continues.
        world_size: number of ranks that continue.
    """
    names = states[0]["documents"]
    columns = {name: np.concatenate([state["documents"][name].numpy() for state in states]) for name in names}
    ends = np.cumsum(columns["length"])
    positions_in_line = np.concatenate([np.arange(len(state["documents"]["length"])) for state in states])
    dealt = np.argsort(positions_in_line, kind="stable")[rank::world_size]
    slices = [slice(ends[index] - columns["length"][index], ends[index]) for index in dealt]
    kept = {name: column[dealt] for name, column in columns.items()} | {"serial": np.arange(len(dealt))}
    tokens = np.concatenate([_tokens_of(state) for state in states])
    loss_mask = np.concatenate([state["loss_mask"].numpy() for state in states])
    totals = {name: sum(state["account"][name] for state in states) for name in states[0]["account"]}
    account = {name: share_of(total, rank, world_size) for name, total in totals.items()}
    account["waiting"] = int(kept["length"].sum())
    account["read"] = TokenAccount(**account).placed
    return {
        "num_added": len(dealt),
        "num_gone": 0,
        "idle_reads": 0,
        "account": account,
        "account_before": account,
        **_as_bytes(np.concatenate([tokens[:0], *(tokens[each] for each in slices)])),
        "loss_mask": torch.from_numpy(np.concatenate([loss_mask[:0], *(loss_mask[each] for each in slices)])),
        "documents": {name: torch.from_numpy(column) for name, column in kept.items()},
    }


def _copy_state(
    tokens: Tokens, loss_mask: LossMask, documents: DocumentTable, order: NDArray[np.int64], counts: Any
) -> BufferState:
    """A copy of the documents in `order` only."""
    sizes = int(documents["length"][order].sum()), len(order)
    own_tokens, own_mask, table = _copy_to_new_arrays(tokens, loss_mask, documents, order, *sizes)
    columns = {name: torch.from_numpy(table[name].copy()) for name in DOCUMENT.names or () if name != "start"}
    parts = {**_as_bytes(own_tokens), "loss_mask": torch.from_numpy(own_mask), "documents": columns}
    state: BufferState = counts | parts
    return state


def _copy_to_new_arrays(
    tokens: Tokens,
    loss_mask: LossMask,
    documents: DocumentTable,
    order: NDArray[np.int64],
    slots: int,
    entries: int,
) -> tuple[Tokens, LossMask, DocumentTable]:
    """New arrays with the documents in `order` at their front."""
    dtype: Any = tokens.dtype
    tokens_to: Tokens = np.empty(slots, dtype)
    loss_mask_to = np.empty(slots if len(loss_mask) else 0, np.uint8)
    documents_to: DocumentTable = np.empty(entries, DOCUMENT)
    compact(tokens, loss_mask, documents, order, tokens_to, loss_mask_to, documents_to)
    return tokens_to, loss_mask_to, documents_to


def _as_bytes(tokens: NDArray[Any]) -> TokenState:
    """The tokens as a state holds them: `tokens` and `token_dtype`."""
    return {"tokens": torch.from_numpy(tokens.view(np.uint8)), "token_dtype": str(tokens.dtype)}


def _tokens_of(state: TokenState) -> NDArray[Any]:
    """The tokens that a state holds."""
    dtype: Any = np.dtype(state["token_dtype"])
    return state["tokens"].numpy().view(dtype)
