"""Ranks in step: every rank hands over its next batch, or none does.

Ranks read different documents and come to the end of an epoch at different times. A trainer that finds out
when one of them has nothing left has lost what the others had just handed over. Here ranks agree before:
each tells the others what it holds, and an epoch ends on all of them after the same batch. What is left
over, packed or not, comes first in the next epoch. Of packing this file knows the batch's counts, nothing else.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from composer_packing.batch.background import BufferedIterable
from composer_packing.batch.contract import Batch, with_counts, with_equal_weights
from composer_packing.batch.microbatches import get_num_targets_in_packed_batch
from composer_packing.common.redealing import redeal_stage, stage_has_same_shares
from composer_packing.common.snapshots import Snapshot, snapshot_of

log = logging.getLogger(__name__)

PATIENCE = 1000
"""Epochs in a row that may go by before their documents fill a batch."""


class Stopped(Exception):  # noqa: N818 (it is none)
    """A rank has wanted to stop, and all ranks have been given their last batch."""


@dataclass(frozen=True)
class EpochEnd:
    """Stands in a rank's stream of batches where its documents of an epoch end."""

    epoch: int


class Lockstep(Iterable[Batch]):
    """Batches packed on a background thread, in epochs that end together on all ranks.

    The thread goes on from epoch to epoch, up to `prefetch` batches ahead of the trainer. Iterating gives an
    epoch of at least one batch, and every rank must do so as often as the others, as in a trainer. Two ranks
    whose own epochs (`|`) have three and two batches::

        rank 0   a b c | d e f | g h i |      trained in epoch 0: a b    epoch 1: c d    epoch 2: e f
        rank 1   A B | C D | E F |                                A B             C D             E F

    The first rank is a batch further behind its own epochs each time. Where documents are dealt out at random
    the lag grows about as the square root of the number of epochs.

    A rank that should end sets `stop_wanted`. Where ranks `agree_to_stop`, the batch handed over last was the last one:
    asking for another raises `Stopped`.

    Args:
        source: gives an epoch's batches at every `iter()`, and goes on with what was left where it can. If it has
            `snapshot` and `load_state_dict`, as a `SequencePacker` has, so has this.
        prefetch: batches kept ready at most; 0 for no thread.

    Attributes:
        stop_wanted: set it, and training ends on all ranks; from a signal handler too.
        is_last: ranks have agreed that no batch comes behind the one handed over last.
        has_state: the source has, and so has this.

    Raises:
        ValueError: from `next()`, where the source gives no batch in `PATIENCE` epochs in a row.
        RuntimeError: from `next()`, where another rank has ended or does not answer, or this was closed.
        Stopped: from `next()`, behind the last batch.
    """

    def __init__(self, source: Iterable[Batch], prefetch: int) -> None:
        self.stop_wanted = self.is_last = False
        self.has_state = snapshot_of(source) is not None
        self._epochs = _Epochs(source)
        self._ahead = BufferedIterable(self._epochs, prefetch)
        self._stream: Iterator[Batch | EpochEnd] | None = None
        self._held: Batch | None = None
        self._place: Snapshot | None = None
        self._epoch = self._batches_in_epoch = 0
        self._latest = 0
        self._group: distributed.ProcessGroup | None = None

    @property
    def wait_seconds(self) -> float:
        """Time this rank has waited for a packed batch."""
        return self._ahead.wait_seconds

    def close(self, timeout: float | None = None) -> None:
        """End the thread, for good, and wait for that, up to a number of seconds or as long as it takes."""
        self._held = None
        self._stream = iter(())
        self._ahead.close(timeout)

    def state_dict(self) -> dict[str, Any]:
        """This rank's place, behind the batch that was handed over last; TypeError where the source has no state."""
        place = self._place or self._ahead.snapshot()
        if place is None:
            raise TypeError("what gives these batches has no state that could be saved")
        return {"epoch": self._epoch, "batches_in_epoch": self._batches_in_epoch, "stream": place()}

    def state_dicts(self) -> list[dict[str, Any]]:
        """The places of all ranks, on the first, and nothing on the others; every rank must ask."""
        self._join()
        if self._group is None:
            return [self.state_dict()]
        gathered: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object(self.state_dict(), gathered, group=self._group)
        return gathered or []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next `iter()`; every rank must, in the same epoch behind the same batch."""
        self._ahead.load_state_dict(state["stream"])
        self._epoch, self._batches_in_epoch = state["epoch"], state["batches_in_epoch"]
        self._stream = self._held = self._place = None
        self._latest += 1

    def has_same_shares(self, state: Mapping[str, Any]) -> bool:
        """Whether documents were dealt out to the saved ranks as to these; see `common.redealing`."""
        return self._epochs.has_same_shares(state["stream"])

    def redeal(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        """The state with which one of the ranks that resume begins; see `common.redealing`.

        Raises:
            ValueError: the source has no position that could be dealt out.
        """
        streams = [state["stream"] for state in states]
        # The saved ranks had agreed on the other counts.
        return {**states[0], "stream": self._epochs.redeal(streams, rank, world_size)}

    def start_counting_at(self, tokens: int, documents: int, batches: int) -> None:
        """Let the schedules of a `SequencePacker` continue from these counts of this rank at the next `iter()`."""
        self.load_state_dict(self.state_dict())  # ends the thread, which has packed ahead by the old counts
        self._epochs.source.start_counting_at(tokens, documents, batches)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Batch]:
        """Go on where the last iterator stopped; that one gives nothing more."""
        self._join()
        self._latest += 1
        return self._one_epoch(self._latest)

    def agree_to_stop(self) -> bool:
        """Let ranks stop here if any of them wants to; every rank must call this as often as the others."""
        self._join()
        self.is_last = self._sum(self.stop_wanted)[0] > 0
        return self.is_last

    def _join(self) -> None:
        if self._group is None and distributed.is_initialized() and distributed.get_world_size() > 1:
            # A group of its own, on the host: the agreement waits for no device and mixes with no gradient.
            self._group = distributed.new_group(backend="gloo")

    def _one_epoch(self, serial: int) -> Iterator[Batch]:
        while serial == self._latest:
            if self.is_last:
                raise Stopped
            batch = self._next()
            targets = 0 if batch is None else get_num_targets_in_packed_batch(batch)
            ended, targets = self._sum(batch is None, targets)
            if not ended:
                assert batch is not None
                self._batches_in_epoch += 1
                self._place = self._ahead.snapshot()
                yield batch if targets else with_equal_weights(batch)
                continue
            self._held = batch  # another rank has none: it waits for the next epoch
            self._epoch += 1
            handed_over, self._batches_in_epoch = self._batches_in_epoch, 0
            if handed_over:
                log.info("epoch %d ended on all ranks after %d batches", self._epoch - 1, handed_over)
                return

    def _next(self) -> Batch | None:
        """This rank's next batch, or None where its epoch has ended."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        if self._stream is None:
            self._place = self._ahead.snapshot()
            self._stream = iter(self._ahead)
        for item in self._stream:
            if not isinstance(item, EpochEnd):
                return item
            if item.epoch == self._epoch:
                return None
            # A rank that is behind comes to its own end of an epoch that another has ended for all.
            assert item.epoch < self._epoch, "a rank cannot be ahead of the agreement"
        raise RuntimeError("there are no more batches: they were closed, or have failed before")

    def _sum(self, *counts: int) -> list[int]:
        """Sums over all ranks."""
        if self._group is None:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        try:
            distributed.all_reduce(sums, group=self._group)
        except RuntimeError as error:
            raise RuntimeError("no answer from another rank: it has ended or is stuck; see its output") from error
        return [int(number) for number in sums.tolist()]


