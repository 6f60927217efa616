"""The waiting buffer: documents read but not yet placed, in one token array and one table.

A source batch is copied in at one go, in the narrowest type that holds its tokens. What leaves stays where it
is until the array is full; then what still waits is copied to the front of a new one. An array is at least twice as
large as that, so that a token is moved less than once on average, and memory grows with what waits, not with what was
read. What has been written in an array is never changed: what waits at some moment is known for good by the arrays and
the order of that moment, and to remember it costs nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.common.redealing import share_of
from composer_packing.common.snapshots import Snapshot
from composer_packing.packing.document_table import BLOCK, DOCUMENT, DocumentTable, LossMask, Tokens
from composer_packing.packing.ingest import Appended, append_documents, compact
from composer_packing.packing.options import OverLong
from composer_packing.packing.source_batch import FlatSourceBatch, SourceBatch, flat_source_batch, validate_source_batch
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.token_arrays import check_ids, token_dtype

IDLE_READS = 1000
"""Source batches in a row that may give no document."""


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
        shortest: no document is shorter; a bound, by which placing stops early, not what it places.
        num_added: documents and pieces that were ever added.
        num_gone: those of them that wait no longer.
        account: where all tokens are.
        account_before: where they were at the start of the epoch.
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
        """Keep the account as it is now."""
        self.account_before = replace(self.account)

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
        entered = Appended(
            *append_documents(
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

    def snapshot(self) -> Snapshot:
        """What waits now, and what has been counted. Nothing is copied before the state is asked for."""
        arrays = self.tokens, self.loss_mask, self.documents, self.order
        counts = {"num_added": self.num_added, "num_gone": self.num_gone, "idle_reads": self._idle_reads}
        accounts = {"account": vars(self.account).copy(), "account_before": vars(self.account_before)}
        return partial(_state_dict, *arrays, counts | accounts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what waited when a snapshot was taken."""
        entries = {name: column.numpy() for name, column in state["documents"].items()}
        tokens, lengths = tokens_in(state), entries["length"]
        self.tokens = np.empty(len(tokens) + BLOCK, tokens.dtype)
        self.tokens[: len(tokens)] = tokens
        self.loss_mask = np.empty(len(self.tokens) if self._loss_masked else 0, np.uint8)
        self.loss_mask[: len(tokens)] = state["loss_mask"].numpy()
        self.documents = np.empty(len(lengths), DOCUMENT)
        self.documents["start"] = np.cumsum(lengths) - lengths
        for name, column in entries.items():
            self.documents[name] = column
        self.order = np.arange(len(lengths))
        self.shortest = int(lengths.min(initial=self._max_document_len))
        self._tokens_end, self._documents_end = len(tokens), len(lengths)
        self.num_added, self.num_gone = state["num_added"], state["num_gone"]
        self._idle_reads = state["idle_reads"]
        self.account = TokenAccount(**state["account"])
        self.account_before = TokenAccount(**state["account_before"])

    @staticmethod
    def redeal(states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state with which the buffer of one of the ranks that resume begins; see `common.redealing`."""
        tables = [state["documents"] for state in states]
        columns = {name: np.concatenate([table[name].numpy() for table in tables]) for name in tables[0]}
        line = np.concatenate([np.arange(len(table["length"])) for table in tables])
        mine = np.argsort(line, kind="stable")[rank::world_size]  # the first of each saved rank, then the second, ...
        ends = np.cumsum(columns["length"])
        slots = [slice(end - length, end) for end, length in zip(ends[mine], columns["length"][mine], strict=True)]

        def of_mine(arrays: list[NDArray[Any]]) -> NDArray[Any]:
            whole = np.concatenate(arrays)
            return np.concatenate([whole[:0], *(whole[each] for each in slots)])

        kept = {name: column[mine] for name, column in columns.items()} | {"serial": np.arange(len(mine))}
        totals = {name: sum(state["account"][name] for state in states) for name in states[0]["account"]}
        account = TokenAccount(**{name: share_of(total, rank, world_size) for name, total in totals.items()})
        account.waiting = int(kept["length"].sum())
        account.read = account.placed
        return {
            **as_bytes(of_mine([tokens_in(state) for state in states])),
            "loss_mask": torch.from_numpy(of_mine([state["loss_mask"].numpy() for state in states])),
            "documents": {name: torch.from_numpy(column) for name, column in kept.items()},
            "num_added": len(mine),
            "num_gone": 0,
            "idle_reads": 0,
            "account": vars(account).copy(),
            "account_before": vars(account).copy(),
        }

    def _check(self, entered: Appended, num_tokens: int) -> None:
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
        self._tokens_end, self._documents_end = int(self.documents["length"][self.order].sum()), len(self.order)
        num_slots, num_places = len(self.tokens), len(self.documents)
        if num_slots < 2 * (self._tokens_end + tokens) + BLOCK or num_places < 2 * (self._documents_end + documents):
            num_slots, num_places = 4 * (self._tokens_end + tokens) + BLOCK, 4 * (self._documents_end + documents)
        frozen = self.tokens, self.loss_mask, self.documents, self.order
        self.tokens, self.loss_mask, self.documents = _copied(*frozen, num_slots, num_places)
        self.order = np.arange(self._documents_end)
        lengths = self.documents["length"][: self._documents_end]
        self.shortest = int(lengths.min(initial=self._max_document_len))

    def _fits(self, tokens: int, documents: int) -> bool:
        tokens_end, documents_end = self._tokens_end + tokens, self._documents_end + documents
        return tokens_end + BLOCK <= len(self.tokens) and documents_end <= len(self.documents)


def _state_dict(
    tokens: Tokens, loss_mask: LossMask, documents: DocumentTable, order: NDArray[np.int64], counts: dict[str, Any]
) -> dict[str, Any]:
    """A copy of the documents in `order`, and of nothing else."""
    sizes = int(documents["length"][order].sum()), len(order)
    own_tokens, own_mask, table = _copied(tokens, loss_mask, documents, order, *sizes)
    return counts | {
        **as_bytes(own_tokens),
        "loss_mask": torch.from_numpy(own_mask),
        "documents": {name: torch.from_numpy(table[name].copy()) for name in DOCUMENT.names or () if name != "start"},
    }


def _copied(
    tokens: Tokens,
    loss_mask: LossMask,
    documents: DocumentTable,
    order: NDArray[np.int64],
    num_slots: int,
    num_places: int,
) -> tuple[Tokens, LossMask, DocumentTable]:
    """The documents in `order` at the front of new arrays."""
    dtype: Any = tokens.dtype
    to_tokens: Tokens = np.empty(num_slots, dtype)
    to_mask = np.empty(num_slots if len(loss_mask) else 0, np.uint8)
    to_documents: DocumentTable = np.empty(num_places, DOCUMENT)
    compact(tokens, loss_mask, documents, order, to_tokens, to_mask, to_documents)
    return to_tokens, to_mask, to_documents


def as_bytes(tokens: NDArray[Any]) -> dict[str, Any]:
    """Tokens in a state: not every type of theirs is one that PyTorch pickles."""
    return {"tokens": torch.from_numpy(tokens.view(np.uint8)), "token_dtype": str(tokens.dtype)}


def tokens_in(state: Mapping[str, Any]) -> NDArray[Any]:
    """The tokens of a state."""
    dtype: Any = np.dtype(state["token_dtype"])
    return state["tokens"].numpy().view(dtype)  # type: ignore[no-any-return]
