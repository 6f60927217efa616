"""The sequence packer: source batches go in, packed and labelled batches come out.

This is what both packing strategies share. A strategy is a subclass: it chooses the rows of the documents that wait.
With default settings, `GreedyBestFitSequencePacker` gives the batches and masks of the packer published with ModernBERT
(Warner et al., 2024), to the bit.
"""

import abc
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from composer_packing.batch.contract import Batch
from composer_packing.common.arguments import check_positive
from composer_packing.common.durations import DurationLike
from composer_packing.common.redealing import redeal_stage, stage_has_same_shares
from composer_packing.common.snapshots import Stateful, differences, share_of
from composer_packing.packing.epoch_end import (
    EpochEnd,
    check_epoch_end,
    log_dropped_documents,
    log_waiting_documents,
)
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.layout import lay_out
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.row_writer import RowWriter
from composer_packing.packing.schedules import BatchSizeWarmup, MaskingSchedule, MaskRatioCooldown
from composer_packing.packing.settings import BatchShape, DocumentPolicies, LabelSettings, ScheduleSettings
from composer_packing.packing.source_batch import SourceBatch
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.waiting_buffer import BufferState, WaitingBuffer, redeal_buffers

log = logging.getLogger(__name__)

VERSION = 1
"""Version of `PackerState`. Raise it when a packer must no longer load older states."""


class PackerState(TypedDict):
    """Everything that the next batch depends on.

    Attributes:
        version: `VERSION` of the packer that was saved.
        settings: settings that the packer that loads the state must share.
        epoch: number of the epoch, -1 before the first.
        seqs_consumed: documents read in this epoch.
        seqs_emitted: documents in the batches of this epoch.
        source_batches: source batches read in this epoch.
        source_ended: the source has nothing left in this epoch.
        local: what this rank has packed in all epochs: real tokens (`tok`), documents (`sp`) and batches (`ba`).
        rng: state of the generator of the published masks.
        source: state of the source, or None.
        waiting: state of the waiting buffer.
    """

    version: int
    settings: dict[str, Any]
    epoch: int
    seqs_consumed: int
    seqs_emitted: int
    source_batches: int
    source_ended: bool
    local: dict[str, int]
    rng: Any
    source: Any
    waiting: BufferState


