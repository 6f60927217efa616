"""Ranks in step: either every rank hands over its next batch, or no rank does.

Ranks read different documents, so they reach the end of an epoch at different times. If a trainer notices the end only
when one rank has no batch left, the batches that the other ranks have just handed over are lost. Here ranks agree
beforehand. Before each batch, each rank tells the others whether it has one, and an epoch ends on all ranks after the
same batch. Batches and documents that are left over come first in the next epoch.

Ranks also tell each other what their batches held. A source with schedules follows the mean of all ranks, so that all
ranks change the batch size and the mask ratio at the same batch.

The only things this file knows of packing are the counts in a batch and `Scheduled`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, cast, runtime_checkable

import torch
from torch import distributed

from composer_packing.batch.background import BufferedIterable
from composer_packing.batch.contract import Batch, with_counts, with_equal_weights
from composer_packing.batch.microbatches import (
    get_num_samples_in_packed_batch,
    get_num_targets_in_packed_batch,
    get_num_tokens_in_packed_batch,
)
from composer_packing.common.redealing import redeal_stage, stage_has_same_shares
from composer_packing.common.snapshots import Snapshot, snapshot_of

log = logging.getLogger(__name__)

PATIENCE = 1000
"""Largest number of epochs in a row that may pass without filling one batch."""


class EpochsState(TypedDict):
    """State of one rank's endless stream of epochs.

    Attributes:
        epoch: number of the rank's own epoch. It can lag behind the epoch that the ranks agree on.
        source: the source's own state, as its `state_dict` returns it.
    """

    epoch: int
    source: dict[str, Any]


class LockstepState(TypedDict):
    """State of one rank after a batch.

    Attributes:
        epoch: number of the epoch, the same on all ranks.
        batches_in_epoch: batches of this epoch that were handed over, the same on all ranks.
        stream: the rank's own stream.
    """

    epoch: int
    batches_in_epoch: int
    stream: EpochsState


@runtime_checkable
class Scheduled(Protocol):
    """A source whose batches change with what has been packed, such as a `SequencePacker`."""

    @property
    def local_counts(self) -> dict[str, int]:
        """What this rank has packed so far: real tokens (`tok`), documents (`sp`) and batches (`ba`)."""

    @property
    def schedules_are_over(self) -> bool:
        """Whether the next batches no longer depend on what has been packed."""

    def follow(self, counts: Mapping[str, int]) -> None:
        """Let the next batch follow these counts instead of `local_counts`."""


class Stopped(Exception):  # noqa: N818 (not an error)
    """A rank wanted to stop, and all ranks have handed over their last batch."""


@dataclass(frozen=True)
class EpochEnd:
    """A mark in a rank's stream of batches: here the rank's documents of an epoch end."""

    epoch: int


class Lockstep(Iterable[Batch]):
    """Batches packed on a background thread, in epochs that end together on all ranks.

    The thread packs one epoch after another, up to `prefetch` batches ahead of the trainer. One iteration gives one
    epoch of at least one batch. Every rank must iterate equally often, as ranks of a trainer do. Two ranks whose own
    epochs (`|`) have three and two batches::

        rank 0   a b c | d e f | g h i |      trained in epoch 0: a b    epoch 1: c d    epoch 2: e f
        rank 1   A B | C D | E F |                                A B             C D             E F

    With each epoch the first rank falls one batch further behind its own epochs. If documents are dealt out at random,
    the lag grows about as the square root of the number of epochs.

    If the source is `Scheduled`, its next batch depends on what all ranks have packed. So on several ranks the thread
    packs only one batch ahead, until the schedules are over.

    To end training, set `stop_wanted` on any rank. When the ranks then `agree_to_stop`, the batch that was handed over
    last was the last one, and asking for another batch raises `Stopped`.

    Args:
        source: gives the batches of one epoch at every `iter()`. A packer can carry documents that were left over into
            the next epoch. Saving state needs a source with `snapshot` and `load_state_dict`, such as a
            `SequencePacker`.
        prefetch: largest number of batches kept ready. With 0 there is no thread.

    Attributes:
        stop_wanted: set this to True to end training on all ranks. A signal handler may set it.
        is_last: whether ranks have agreed that the batch handed over last was the last one.
        has_state: whether the source, and so this object, has a state that can be saved.

    Raises:
        ValueError: from `next()`: the source gave no batch in `PATIENCE` epochs in a row.
        RuntimeError: from `next()`: another rank has ended or does not answer, or this object was closed.
        Stopped: from `next()`: the last batch has been handed over.
    """

    def __init__(self, source: Iterable[Batch], prefetch: int) -> None:
        self.stop_wanted = self.is_last = False
        self.has_state = snapshot_of(source) is not None
        self._epochs = _Epochs(source)
        self._buffered = BufferedIterable(self._epochs, prefetch)
        self._stream: Iterator[Batch | EpochEnd] | None = None
        self._held_back: Batch | None = None
        self._last_snapshot: Snapshot | None = None
        self._epoch = self._batches_in_epoch = 0
        self._totals = {"tok": 0, "sp": 0, "ba": 0}
        self._latest_iterator = 0
        self._group: distributed.ProcessGroup | None = None

    @property
    def wait_seconds(self) -> float:
        """Seconds that this rank has waited for packed batches."""
        return self._buffered.wait_seconds

    def close(self, timeout: float | None = None) -> None:
        """End the thread for good, and wait for its end.

        Args:
            timeout: seconds to wait at most. None waits as long as it takes.
        """
        self._held_back = None
        self._stream = iter(())
        self._buffered.close(timeout)

    def state_dict(self) -> LockstepState:
        """Return the state of this rank after the batch that was handed over last.

        Raises:
            TypeError: the source has no `snapshot`.
        """
        snapshot = self._last_snapshot or self._buffered.snapshot()
        if snapshot is None:
            raise TypeError("the source of these batches has no state that could be saved")
        stream = cast(EpochsState, snapshot())
        return {"epoch": self._epoch, "batches_in_epoch": self._batches_in_epoch, "stream": stream}

    def state_dicts(self) -> list[LockstepState]:
        """Return the states of all ranks on rank 0, and an empty list on other ranks. Every rank must call this."""
        self._join_process_group()
        if self._group is None:
            return [self.state_dict()]
        gathered: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object(self.state_dict(), gathered, group=self._group)
        return gathered or []

    def load_state_dict(self, state: LockstepState) -> None:
        """Resume from a state at the next `iter()`. Ranks must load states of the same batch."""
        self._buffered.load_state_dict(state["stream"])
        self._epoch, self._batches_in_epoch = state["epoch"], state["batches_in_epoch"]
        self._stream = self._held_back = self._last_snapshot = None
        self._latest_iterator += 1

    def has_same_shares(self, state: LockstepState) -> bool:
        """Return whether documents were dealt out to the saved ranks as to these; see `common.redealing`."""
        return self._epochs.has_same_shares(state["stream"])

    def redeal(self, states: Sequence[LockstepState], rank: int, world_size: int) -> LockstepState:
        """Return the state with which one of the ranks that resume begins; see `common.redealing`.

        Raises:
            ValueError: the source has no position that could be dealt out.
        """
        stream = self._epochs.redeal([state["stream"] for state in states], rank, world_size)
        return {**states[0], "stream": stream}  # the saved ranks agree on the other counts

    def start_counting_at(self, tokens: int, documents: int, batches: int) -> None:
        """Let the schedules of a `SequencePacker` continue from these counts of this rank at the next `iter()`."""
        self.load_state_dict(self.state_dict())  # ends the thread, which has packed ahead by the old counts
        self._epochs.source.start_counting_at(tokens, documents, batches)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Batch]:
        """Continue where the last iterator stopped. The last iterator then gives no more batches."""
        self._join_process_group()
        self._latest_iterator += 1
        return self._one_epoch(self._latest_iterator)

    def agree_to_stop(self) -> bool:
        """Return whether any rank wants to stop; then all ranks stop here. Ranks must call this equally often."""
        self._join_process_group()
        self.is_last = self._sum(self.stop_wanted)[0] > 0
        return self.is_last

    def _join_process_group(self) -> None:
        if self._group is None and distributed.is_initialized() and distributed.get_world_size() > 1:
            # A separate group on the host: agreeing does not wait for the device or mix with gradients.
            self._group = distributed.new_group(backend="gloo")

    def _one_epoch(self, iterator_number: int) -> Iterator[Batch]:
        """Give the batches up to the end of the epoch. A newer iterator ends this one."""
        while iterator_number == self._latest_iterator:
            if self.is_last:
                raise Stopped
            batch = self._next()
            ended, targets, tokens, documents = self._sum(batch is None, *_counts_of(batch))
            if not ended:
                assert batch is not None
                self._batches_in_epoch += 1
                self._last_snapshot = self._buffered.snapshot()
                if self._epochs.follows_all_ranks:
                    self._add_to_totals(tokens, documents)
                    self._buffered.answer(self._mean_counts())
                yield batch if targets else with_equal_weights(batch)
                continue
            self._held_back = batch  # for the next epoch: another rank has no batch left
            self._epoch += 1
            handed_over, self._batches_in_epoch = self._batches_in_epoch, 0
            if handed_over:
                log.info("epoch %d ended on all ranks after %d batches", self._epoch - 1, handed_over)
                return

    def _next(self) -> Batch | None:
        """Return this rank's next batch, or None if its epoch has ended."""
        if self._held_back is not None:
            batch, self._held_back = self._held_back, None
            return batch
        if self._stream is None:
            self._last_snapshot = self._buffered.snapshot()
            self._follow_all_ranks()
            self._stream = iter(self._buffered)
        for item in self._stream:
            if not isinstance(item, EpochEnd):
                return item
            if item.epoch == self._epoch:
                return None
            # This rank is behind: another rank has already ended this epoch for all.
            assert item.epoch < self._epoch, "a rank cannot be ahead of the agreement"
        raise RuntimeError("there are no more batches: this Lockstep was closed, or its source has failed before")

    def _follow_all_ranks(self) -> None:
        """Let the source follow the counts of all ranks from here on, if there are other ranks."""
        source = self._epochs.source
        if self._group is not None and isinstance(source, Scheduled):
            counts = source.local_counts
            tokens, documents = self._sum(counts["tok"], counts["sp"])
            self._totals = {"tok": tokens, "sp": documents, "ba": counts["ba"]}  # a batch counts on every rank
            self._epochs.follows_all_ranks = True
            source.follow(self._mean_counts())

    def _add_to_totals(self, tokens: int, documents: int) -> None:
        for unit, count in (("tok", tokens), ("sp", documents), ("ba", 1)):
            self._totals[unit] += count

    def _mean_counts(self) -> dict[str, int]:
        """Return the counts of a rank, if all ranks had packed equally much."""
        return self._totals | {unit: self._totals[unit] // distributed.get_world_size() for unit in ("tok", "sp")}

    def _sum(self, *counts: int) -> list[int]:
        """Return each count summed over all ranks."""
        if self._group is None:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        try:
            distributed.all_reduce(sums, group=self._group)
        except RuntimeError as error:
            raise RuntimeError("another rank does not answer: it has ended or is stuck; see its output") from error
        return [int(number) for number in sums.tolist()]


def _counts_of(batch: Batch | None) -> tuple[int, int, int]:
    """Return the targets, real tokens and documents of a batch, on this rank."""
    if batch is None:
        return 0, 0, 0
    return (
        get_num_targets_in_packed_batch(batch),
        get_num_tokens_in_packed_batch(batch),
        get_num_samples_in_packed_batch(batch),
    )


class _Epochs(Iterable[Batch | EpochEnd]):
    """The epochs of a source, one after another without end. Batches have counts; an `EpochEnd` follows each epoch.

    Attributes:
        follows_all_ranks: the source is `Scheduled`, and is told after each batch what all ranks have packed.
    """

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source = source
        self.follows_all_ranks = False
        self._epoch = 0
        self._gave_batch = False

    @property
    def awaits_answer(self) -> bool:
        """Whether the source must know what all ranks have packed before it packs on; see `Answered`."""
        return (
            self.follows_all_ranks
            and self._gave_batch
            and isinstance(self.source, Scheduled)
            and not self.source.schedules_are_over
        )

    def take_answer(self, answer: Mapping[str, int]) -> None:
        if isinstance(self.source, Scheduled):
            self.source.follow(answer)

    def snapshot(self) -> Snapshot | None:
        """Return a snapshot that gives an `EpochsState`, or None if the source has no `snapshot`."""
        epoch, of_source = self._epoch, snapshot_of(self.source)
        return None if of_source is None else lambda: {"epoch": epoch, "source": of_source()}

    def load_state_dict(self, state: EpochsState) -> None:
        self._epoch = state["epoch"]
        self.source.load_state_dict(state["source"])  # type: ignore[attr-defined]

    def has_same_shares(self, state: EpochsState) -> bool:
        return stage_has_same_shares(self.source, state["source"])

    def redeal(self, states: Sequence[EpochsState], rank: int, world_size: int) -> EpochsState:
        source = redeal_stage(self.source, [state["source"] for state in states], rank, world_size)
        return {"epoch": min(state["epoch"] for state in states), "source": source}

    def __iter__(self) -> Iterator[Batch | EpochEnd]:
        empty_epochs = 0
        while empty_epochs < PATIENCE:
            empty_epochs += 1
            for batch in self.source:
                empty_epochs = 0
                self._gave_batch = True
                yield with_counts(batch)
            self._gave_batch = False
            yield EpochEnd(self._epoch)
            self._epoch += 1
        raise ValueError(
            f"the documents of {PATIENCE} epochs did not fill one batch; give more documents, a smaller batch size or "
            f"shorter rows (or see the warning above if it says that all documents were dropped)"
        )
