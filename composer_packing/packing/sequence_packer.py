"""The sequence packer: source batches in, packed batches out.

What both strategies share; where documents go is a subclass's part. An epoch ends when a batch can no longer be given
a document in every row; what becomes of the rest is a policy. With default arguments `GreedyBestFitSequencePacker`
gives the batches, masks and names of the packer published with ModernBERT (Warner et al., 2024).
"""

import abc
import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from composer_packing.batch.contract import Batch
from composer_packing.common.arguments import check_positive, parse_choice
from composer_packing.common.durations import DurationLike
from composer_packing.common.redealing import has_share_of, redeal, share_of
from composer_packing.common.snapshots import Snapshot, Stateful, differences
from composer_packing.packing.epoch_end import EpochReport
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.layout import lay_out
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.row_writer import RowWriter
from composer_packing.packing.schedules import MaskingSchedule, PackingSchedules, schedules_from_options
from composer_packing.packing.source_batch import SourceBatch
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.waiting_buffer import WaitingBuffer

log = logging.getLogger(__name__)


class SequencePacker(abc.ABC):
    """Packs documents into rows, makes their labels, and counts both.

    Iterating starts an epoch. There is no `len()`: training length is given in tokens or batches.

    Args:
        src_iterable: gives source batches, anew at every `iter()`. The sampler of a DataLoader is told the
            epoch where it is a `DistributedSampler`.
        src_batch_size: documents per source batch.
        src_max_seq_len: longest document of the source, in tokens; nothing follows from it, as published.
        out_batch_size: rows per batch.
        out_pseq_len: slots per row.
        buffer_size: documents that may wait, besides those of the batch that is packed; the pieces of one count as one.
        pad_token_id: what stands in slots without a document.
        mask_token_id: what stands for a hidden token.
        ignore_token_id: label of what is no target; counts and models of this package know -100 only.
        mask_prob: share of tokens that become targets, 0 to 1.
        seed: of the masks; epoch `e` draws from `seed + e`.
        suppress_masking: give batches with `labels=None` and no `attention_mask`.
        batch_size_warmup_min_size: rows per batch at the start; None for no warmup.
        batch_size_warmup_tokens: global length of that warmup, in any unit of `times`; goes with the minimum.
        masking_ratio_cooldown_tokens: global length of the mask-ratio cooldown, likewise; None for no cooldown.
        masking_ratio_cooldown_start_tokens: what comes before it; None for 0.
        final_masking_ratio: ratio after it; goes with its length.
        masking_cooldown_schedule_type: `"linear"` or `"stair"`.
        masking_ratio_step_size: height of a stair; `"stair"` only.
        world_size: ranks that share the global tokens.
        tail: what becomes of the documents that are left at the end of an epoch.
        over_long: what becomes of a document that is longer than `max_document_len`.
        objective: what a token's label is; masks are drawn for `"mlm"` only, the others' batches have their counts.
        keyed_masking: draws masks from each document's number; `seed` has no use then, and batches have their counts.
        pin_memory: put batches into pinned memory, for a GPU.
        max_document_len: tokens that a document or piece has at most; None for as many as a row has slots.

    Raises:
        ValueError: numbers do not go together; while iterating, a document does not fit a row, an id is out of range,
            many source batches in a row give nothing, or an epoch whose tail is dropped gives no batch.
        TypeError: an id or size is no int; while iterating, a document is no sequence of ids, or lacks number or mask.
        RuntimeError: from an iterator that goes on after a newer one was made.

    Attributes:
        epoch: number of the current epoch, -1 before the first.
        seqs_consumed: documents read this epoch, those that were dropped left out; pieces count as documents.
        seqs_emitted: documents in the batches given this epoch, those carried into it among them.
        source_batches: source batches read this epoch.
        source_ended: the epoch's source has nothing more.
    """

    def __init__(
        self,
        src_iterable: Iterable[SourceBatch],
        src_batch_size: int,
        src_max_seq_len: int,
        out_batch_size: int,
        out_pseq_len: int,
        buffer_size: int,
        pad_token_id: int = -1,
        mask_token_id: int = 0,
        ignore_token_id: int = -100,
        mask_prob: float = 0.3,
        seed: int = 42,
        suppress_masking: bool = False,
        batch_size_warmup_min_size: int | None = None,
        batch_size_warmup_tokens: DurationLike | None = None,
        masking_ratio_cooldown_tokens: DurationLike | None = None,
        masking_ratio_cooldown_start_tokens: DurationLike | None = None,
        final_masking_ratio: float | None = None,
        masking_cooldown_schedule_type: MaskingSchedule | str = "linear",
        masking_ratio_step_size: float | None = None,
        world_size: int = 1,
        tail: Tail | str = Tail.DROP,
        over_long: OverLong | str = OverLong.ERROR,
        objective: Objective | str = Objective.MLM,
        keyed_masking: KeyedMasking | None = None,
        pin_memory: bool = False,
        max_document_len: int | None = None,
    ) -> None:
        check_positive(src_batch_size=src_batch_size, src_max_seq_len=src_max_seq_len, world_size=world_size)
        longest = out_pseq_len if max_document_len is None else max_document_len
        check_positive(out_batch_size=out_batch_size, out_pseq_len=out_pseq_len, max_document_len=longest)
        if buffer_size <= src_batch_size:
            raise ValueError(f"{buffer_size=} must exceed {src_batch_size=}: the buffer would never be filled")
        self.src_iterable = src_iterable
        self.src_batch_size = src_batch_size
        self.src_max_seq_len = src_max_seq_len
        self.out_batch_size = out_batch_size
        self.out_pseq_len = out_pseq_len
        self.buffer_size = buffer_size
        self.pad_token_id = pad_token_id
        self.mask_token_id = mask_token_id
        self.ignore_token_id = ignore_token_id
        self.mask_prob, self.seed, self.keyed_masking = mask_prob, seed, keyed_masking
        self.tail = parse_choice(Tail, "tail", tail)
        self.over_long = parse_choice(OverLong, "over_long", over_long)
        self.objective = parse_choice(Objective, "objective", objective)
        self._has_others = world_size > 1
        self._writer = RowWriter(
            *(self.objective, out_pseq_len, pad_token_id, mask_token_id, ignore_token_id),
            *(suppress_masking, keyed_masking, pin_memory),
        )
        warmup = batch_size_warmup_min_size, batch_size_warmup_tokens
        cooldown_times = masking_ratio_cooldown_tokens, masking_ratio_cooldown_start_tokens
        cooldown = final_masking_ratio, *cooldown_times, masking_cooldown_schedule_type, masking_ratio_step_size
        self._schedules = schedules_from_options(out_batch_size, mask_prob, world_size, warmup, cooldown)
        if self._schedules.changes_mask_ratio and self.objective is not Objective.MLM:
            raise ValueError(f"{final_masking_ratio=}: with objective={self.objective.value!r} nothing is masked")
        self._waiting = WaitingBuffer(
            *(src_batch_size, min(longest, out_pseq_len), self.over_long),
            vocab_size=None if keyed_masking is None else keyed_masking.vocab_size,
            numbered=keyed_masking is not None,
            loss_masked=self.objective is Objective.SFT,
        )
        self.epoch, self.source_ended = -1, True
        self.seqs_consumed = self.seqs_emitted = self.source_batches = self._pass_over = self._latest = 0
        self._rng = np.random.default_rng(seed)
        self._goes_on = False

    @property
    def local_tokens(self) -> int:
        """Real tokens packed so far, over all epochs: ahead of the trainer by the batches that are ready."""
        return self._schedules.local["tok"]

    @property
    def rows_per_batch(self) -> int:
        """Rows of the batch that is packed next."""
        return self._schedules.rows

    @property
    def token_account(self) -> TokenAccount:
        """Where the tokens of all documents read so far are, over all epochs; may not add up while a thread packs."""
        return dataclasses.replace(self._waiting.account)

    def state_dict(self) -> dict[str, Any]:
        """What the next batch follows from; of a packer on a thread, ask what is between: it is ahead."""
        return self.snapshot()()

    def snapshot(self) -> Snapshot:
        """The same in the making, see `state`."""
        return snapshot_of_packer(self, self._schedules, self._rng, self._waiting)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next `iter()`, in the epoch that it is of.

        Of one that has ended there is nothing left. A source without `load_state_dict` is read anew up to there.

        Raises:
            ValueError: the state is of a packer with other settings, or of another version.
        """
        source_goes_on = load_packer(self, state, self._schedules, self._rng, self._waiting)
        self._goes_on, self._pass_over = self.epoch >= 0, 0 if source_goes_on else self.source_batches
        self._latest += 1

    def has_share_of(self, state: Mapping[str, Any]) -> bool:
        """Return whether this packer's source reads the share of the saved rank; see `common.redealing`."""
        return has_share_of(self.src_iterable, state["source"])

    def redeal(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """Return the state with which the packer of one of the ranks that resume begins; see `common.redealing`.

        The packer begins in the earliest epoch in which a saved rank was. Counts of that epoch start at 0.

        Raises:
            ValueError: the source has no position that could be dealt out.
        """
        totals = {unit: sum(state["local"][unit] for state in states) for unit in ("tok", "sp")}
        local = {unit: share_of(total, rank, world_size) for unit, total in totals.items()}
        return {
            **states[0],
            "epoch": min(max(state["epoch"], 0) for state in states),
            **dict.fromkeys(("seqs_consumed", "seqs_emitted", "source_batches"), 0),
            "source_ended": False,
            "local": states[0]["local"] | local,  # all ranks have packed equally many batches
            "source": redeal(self.src_iterable, [state["source"] for state in states], rank, world_size),
            "waiting": self._waiting.redeal([state["waiting"] for state in states], rank, world_size),
        }

    def start_counting_at(self, counts: Mapping[str, int]) -> None:
        """Let the schedules start at these counts of tokens, documents and batches, by unit."""
        self._schedules.local = dict(counts)

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch, or go on with the one of a state that was loaded; an earlier iterator raises from then on."""
        if not self._goes_on:
            self._start_epoch()
        self._goes_on = False
        tell_epoch(self.src_iterable, self.epoch)
        # One that has ended is not asked again before the next epoch: some would start anew.
        source = iter(()) if self.source_ended else itertools.islice(self.src_iterable, self._pass_over, None)
        self._latest += 1
        return self._batches(self._latest, source)

    def _start_epoch(self) -> None:
        if self.tail is not Tail.CARRY:
            self._waiting.clear()
        elif not self.source_ended:
            log.warning("epoch %d was left before its source ended; what it had not given is not read", self.epoch)
        self.epoch, self.source_ended = self.epoch + 1, False
        self.seqs_consumed = self.seqs_emitted = self.source_batches = self._pass_over = 0
        self._waiting.start_epoch()
        self._rng = np.random.default_rng(self.seed + self.epoch)

    def _batches(self, serial: int, source: Iterator[SourceBatch]) -> Iterator[Batch]:
        waiting, schedules, epoch = self._waiting, self._schedules, self.epoch
        while True:
            if serial != self._latest:
                raise RuntimeError(f"epoch {epoch} of this packer is over: epoch {self.epoch} has been started")
            rows = schedules.rows
            row_of = self._place(source, rows)
            layout = lay_out(
                waiting.documents, waiting.order, row_of, self.out_pseq_len, schedules.local["ba"], waiting.num_gone
            )
            used = len(layout.num_documents)
            if used == 0 or (used < rows and self.tail is not Tail.EMIT):
                break
            batch = self._writer.write(
                waiting.tokens, waiting.loss_mask, waiting.documents, layout, schedules.mask_ratio, self._rng
            )
            if schedules.changes_mask_ratio and batch["labels"] is not None:
                batch["mask_prob"] = torch.tensor(schedules.mask_ratio, dtype=torch.float32)
            documents, tokens = len(layout.documents), int(layout.num_tokens.sum())
            self.seqs_emitted += documents
            waiting.emit(self._in_line(layout.left), tokens)
            schedules.advance(tokens, documents)
            yield batch
        account = waiting.account.since(waiting.account_before)
        counts = self.seqs_consumed, self.seqs_emitted, len(waiting), waiting.num_added
        report = EpochReport(epoch, account, *counts, self.rows_per_batch, self.out_pseq_len)
        report.say(self.tail, self.over_long, self._has_others, isinstance(self.src_iterable, Iterator))
        if self.tail is not Tail.CARRY:
            waiting.clear()

    def _read(self, source: Iterator[SourceBatch]) -> int | None:
        """Add a source batch to those that wait and say how many documents it gave; None where there is none."""
        added = self._waiting.read(source, self.epoch, self._schedules.local["ba"])
        self.seqs_consumed += added or 0
        self.source_batches += added is not None
        self.source_ended = added is None
        return added

    @abc.abstractmethod
    def _place(self, source: Iterator[SourceBatch], rows: int) -> NDArray[np.int64]:
        """Read what may wait, and give the row of each waiting document: int64 `(waiting,)`, -1 for none.

        The rows that are taken are the lowest of the `rows` that the batch is to have.
        """

    @abc.abstractmethod
    def _in_line(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """What found no row, in the order in which it waits from now on."""

    @classmethod
    def from_composer(
        cls,
        src_iterable: Iterable[SourceBatch],
        batch_size: int = 512,
        micro_batch_size: int = 32,
        max_seq_len: int = 1024,
        buffer_size: int = 5120,
        *,
        batch_size_warmup_min_size: int | None = None,
        **settings: Any,
    ) -> "SequencePacker":
        """A packer in Composer's terms: a row takes the place of a microbatch of padded sequences.

        Args:
            src_iterable: gives source batches of `batch_size` documents.
            batch_size: sequences per optimizer step on this rank.
            micro_batch_size: sequences per microbatch; a row has `micro_batch_size * max_seq_len` slots.
            max_seq_len: longest document, in tokens.
            batch_size_warmup_min_size: sequences per step at the start, a multiple of `micro_batch_size`.
            settings: the constructor's other arguments, as they are there.

        Raises:
            ValueError: sizes do not divide, or as the constructor says.
        """
        check_positive(batch_size=batch_size, micro_batch_size=micro_batch_size, max_seq_len=max_seq_len)
        minimum = batch_size_warmup_min_size
        for name, size in (("batch_size", batch_size), ("batch_size_warmup_min_size", minimum)):
            if size is not None and size % micro_batch_size:
                raise ValueError(f"{name}={size} must be a multiple of {micro_batch_size=}")
        return cls(
            src_iterable=src_iterable,
            src_batch_size=batch_size,
            src_max_seq_len=max_seq_len,
            out_batch_size=batch_size // micro_batch_size,
            out_pseq_len=micro_batch_size * max_seq_len,
            buffer_size=buffer_size,
            batch_size_warmup_min_size=None if minimum is None else minimum // micro_batch_size,
            **settings,
        )


VERSION = 1
"""Of the state; raise it when an older one must not be loaded any more."""


COUNTS = ("epoch", "seqs_consumed", "seqs_emitted", "source_batches", "source_ended")
"""Attributes of a packer that are kept as they are."""


LASTING = ("out_pseq_len", "pad_token_id", "mask_token_id", "ignore_token_id", "mask_prob", "seed", "tail", "over_long")
"""Attributes that must be the same when it goes on, besides its objective and its masks. Sizes of a rank's batch and
buffer, and schedules, which are counted per rank, are not among them: they follow the number of ranks.
"""


STREAMING_PLACE = "sample_in_epoch"
"""What says that a place is a `StreamingDataset`'s."""


def lasting_settings(packer: Any) -> dict[str, Any]:
    """The settings of a packer that go into its state, as plain values."""
    values = {name: getattr(packer, name) for name in (*LASTING, "objective")}
    masking = packer.keyed_masking
    keyed = None if masking is None else [masking.seed, masking.vocab_size, *sorted(masking.special_token_ids)]
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    return plain | {"packer": type(packer).__name__, "keyed_masking": keyed}


def check_state(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless a packer of these settings may go on from the state."""
    if state.get("version") != VERSION:
        raise ValueError(f"the state of a packer is of version {state.get('version')}; this packer reads {VERSION}")
    if found := differences(state["settings"], settings):
        raise ValueError(f"the state is of a packer with other settings: {'; '.join(found)}")


def tell_epoch(source: object, epoch: int) -> None:
    """Tell the sampler of a source the epoch, if it is one that wants to know."""
    sampler = getattr(source, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def snapshot_of_packer(
    packer: Any, schedules: PackingSchedules, rng: np.random.Generator, waiting: WaitingBuffer
) -> Snapshot:
    """The state of a packer and its parts as they are now.

    Args:
        packer: it.
        schedules: its.
        rng: what draws masks that are not keyed.
        waiting: what waits.
    """
    source = packer.src_iterable
    counts: dict[str, Any] = {name: getattr(packer, name) for name in COUNTS} | {
        "local": schedules.local.copy(),
        "rng": rng.bit_generator.state,
        "source": source.state_dict() if isinstance(source, Stateful) else None,
    }
    of_waiting = waiting.snapshot()
    return lambda: {"version": VERSION, "settings": lasting_settings(packer)} | counts | {"waiting": of_waiting()}


def load_packer(
    packer: Any,
    state: Mapping[str, Any],
    schedules: PackingSchedules,
    rng: np.random.Generator,
    waiting: WaitingBuffer,
) -> bool:
    """Put a packer and its parts into a state, and say whether its source goes on by itself.

    Args:
        packer: it.
        state: what a snapshot of one with the same settings gave.
        schedules: its.
        rng: what draws masks that are not keyed.
        waiting: what waits.

    Raises:
        ValueError: the state is of a packer with other settings, or of another version.
    """
    check_state(state, lasting_settings(packer))
    source, place = packer.src_iterable, state["source"]
    if isinstance(place, Mapping) and STREAMING_PLACE in place:
        raise ValueError("a StreamingDataLoader does not count documents, so that its place is not where it stopped")
    for name in COUNTS:
        setattr(packer, name, state[name])
    schedules.local = dict(state["local"])
    rng.bit_generator.state = state["rng"]
    waiting.load_state_dict(state["waiting"])
    if isinstance(source, Stateful) and place is not None:
        tell_epoch(source, max(packer.epoch, 0))  # at once: asked for its state, it may begin to read
        source.load_state_dict(place)
        return True
    if packer.source_batches and not packer.source_ended:
        log.warning("the source knows no place of its own: %d source batches are read again", packer.source_batches)
    return False