class SequencePacker(abc.ABC):
    """Packs documents into rows, writes their labels, and counts documents and tokens.

    With rows of eight slots and two rows in a batch::

        source batches         waiting buffer        batch
        aaaaa bb cccc    -->   aaaaa bb cccc   -->   aaaaabb.
        ddd eeeeee             ddd eeeeee            ccccddd.     eeeeee waits for the next batch

    Each `iter()` starts an epoch. The epoch ends when the source has ended and the waiting documents cannot give every
    row a document; `Tail` says what happens to them. A packer has no `len()`: the length of a training is given in
    tokens or batches.

    Args:
        src_iterable: gives the source batches of an epoch at every `iter()`. If it has a `DistributedSampler` as
            `sampler`, as a DataLoader may, the packer tells the sampler the epoch.
        shape: sizes of source batches, batches, rows and the waiting buffer.
        labels: objective, token ids and masks; None for the published defaults.
        schedules: batch-size warmup and mask-ratio cooldown; None for neither.
        policies: what happens to documents that fit no row or are left over; None for the published defaults.

    Raises:
        ValueError: two groups of settings do not go together. While iterating: a document does not fit a row, an id is
            out of range, many source batches in a row give no document, or an epoch gives no batch.
        TypeError: while iterating: a document is not a sequence of ids, or lacks its number or loss mask.
        RuntimeError: an iterator is used after a newer one was made.

    Attributes:
        epoch: number of the current epoch, -1 before the first.
        seqs_consumed: documents read in this epoch, without the dropped ones. Pieces count as documents.
        seqs_emitted: documents in the batches of this epoch, including those carried into the epoch.
        source_batches: source batches read in this epoch.
        source_ended: the source has nothing left in this epoch.
    """

    def __init__(
        self,
        src_iterable: Iterable[SourceBatch],
        shape: BatchShape,
        labels: LabelSettings | None = None,
        schedules: ScheduleSettings | None = None,
        policies: DocumentPolicies | None = None,
    ) -> None:
        self.src_iterable = src_iterable
        self.shape = shape
        self.labels = LabelSettings() if labels is None else labels
        self.policies = DocumentPolicies() if policies is None else policies
        schedules = ScheduleSettings() if schedules is None else schedules
        cooldown = schedules.mask_ratio_cooldown
        if cooldown is not None and self.labels.objective is not Objective.MLM:
            objective = Objective(self.labels.objective).value
            raise ValueError(
                f"final_masking_ratio={cooldown.final_masking_ratio} needs objective='mlm': {objective=} masks nothing"
            )
        self._world_size = schedules.world_size
        self._schedules = schedules.start(shape.out_batch_size, self.labels.mask_prob)
        self._writer = RowWriter(shape, self.labels)
        self._waiting = WaitingBuffer(shape, self.labels, self.policies)
        self._rng = np.random.default_rng(self.labels.seed)
        self.epoch = -1
        self.seqs_consumed = 0
        self.seqs_emitted = 0
        self.source_batches = 0
        self.source_ended = True
        self._latest_iterator = 0
        """Number of the latest iterator; older ones must not continue."""
        self._resumes_epoch = False
        """Whether the next `iter()` resumes the epoch of a loaded state."""
        self._source_batches_to_skip = 0
        """Source batches that the next `iter()` reads again and passes over."""

    @property
    def local_tokens(self) -> int:
        """Real tokens packed so far in all epochs, including the batches that the trainer has not taken yet."""
        return self._schedules.local["tok"]

    @property
    def rows_per_batch(self) -> int:
        """Rows of the batch that is packed next."""
        return self._schedules.rows

    @property
    def local_counts(self) -> dict[str, int]:
        """What this rank has packed so far in all epochs: real tokens (`tok`), documents (`sp`) and batches (`ba`)."""
        return self._schedules.local.copy()

    @property
    def schedules_are_over(self) -> bool:
        """Whether the number of rows and the mask ratio have their final values."""
        return self._schedules.are_over

    def follow(self, counts: Mapping[str, int]) -> None:
        """Let the schedules of the next batch follow these counts, with the keys of `local_counts`.

        Without this call the schedules follow `local_counts`.
        """
        self._schedules.followed = counts

    @property
    def token_account(self) -> TokenAccount:
        """Where the tokens of all documents read so far are. It may not add up while a background thread packs."""
        return dataclasses.replace(self._waiting.account)

    def state_dict(self) -> PackerState:
        """State from which the next batch can be made again.

        If the packer runs on a background thread, ask the `BufferedIterable` or `Lockstep` instead: the packer itself
        is already some batches ahead.
        """
        return self.snapshot()()

    def snapshot(self) -> Callable[[], PackerState]:
        """A function that gives the state as it is now, whenever it is called. Taking it copies no documents."""
        source = self.src_iterable
        epoch, seqs_consumed, seqs_emitted = self.epoch, self.seqs_consumed, self.seqs_emitted
        source_batches, source_ended = self.source_batches, self.source_ended
        local, rng = self._schedules.local.copy(), self._rng.bit_generator.state
        source_state = source.state_dict() if isinstance(source, Stateful) else None
        waiting = self._waiting.snapshot()

        def state() -> PackerState:
            return {
                "version": VERSION,
                "settings": self._lasting_settings(),
                "epoch": epoch,
                "seqs_consumed": seqs_consumed,
                "seqs_emitted": seqs_emitted,
                "source_batches": source_batches,
                "source_ended": source_ended,
                "local": local,
                "rng": rng,
                "source": source_state,
                "waiting": waiting(),
            }

        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the epoch of a saved state at the next `iter()`.

        If that epoch had already ended, the next `iter()` gives no more batches of it. A source without
        `load_state_dict` is read again from the start of the epoch, and the source batches read before are passed over.

        Args:
            state: a `PackerState`.

        Raises:
            ValueError: the state has another version or other settings, or its source cannot be resumed.
        """
        self._check_state(state)
        self.epoch = state["epoch"]
        self.seqs_consumed = state["seqs_consumed"]
        self.seqs_emitted = state["seqs_emitted"]
        self.source_batches = state["source_batches"]
        self.source_ended = state["source_ended"]
        self._schedules.local, self._schedules.followed = dict(state["local"]), None
        self._rng.bit_generator.state = state["rng"]
        self._waiting.load_state_dict(state["waiting"])
        self._source_batches_to_skip = 0 if self._load_source(state["source"]) else self.source_batches
        self._resumes_epoch = self.epoch >= 0
        self._latest_iterator += 1

    def redeal(self, states: Sequence[PackerState], rank: int, world_size: int) -> PackerState:
        """The state with which one of the ranks that resume begins; see `common.redealing`.

        The rank begins in the earliest epoch in which a saved rank was. Every document that waited, and every document
        that was not read, is dealt to exactly one rank.

        Args:
            states: of all ranks that saved.
            rank: the rank that resumes.
            world_size: number of ranks that resume.

        Raises:
            ValueError: the source cannot deal out its documents again.
        """
        totals = {unit: sum(state["local"][unit] for state in states) for unit in ("tok", "sp")}
        local = {unit: share_of(total, rank, world_size) for unit, total in totals.items()}
        return {
            **states[0],
            "epoch": min(max(state["epoch"], 0) for state in states),
            "source_ended": False,
            "seqs_consumed": 0,
            "seqs_emitted": 0,
            "source_batches": 0,
            "local": states[0]["local"] | local,  # every rank has packed the same number of batches
            "waiting": redeal_buffers([state["waiting"] for state in states], rank, world_size),
            "source": redeal_stage(self.src_iterable, [state["source"] for state in states], rank, world_size),
        }

    def has_same_shares(self, state: PackerState) -> bool:
        """Whether this rank would read the same share of the documents as the rank that saved `state`."""
        return stage_has_same_shares(self.src_iterable, state["source"])

    def start_counting_at(self, tokens: int, documents: int, batches: int) -> None:
        """Let the schedules continue from these counts of this rank."""
        self._schedules.local, self._schedules.followed = {"tok": tokens, "sp": documents, "ba": batches}, None

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch, or resume the epoch of a loaded state. Earlier iterators raise from then on."""
        if not self._resumes_epoch:
            self._start_epoch()
        self._resumes_epoch = False
        _tell_epoch(self.src_iterable, self.epoch)
        # A source that has ended is not asked again before the next epoch: some sources would start again.
        to_skip = self._source_batches_to_skip
        source = iter(()) if self.source_ended else itertools.islice(self.src_iterable, to_skip, None)
        self._latest_iterator += 1
        return self._batches(self._latest_iterator, source)

    @classmethod
    def from_composer(
        cls,
        src_iterable: Iterable[SourceBatch],
        batch_size: int = 512,
        micro_batch_size: int = 32,
        max_seq_len: int = 1024,
        buffer_size: int = 5120,
        *,
        pad_token_id: int = LabelSettings.pad_token_id,
        mask_token_id: int = LabelSettings.mask_token_id,
        ignore_token_id: int = LabelSettings.ignore_token_id,
        mask_prob: float = LabelSettings.mask_prob,
        seed: int = LabelSettings.seed,
        suppress_masking: bool = LabelSettings.suppress_masking,
        batch_size_warmup_min_size: int | None = None,
        batch_size_warmup_tokens: DurationLike | None = None,
        masking_ratio_cooldown_tokens: DurationLike | None = None,
        masking_ratio_cooldown_start_tokens: DurationLike | None = None,
        final_masking_ratio: float | None = None,
        masking_cooldown_schedule_type: MaskingSchedule | str = MaskingSchedule.LINEAR,
        masking_ratio_step_size: float | None = None,
        world_size: int = ScheduleSettings.world_size,
        tail: Tail | str = DocumentPolicies.tail,
        over_long: OverLong | str = DocumentPolicies.over_long,
        objective: Objective | str = LabelSettings.objective,
        keyed_masking: KeyedMasking | None = None,
        pin_memory: bool = BatchShape.pin_memory,
        max_document_len: int | None = None,
    ) -> "SequencePacker":
        """A packer in Composer's terms, with the published signature: one packed row replaces one padded microbatch.

        Args:
            src_iterable: gives source batches of `batch_size` documents.
            batch_size: sequences per optimizer step on this rank.
            micro_batch_size: sequences per microbatch; a row has `micro_batch_size * max_seq_len` slots.
            max_seq_len: longest sequence in tokens.
            buffer_size: see `BatchShape`.
            pad_token_id: see `LabelSettings`.
            mask_token_id: see `LabelSettings`.
            ignore_token_id: see `LabelSettings`.
            mask_prob: see `LabelSettings`.
            seed: see `LabelSettings`.
            suppress_masking: see `LabelSettings`.
            batch_size_warmup_min_size: sequences per optimizer step at the start, a multiple of `micro_batch_size`.
            batch_size_warmup_tokens: see `BatchSizeWarmup`.
            masking_ratio_cooldown_tokens: see `MaskRatioCooldown`.
            masking_ratio_cooldown_start_tokens: see `MaskRatioCooldown`; None for 0.
            final_masking_ratio: see `MaskRatioCooldown`.
            masking_cooldown_schedule_type: see `MaskRatioCooldown`.
            masking_ratio_step_size: see `MaskRatioCooldown`.
            world_size: see `ScheduleSettings`.
            tail: see `DocumentPolicies`.
            over_long: see `DocumentPolicies`.
            objective: see `LabelSettings`.
            keyed_masking: see `LabelSettings`.
            pin_memory: see `BatchShape`.
            max_document_len: see `BatchShape`.

        Raises:
            TypeError: a size or an id is not an int.
            ValueError: `micro_batch_size` does not divide a size, or a group of settings is invalid.
        """
        check_positive(batch_size=batch_size, micro_batch_size=micro_batch_size, max_seq_len=max_seq_len)
        if batch_size % micro_batch_size:
            raise ValueError(f"{batch_size=} must be a multiple of {micro_batch_size=}")
        shape = BatchShape(
            src_batch_size=batch_size,
            out_batch_size=batch_size // micro_batch_size,
            out_pseq_len=micro_batch_size * max_seq_len,
            buffer_size=buffer_size,
            max_document_len=max_document_len,
            pin_memory=pin_memory,
        )
        labels = LabelSettings(
            objective=objective,
            pad_token_id=pad_token_id,
            mask_token_id=mask_token_id,
            ignore_token_id=ignore_token_id,
            mask_prob=mask_prob,
            seed=seed,
            suppress_masking=suppress_masking,
            keyed_masking=keyed_masking,
        )
        warmup = BatchSizeWarmup.from_options(batch_size_warmup_min_size, batch_size_warmup_tokens)
        cooldown = MaskRatioCooldown.from_options(
            final_masking_ratio,
            masking_ratio_cooldown_tokens,
            masking_ratio_cooldown_start_tokens,
            masking_cooldown_schedule_type,
            masking_ratio_step_size,
        )
        schedules = ScheduleSettings(None if warmup is None else warmup.in_rows(micro_batch_size), cooldown, world_size)
        return cls(src_iterable, shape, labels, schedules, DocumentPolicies(tail, over_long))

    @abc.abstractmethod
    def _choose_rows(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        """Read as many source batches as the strategy wants, and choose a row for each waiting document.

        Args:
            source: the rest of the epoch's source batches, to be read with `_read`.
            rows: rows that the batch should have.

        Returns:
            int64 `(waiting,)`: the row of each waiting document, `NO_ROW` for a document that has to wait. Rows are
            used from 0 on, without gaps.
        """

    @abc.abstractmethod
    def _next_order(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """The waiting order of the documents that found no row, for the next batch.

        Args:
            left: int64 `(left,)`, their indices into the table, in the waiting order so far.
        """

    def _read(self, source: Iterator[SourceBatch]) -> int | None:
        """Add the next source batch to the waiting buffer.

        Returns:
            The number of documents it gave, or None if the source has ended.
        """
        added = self._waiting.read(source, self.epoch, self._schedules.local["ba"])
        if added is None:
            self.source_ended = True
            return None
        self.source_ended = False
        self.source_batches += 1
        self.seqs_consumed += added
        return added

    def _start_epoch(self) -> None:
        if self.policies.tail is not Tail.CARRY:
            self._waiting.clear()
        elif not self.source_ended:
            log.warning("epoch %d was left before its source ended: the rest of the source is not read", self.epoch)
        self.epoch += 1
        self.seqs_consumed = 0
        self.seqs_emitted = 0
        self.source_batches = 0
        self.source_ended = False
        self._source_batches_to_skip = 0
        self._waiting.start_epoch()
        self._rng = np.random.default_rng(self.labels.seed + self.epoch)

    def _batches(self, iterator: int, source: Iterator[SourceBatch]) -> Iterator[Batch]:
        """The batches of an epoch, for the iterator with this number."""
        waiting, schedules, epoch = self._waiting, self._schedules, self.epoch
        row_len, emits_tail = self.shape.out_pseq_len, self.policies.tail is Tail.EMIT
        while True:
            if iterator != self._latest_iterator:
                raise RuntimeError("this iterator is no longer valid: a newer one was made, or a state was loaded")
            rows = schedules.rows
            row_of = self._choose_rows(source, rows)
            layout = lay_out(
                waiting.documents.table, waiting.order, row_of, row_len, schedules.local["ba"], waiting.num_gone
            )
            used_rows = len(layout.num_documents)
            if used_rows == 0 or (used_rows < rows and not emits_tail):
                break
            batch = self._writer.write(waiting.documents, layout, schedules.mask_ratio, self._rng)
            if schedules.changes_mask_ratio and batch["labels"] is not None:
                batch["mask_prob"] = torch.tensor(schedules.mask_ratio, dtype=torch.float32)
            num_documents, num_tokens = len(layout.documents), int(layout.num_tokens.sum())
            self.seqs_emitted += num_documents
            waiting.emit(self._next_order(layout.left), num_tokens)
            schedules.advance(num_tokens, num_documents)
            yield batch
        self._end_epoch(epoch)

    def _end_epoch(self, epoch: int) -> None:
        """Log what happened to the documents of an epoch, and raise ValueError if no later epoch can give a batch."""
        waiting, tail = self._waiting, self.policies.tail
        end = EpochEnd(
            epoch=epoch,
            account=waiting.account.since(waiting.account_before),
            num_read=self.seqs_consumed,
            num_emitted=self.seqs_emitted,
            num_waiting=len(waiting),
            num_added=waiting.num_added,
        )
        log_dropped_documents(end, self.policies)
        check_epoch_end(
            end,
            self.policies,
            rows=self.rows_per_batch,
            row_len=self.shape.out_pseq_len,
            has_other_ranks=self._world_size > 1,
            is_read_once=isinstance(self.src_iterable, Iterator),
        )
        log_waiting_documents(end, self.policies)
        if tail is not Tail.CARRY:
            waiting.clear()

    def _lasting_settings(self) -> dict[str, Any]:
        """Settings that must be the same when a state is loaded, as plain values.

        The sizes of a rank's batch and buffer and the schedules may differ: they depend on the number of ranks.
        """
        labels, policies, keyed = self.labels, self.policies, self.labels.keyed_masking
        return {
            "out_pseq_len": self.shape.out_pseq_len,
            "pad_token_id": labels.pad_token_id,
            "mask_token_id": labels.mask_token_id,
            "ignore_token_id": labels.ignore_token_id,
            "mask_prob": labels.mask_prob,
            "seed": labels.seed,
            "tail": Tail(policies.tail).value,
            "over_long": OverLong(policies.over_long).value,
            "objective": Objective(labels.objective).value,
            "packer": type(self).__name__,
            "keyed_masking": None
            if keyed is None
            else [keyed.seed, keyed.vocab_size, *sorted(keyed.special_token_ids)],
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless this packer can load the state."""
        if state.get("version") != VERSION:
            raise ValueError(f"the state of a packer has version {state.get('version')}; this packer reads {VERSION}")
        if found := differences(state["settings"], self._lasting_settings()):
            raise ValueError(f"the state is from a packer with other settings: {'; '.join(found)}")
        source = state["source"]
        if isinstance(source, Mapping) and "sample_in_epoch" in source:  # a key of StreamingDataset's state
            raise ValueError(
                "a StreamingDataLoader cannot be resumed: it does not count documents, so its state is not where it "
                "stopped; use a DocumentLoader or torchdata's StatefulDataLoader"
            )

    def _load_source(self, source_state: Any) -> bool:
        """Let the source resume from its own state, and say whether it can."""
        source = self.src_iterable
        if isinstance(source, Stateful) and source_state is not None:
            # Before the state is loaded: a source may begin to read as soon as it has its state.
            _tell_epoch(source, max(self.epoch, 0))
            source.load_state_dict(source_state)
            return True
        if self.source_batches and not self.source_ended:
            log.warning(
                "the source has no state of its own: %d source batches are read again and passed over",
                self.source_batches,
            )
        return False


def _tell_epoch(source: object, epoch: int) -> None:
    """Tell the epoch to the sampler of a source, if it is a `DistributedSampler`."""
    sampler = getattr(source, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