class _Epochs(Iterable[Batch | EpochEnd]):
    """The epochs of a source one after the other, each batch with its counts, a mark behind each epoch."""

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source = source
        self._epoch = 0

    def snapshot(self) -> Snapshot | None:
        """Of the source; None where it has none."""
        epoch, of_source = self._epoch, snapshot_of(self.source)
        return None if of_source is None else lambda: {"epoch": epoch, "source": of_source()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch = state["epoch"]
        self.source.load_state_dict(state["source"])  # type: ignore[attr-defined]

    def has_same_shares(self, state: Mapping[str, Any]) -> bool:
        return stage_has_same_shares(self.source, state["source"])

    def redeal(self, states: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
        source = redeal_stage(self.source, [state["source"] for state in states], rank, world_size)
        return {"epoch": min(state["epoch"] for state in states), "source": source}

    def __iter__(self) -> Iterator[Batch | EpochEnd]:
        empty_epochs = 0
        while empty_epochs < PATIENCE:
            empty_epochs += 1
            for batch in self.source:
                empty_epochs = 0
                yield with_counts(batch)
            yield EpochEnd(self._epoch)
            self._epoch += 1
        raise ValueError(
            f"the documents of {PATIENCE} epochs did not fill one batch; "
            f"give more documents, or lower the batch size or the row length, unless a warning says that all were "
            f"dropped"
        )
