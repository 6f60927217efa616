"""The sequence packer: source batches of documents go in, packed batches come out.

This module holds what both strategies share; `best_fit` and `subset_sum` choose the row of each document. Six documents
of 5, 4, 3, 6, 3 and 2 tokens in three rows of eight slots, `.` being padding::

    a b c d e f   ->   aaaaaccc   bbbbeee.   ddddddff   ->   ids, labels, boundaries of the documents

An epoch ends when there are too few documents to put one into each row of a batch; a policy says what becomes of the
rest. With default settings `GreedyBestFitSequencePacker` gives the batches and masks of the packer published with
ModernBERT (Warner et al., 2024), bit for bit.
"""

import abc
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from composer_packing.batch.contract import IGNORE_INDEX, Batch
from composer_packing.common.arguments import check_positive
from composer_packing.common.durations import DurationLike
from composer_packing.common.redealing import redeal_stage, stage_has_same_shares
from composer_packing.common.snapshots import Snapshot, Stateful, differences, share_of
from composer_packing.packing.epoch_end import EpochEnd, log_and_check_epoch
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.layout import lay_out
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.row_writer import RowWriter
from composer_packing.packing.schedules import BatchSizeWarmup, MaskingSchedule, MaskRatioCooldown
from composer_packing.packing.settings import BatchShape, LabelSettings, Policies, ScheduleSettings
from composer_packing.packing.source_batch import SourceBatch
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.waiting_buffer import BufferState, WaitingBuffer, redeal_buffers

log = logging.getLogger(__name__)

Packer = TypeVar("Packer", bound="SequencePacker")

STATE_VERSION = 1
"""Version of the saved state. Raise it when older states must no longer be loaded."""

STREAMING_POSITION = "sample_in_epoch"
"""Key by which the state of a `StreamingDataset` is known."""


class PackerState(TypedDict):
    """Saved state of a packer.

    `settings` must match when the state is loaded. Sizes of a rank's batch and buffer, and schedules, are not part of
    it: they follow the number of ranks. `local` counts what this rank has packed, `rng` is the state of the generator
    of unkeyed masks, and `source` is the state of the source, or None if the source has none.
    """

    version: int
    settings: dict[str, Any]
    epoch: int
    seqs_consumed: int
    seqs_emitted: int
    source_batches: int
    source_ended: bool
    local: dict[str, int]
    rng: dict[str, Any]
    source: Any
    waiting: BufferState


