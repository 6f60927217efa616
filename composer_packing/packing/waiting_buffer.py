"""The waiting buffer: reads and checks source batches, keeps the documents that wait for a row, and counts tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.snapshots import share_of
from composer_packing.packing.document_store import DocumentsState, DocumentStore, documents_state, redeal_documents
from composer_packing.packing.document_table import DocumentArrays
from composer_packing.packing.ingest import Arrival, Entered, Measured, append_documents
from composer_packing.packing.options import Objective, OverLong
from composer_packing.packing.settings import BatchShape, DocumentPolicies, LabelSettings
from composer_packing.packing.source_batch import FlatSourceBatch, SourceBatch, flat_source_batch, validate_source_batch
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.token_arrays import check_ids, token_dtype

IDLE_READS = 1000
"""Source batches in a row that may give no document."""


class BufferState(DocumentsState):
    """Saved waiting buffer.

    Attributes:
        num_added: documents and pieces added in all epochs.
        num_gone: documents and pieces of `num_added` that no longer wait.
        idle_reads: source batches read in a row that gave no document.
        account: the token account.
        account_before: the token account at the start of the epoch.
    """

    num_added: int
    num_gone: int
    idle_reads: int
    account: dict[str, int]
    account_before: dict[str, int]


class WaitingBuffer:
    """Documents that were read and wait for a row, in waiting order.

    Args:
        shape: size of a source batch, and length of the longest document.
        labels: whether documents have numbers and loss masks, and how large ids may be.
        policies: what happens to documents that are too long.

    Attributes:
        num_added: documents and pieces added in all epochs.
        num_gone: documents and pieces of `num_added` that no longer wait.
        account: where all tokens are.
        account_before: where all tokens were at the start of the epoch.
    """

    def __init__(self, shape: BatchShape, labels: LabelSettings, policies: DocumentPolicies) -> None:
        keyed = labels.keyed_masking
        self._src_batch_size = shape.src_batch_size
        self._longest_document = shape.longest_document
        self._over_long = OverLong(policies.over_long)
        self._vocab_size = None if keyed is None else keyed.vocab_size
        self._numbered = keyed is not None
        self._loss_masked = labels.objective is Objective.SFT
        # Without a vocabulary, the first source batches show how wide ids are.
        dtype = np.uint16 if self._vocab_size is None else token_dtype(self._vocab_size)
        self._store = DocumentStore(dtype, self._loss_masked, self._longest_document)
        self.num_added = 0
        self.num_gone = 0
        self.account = TokenAccount()
        self.account_before = TokenAccount()
        self._idle_reads = 0

    def __len__(self) -> int:
        return len(self._store.order)

    @property
    def documents(self) -> DocumentArrays:
        """Arrays that hold the waiting documents, among others."""
        return self._store.documents

    @property
    def order(self) -> NDArray[np.int64]:
        """Indices into the table, in waiting order: int64 `(waiting,)`."""
        return self._store.order

    @property
    def shortest(self) -> int:
        """A bound: no waiting document is shorter."""
        return self._store.shortest

    def start_epoch(self) -> None:
        """Remember the account of this moment as `account_before`."""
        self.account_before = replace(self.account)

    def read(self, source: Iterator[SourceBatch], epoch: int, batch: int) -> int | None:
        """Add the next source batch.

        Args:
            source: gives source batches.
            epoch: number of the current epoch.
            batch: batches packed so far.

        Returns:
            The number of documents and pieces added, or None if the source has ended.

        Raises:
            ValueError: `IDLE_READS` source batches in a row gave no document, or an error of `append`.
            TypeError: an error of `append`.
        """
        for source_batch in source:
            if not isinstance(source_batch, FlatSourceBatch):
                source_batch = flat_source_batch(source_batch, numbered=self._numbered, loss_masked=self._loss_masked)
            added = self.append(source_batch, epoch, batch)
            self._idle_reads = 0 if added else self._idle_reads + 1
            if self._idle_reads == IDLE_READS:
                raise ValueError(
                    f"{IDLE_READS} source batches in a row gave no document to pack; so far "
                    f"{self.account.over_long_documents} were longer than {self._longest_document} tokens, and of "
                    f"{self.account.documents_without_targets} a row would hold no token to learn"
                )
            return added
        return None

    def append(self, source_batch: FlatSourceBatch, epoch: int = 0, batch: int = 0) -> int:
        """Add the documents of a source batch that are not empty. After an error, nothing of it has been added.

        Args:
            source_batch: the source batch.
            epoch: epoch in which it was read.
            batch: batches that had been packed when it was read.

        Returns:
            The number of documents and pieces added.

        Raises:
            TypeError: the source batch is not made of one-dimensional integers, or lacks numbers or a loss mask.
            ValueError: the source batch holds too many documents, its parts do not go together, an id is out of range,
                or a document is too long and the policy is `OverLong.ERROR`.
        """
        tokens, lengths, numbers, loss_mask = validate_source_batch(source_batch, self._numbered, self._loss_masked)
        if len(lengths) > self._src_batch_size:
            raise ValueError(
                f"the source gave {len(lengths)} documents at once, more than src_batch_size={self._src_batch_size} "
                f"(batch_size of from_composer)"
            )
        store, longest = self._store, self._longest_document
        if self._vocab_size is None:
            store.widen(tokens.dtype)
        free = store.free_part(len(tokens), len(lengths) + len(tokens) // longest)
        kept_of_over_long = {OverLong.TRUNCATE: longest, OverLong.DROP: 0}.get(self._over_long, len(tokens))
        measured, entered, order = append_documents(
            tokens,
            lengths,
            numbers,
            loss_mask,
            free,
            store.order,
            Arrival(store.tokens_end, store.documents_end, epoch, batch, serial=self.num_added),
            longest,
            kept_of_over_long,
        )
        self._check(measured, len(tokens))
        store.take(len(tokens), entered.documents, entered.shortest, order)
        self.num_added += entered.documents
        self._count(entered, len(tokens))
        return entered.documents

    def emit(self, left: NDArray[np.int64], num_tokens: int) -> None:
        """Forget the documents that were placed in a batch.

        Args:
            left: int64 `(waiting,)`, indices into the table of the documents that still wait, in waiting order.
            num_tokens: tokens of the placed documents.
        """
        self.num_gone += len(self) - len(left)
        self.account.emitted += num_tokens
        self.account.waiting -= num_tokens
        self._store.order = left

    def clear(self) -> None:
        """Forget all waiting documents: they are left over."""
        self.num_gone += len(self)
        self.account.left_over += self.account.waiting
        self.account.waiting = 0
        self._store.order = self.order[:0]

    def snapshot(self) -> Callable[[], BufferState]:
        """A function that gives the state as it is now, whenever it is called. Only calling it copies documents."""
        documents, order = self.documents, self.order
        num_added, num_gone, idle_reads = self.num_added, self.num_gone, self._idle_reads
        account, account_before = vars(self.account).copy(), vars(self.account_before)

        def state() -> BufferState:
            return {
                "num_added": num_added,
                "num_gone": num_gone,
                "idle_reads": idle_reads,
                "account": account,
                "account_before": account_before,
                **documents_state(documents, order),
            }

        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all documents and counts by saved ones.

        Args:
            state: a `BufferState`.
        """
        self._store.load(state)
        self.num_added, self.num_gone = state["num_added"], state["num_gone"]
        self._idle_reads = state["idle_reads"]
        self.account = TokenAccount(**state["account"])
        self.account_before = TokenAccount(**state["account_before"])

    def _check(self, measured: Measured, num_tokens: int) -> None:
        """Raise ValueError if lengths do not fit the tokens, an id is out of range, or a document is too long."""
        if measured.shortest < 0 or measured.longest > num_tokens or measured.total != num_tokens:
            raise ValueError(
                f"a FlatSourceBatch has {num_tokens} tokens, but its lengths, from {measured.shortest} to "
                f"{measured.longest}, come to {measured.total}"
            )
        check_ids(measured.smallest_id, measured.largest_id, self._vocab_size)
        if measured.longest > self._longest_document and self._over_long is OverLong.ERROR:
            raise ValueError(
                f"a document of {measured.longest} tokens does not fit a row of {self._longest_document} slots; give "
                f"another over_long policy, or cut or split the document before it is packed"
            )

    def _count(self, entered: Entered, num_tokens: int) -> None:
        """Add a source batch to the account."""
        account = self.account
        account.read += num_tokens
        account.waiting += entered.tokens
        account.over_long_documents += entered.over_long
        account.without_targets += entered.tokens_without_targets
        account.documents_without_targets += entered.without_targets
        cut_off = num_tokens - entered.tokens - entered.tokens_without_targets
        if self._over_long is OverLong.DROP:
            account.dropped += cut_off
        else:
            account.truncated += cut_off


def redeal_buffers(states: Sequence[BufferState], rank: int, world_size: int) -> BufferState:
    """The buffer of one rank after the documents that waited on all saved ranks are dealt out again.

    Args:
        states: of all ranks that saved.
        rank: the rank that resumes.
        world_size: number of ranks that resume.
    """
    documents = redeal_documents(states, rank, world_size)
    totals = {name: sum(state["account"][name] for state in states) for name in states[0]["account"]}
    account = {name: share_of(total, rank, world_size) for name, total in totals.items()}
    account["waiting"] = int(documents["documents"]["length"].sum())
    account["read"] = TokenAccount(**account).placed
    return {
        "num_added": len(documents["documents"]["length"]),
        "num_gone": 0,
        "idle_reads": 0,
        "account": account,
        "account_before": account,
        **documents,
    }