class SequencePacker(abc.ABC):
    """Packs documents into rows, makes their labels, and counts both.

    Iterating starts an epoch. There is no `len()`: the length of a training is given in tokens or batches.

    Args:
        src_iterable: gives the source batches of an epoch at every `iter()`. If it has a `DistributedSampler`, as a
            DataLoader may, the sampler is told the epoch.
        shape: sizes of source batches, rows, batches and the buffer.
        labels: what each token's label is.
        schedules: what changes during the training.
        policies: what becomes of long documents and of an epoch's tail.
        pin_memory: put batches into pinned memory, for a GPU.

    Raises:
        ValueError: settings do not fit each other. While iterating: a document is too long, an id is out of range,
            many source batches in a row give no document, or an epoch whose tail is dropped gives no batch.
        TypeError: while iterating: a document is not a sequence of ids, or its number or loss mask is missing.
        RuntimeError: from an iterator that is used after a newer one was made.

    Attributes:
        epoch: number of the current epoch, -1 before the first.
        seqs_consumed: documents read in this epoch, without dropped ones. A piece counts as a document.
        seqs_emitted: documents in the batches of this epoch, with those carried into it.
        source_batches: source batches read in this epoch.
        source_ended: whether the source has given all its documents of this epoch.
    """

    def __init__(
        self,
        src_iterable: Iterable[SourceBatch],
        shape: BatchShape,
        labels: LabelSettings | None = None,
        schedules: ScheduleSettings | None = None,
        policies: Policies | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.src_iterable = src_iterable
        self.shape = shape
        self.labels = labels or LabelSettings()
        self.policies = policies or Policies()
        schedules = schedules or ScheduleSettings()
        self._has_other_ranks = schedules.world_size > 1
        self._schedules = schedules.start(shape.out_batch_size, self.labels)
        self._writer = RowWriter(shape.out_pseq_len, self.labels, pin_memory)
        keyed_masking = self.labels.keyed_masking
        self._waiting = WaitingBuffer(
            shape.src_batch_size,
            shape.longest_document,
            self.policies.over_long,
            vocab_size=None if keyed_masking is None else keyed_masking.vocab_size,
            numbered=keyed_masking is not None,
            loss_masked=self.labels.has_loss_mask,
        )
        self.epoch = -1
        self.seqs_consumed = 0
        self.seqs_emitted = 0
        self.source_batches = 0
        self.source_ended = True
        self._rng = np.random.default_rng(self.labels.seed)
        self._latest_iterator = 0
        self._continues_epoch = False
        self._skipped_source_batches = 0

    @property
    def local_tokens(self) -> int:
        """Real tokens packed so far, over all epochs. The trainer has taken fewer: some batches are still waiting."""
        return self._schedules.local["tok"]

    @property
    def rows_per_batch(self) -> int:
        """Rows of the batch that is packed next."""
        return self._schedules.rows

    @property
    def token_account(self) -> TokenAccount:
        """What became of the tokens of all documents read so far. It may not add up while a thread packs."""
        return dataclasses.replace(self._waiting.account)

    def state_dict(self) -> PackerState:
        """State from which the next batch can be made again.

        If the packer runs on a background thread, ask the `BufferedIterable` or `Lockstep` around it instead: the
        packer is already some batches ahead of the trainer.
        """
        state: PackerState = self.snapshot()()  # type: ignore[assignment]
        return state

    def snapshot(self) -> Snapshot:
        """A function that gives the state of this moment, also if it is called later."""
        source = self.src_iterable
        counts = {
            "epoch": self.epoch,
            "seqs_consumed": self.seqs_consumed,
            "seqs_emitted": self.seqs_emitted,
            "source_batches": self.source_batches,
            "source_ended": self.source_ended,
            "local": self._schedules.local.copy(),
            "rng": self._rng.bit_generator.state,
            "source": source.state_dict() if isinstance(source, Stateful) else None,
        }
        waiting = self._waiting.snapshot()
        return lambda: {
            "version": STATE_VERSION,
            "settings": self._lasting_settings(),
            **counts,
            "waiting": waiting(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state at the next `iter()`, in the epoch of the state.

        If that epoch's source had ended, only the documents that waited are packed. A source without `load_state_dict`
        is read again from the start of the epoch, up to its saved position.

        Raises:
            ValueError: the state has another version, or was saved by a packer with other settings.
        """
        if state.get("version") != STATE_VERSION:
            raise ValueError(
                f"the state of a packer has version {state.get('version')}; this packer reads version {STATE_VERSION}"
            )
        if found := differences(state["settings"], self._lasting_settings()):
            raise ValueError(f"the state was saved by a packer with other settings: {'; '.join(found)}")
        source, source_state = self.src_iterable, state["source"]
        if isinstance(source_state, Mapping) and STREAMING_POSITION in source_state:
            raise ValueError(
                "the state was saved with a StreamingDataLoader, which does not count documents: its position is wrong"
            )
        self.epoch = state["epoch"]
        self.seqs_consumed = state["seqs_consumed"]
        self.seqs_emitted = state["seqs_emitted"]
        self.source_batches = state["source_batches"]
        self.source_ended = state["source_ended"]
        self._schedules.local = dict(state["local"])
        self._rng.bit_generator.state = state["rng"]
        self._waiting.load_state_dict(state["waiting"])
        self._skipped_source_batches = 0
        if isinstance(source, Stateful) and source_state is not None:
            _tell_epoch(source, max(self.epoch, 0))  # before the source loads: it may begin to read at once
            source.load_state_dict(source_state)
        else:
            self._skipped_source_batches = self.source_batches
            if self.source_batches and not self.source_ended:
                what = "the source has no state of its own: %d source batches are read again and skipped"
                log.warning(what, self.source_batches)
        self._continues_epoch = self.epoch >= 0
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
        self._schedules.local = {"tok": tokens, "sp": documents, "ba": batches}

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch, or continue the one of a loaded state. An earlier iterator raises from then on."""
        if not self._continues_epoch:
            self._start_epoch()
        self._continues_epoch = False
        _tell_epoch(self.src_iterable, self.epoch)
        source: Iterator[SourceBatch] = iter(())
        if not self.source_ended:  # a source that has ended must not be asked again: it might start again
            source = itertools.islice(self.src_iterable, self._skipped_source_batches, None)
        self._latest_iterator += 1
        return self._batches(self._latest_iterator, source)

    def _start_epoch(self) -> None:
        if self.policies.tail is not Tail.CARRY:
            self._waiting.clear()
        elif not self.source_ended:
            log.warning("epoch %d was left before its source ended; the rest of it is not read", self.epoch)
        self.epoch += 1
        self.source_ended = False
        self.seqs_consumed = 0
        self.seqs_emitted = 0
        self.source_batches = 0
        self._skipped_source_batches = 0
        self._waiting.start_epoch()
        self._rng = np.random.default_rng(self.labels.seed + self.epoch)

    def _batches(self, iterator: int, source: Iterator[SourceBatch]) -> Iterator[Batch]:
        waiting, schedules, epoch = self._waiting, self._schedules, self.epoch
        while True:
            if iterator != self._latest_iterator:
                raise RuntimeError(f"epoch {epoch} of this packer is over: epoch {self.epoch} has been started")
            rows = schedules.rows
            row_of = self._place(source, rows)
            layout = lay_out(
                waiting.documents,
                waiting.order,
                row_of,
                self.shape.out_pseq_len,
                schedules.local["ba"],
                waiting.num_gone,
            )
            used = len(layout.num_documents)
            if used == 0 or (used < rows and self.policies.tail is not Tail.EMIT):
                break
            batch = self._writer.write(
                waiting.tokens, waiting.loss_mask, waiting.documents, layout, schedules.mask_ratio, self._rng
            )
            if schedules.changes_mask_ratio and batch["labels"] is not None:
                batch["mask_prob"] = torch.tensor(schedules.mask_ratio, dtype=torch.float32)
            documents, tokens = len(layout.documents), int(layout.num_tokens.sum())
            self.seqs_emitted += documents
            waiting.emit(self._line_up(layout.left), tokens)
            schedules.advance(tokens, documents)
            yield batch
        self._end_epoch()

    def _end_epoch(self) -> None:
        waiting = self._waiting
        end = EpochEnd(
            epoch=self.epoch,
            account=waiting.account.since(waiting.account_before),
            num_read=self.seqs_consumed,
            num_emitted=self.seqs_emitted,
            num_waiting=len(waiting),
            num_added=waiting.num_added,
            rows=self.rows_per_batch,
            row_len=self.shape.out_pseq_len,
        )
        is_read_once = isinstance(self.src_iterable, Iterator)
        log_and_check_epoch(end, self.policies, self._has_other_ranks, is_read_once)
        if self.policies.tail is not Tail.CARRY:
            waiting.clear()

    def _read(self, source: Iterator[SourceBatch]) -> int | None:
        """Add a source batch to the waiting buffer. Returns how many documents it gave, or None at the source's end."""
        added = self._waiting.read(source, self.epoch, self._schedules.local["ba"])
        if added is None:
            self.source_ended = True
        else:
            self.seqs_consumed += added
            self.source_batches += 1
        return added

    @abc.abstractmethod
    def _place(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        """Read as far as the strategy wants, and choose a row for each waiting document.

        Returns:
            int64 `(waiting,)`: the row of each document in waiting order, -1 for a document that must wait. If only
            some of the `rows` rows get a document, these are the first rows.
        """

    @abc.abstractmethod
    def _line_up(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """The waiting order of the documents that found no row, given in their old order."""

    def _lasting_settings(self) -> dict[str, Any]:
        """The settings that must match when a state is loaded, as plain values. The names are keys in checkpoints."""
        labels, policies = self.labels, self.policies
        masking = labels.keyed_masking
        keyed = None if masking is None else [masking.seed, masking.vocab_size, *sorted(masking.special_token_ids)]
        return {
            "out_pseq_len": self.shape.out_pseq_len,
            "pad_token_id": labels.pad_token_id,
            "mask_token_id": labels.mask_token_id,
            "ignore_token_id": labels.ignore_token_id,
            "mask_prob": labels.mask_prob,
            "seed": labels.seed,
            "tail": policies.tail.value,
            "over_long": policies.over_long.value,
            "objective": labels.objective.value,
            "packer": type(self).__name__,
            "keyed_masking": keyed,
        }

    @classmethod
    def from_composer(
        cls: type[Packer],
        src_iterable: Iterable[SourceBatch],
        batch_size: int = 512,
        micro_batch_size: int = 32,
        max_seq_len: int = 1024,
        buffer_size: int = 5120,
        *,
        pad_token_id: int = -1,
        mask_token_id: int = 0,
        ignore_token_id: int = IGNORE_INDEX,
        mask_prob: float = 0.3,
        seed: int = 42,
        suppress_masking: bool = False,
        batch_size_warmup_min_size: int | None = None,
        batch_size_warmup_tokens: DurationLike | None = None,
        masking_ratio_cooldown_tokens: DurationLike | None = None,
        masking_ratio_cooldown_start_tokens: DurationLike | None = None,
        final_masking_ratio: float | None = None,
        masking_cooldown_schedule_type: MaskingSchedule | str = MaskingSchedule.LINEAR,
        masking_ratio_step_size: float | None = None,
        world_size: int = 1,
        tail: Tail | str = Tail.DROP,
        over_long: OverLong | str = OverLong.ERROR,
        objective: Objective | str = Objective.MLM,
        keyed_masking: KeyedMasking | None = None,
        pin_memory: bool = False,
        max_document_len: int | None = None,
    ) -> Packer:
        """A packer in the words of a Composer training: a row replaces a microbatch of padded sequences.

        The published signature, with further settings. Settings that are not listed here are explained in `settings`
        and `schedules`.

        Args:
            src_iterable: gives source batches of at most `batch_size` documents.
            batch_size: sequences per optimizer step on this rank.
            micro_batch_size: sequences per microbatch. A row has `micro_batch_size * max_seq_len` slots.
            max_seq_len: tokens in a sequence.
            buffer_size: documents that may wait for a row.
            batch_size_warmup_min_size: sequences per step at the start, a multiple of `micro_batch_size`.

        Raises:
            ValueError: the batch sizes are not multiples of `micro_batch_size`, or settings do not fit each other.
            TypeError: a size or an id is not an int.
        """
        check_positive(batch_size=batch_size, micro_batch_size=micro_batch_size, max_seq_len=max_seq_len)
        minimum = batch_size_warmup_min_size
        for name, size in (("batch_size", batch_size), ("batch_size_warmup_min_size", minimum)):
            if size is not None and size % micro_batch_size:
                raise ValueError(f"{name}={size} must be a multiple of {micro_batch_size=}")
        shape = BatchShape(
            src_batch_size=batch_size,
            out_batch_size=batch_size // micro_batch_size,
            out_pseq_len=micro_batch_size * max_seq_len,
            buffer_size=buffer_size,
            max_document_len=max_document_len,
        )
        labels = LabelSettings(
            objective=objective,  # type: ignore[arg-type] # the group parses a choice given as a string
            pad_token_id=pad_token_id,
            mask_token_id=mask_token_id,
            ignore_token_id=ignore_token_id,
            mask_prob=mask_prob,
            seed=seed,
            suppress_masking=suppress_masking,
            keyed_masking=keyed_masking,
        )
        warmup = BatchSizeWarmup.from_options(
            None if minimum is None else minimum // micro_batch_size, batch_size_warmup_tokens
        )
        cooldown = MaskRatioCooldown.from_options(
            final_masking_ratio,
            masking_ratio_cooldown_tokens,
            masking_ratio_cooldown_start_tokens,
            masking_cooldown_schedule_type,
            masking_ratio_step_size,
        )
        schedules = ScheduleSettings(warmup, cooldown, world_size)
        policies = Policies(tail, over_long)  # type: ignore[arg-type]
        return cls(src_iterable, shape, labels, schedules, policies, pin_memory)


def _tell_epoch(source: object, epoch: int) -> None:
    """Tell the epoch to the source's sampler, if the sampler wants to know it."""
    sampler = getattr(source, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)
