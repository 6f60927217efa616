"""Ranks in step: every rank hands over its next batch, or none does.

Ranks read different documents and come to the end of an epoch at different times. A trainer that finds out
when one of them has nothing left has lost what the others had just handed over. Here ranks agree before:
each tells the others what it holds, and an epoch ends on all of them after the same batch. What is left
over, packed or not, comes first in the next epoch. Of packing this file knows the batch's counts, nothing else.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import distributed

from composer_packing.batch import Batch, get_num_targets_in_packed_batch, with_counts, with_equal_weights
from composer_packing.buffered import BufferedIterable

log = logging.getLogger(__name__)

PATIENCE = 1000
"""Epochs in a row that may go by before their documents fill a batch."""


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

    Args:
        source: gives an epoch's batches at every `iter()`, and goes on with what was left where it can.
        prefetch: batches kept ready at most.

    Raises:
        ValueError: from `next()`, where the source gives no batch in `PATIENCE` epochs in a row.
        RuntimeError: from `next()`, where another rank has ended or does not answer, or this was closed.
    """

    def __init__(self, source: Iterable[Batch], prefetch: int) -> None:
        self._ahead = BufferedIterable(_epochs(source), prefetch)
        self._stream: Iterator[Batch | EpochEnd] | None = None
        self._held: Batch | None = None
        self._epoch = 0
        self._latest = 0
        self._group: distributed.ProcessGroup | None = None

    @property
    def wait_seconds(self) -> float:
        """Time this rank has waited for a packed batch."""
        return self._ahead.wait_seconds

    def close(self) -> None:
        """End the thread, for good."""
        self._held = None
        self._stream = iter(())
        self._ahead.close()

    def __iter__(self) -> Iterator[Batch]:
        """Go on where the last iterator stopped; that one gives nothing more."""
        if self._group is None and distributed.is_initialized() and distributed.get_world_size() > 1:
            # A group of its own, on the host: the agreement waits for no device and mixes with no gradient.
            self._group = distributed.new_group(backend="gloo")
        self._latest += 1
        return self._one_epoch(self._latest)

    def _one_epoch(self, serial: int) -> Iterator[Batch]:
        handed_over = 0
        while serial == self._latest:
            batch = self._next()
            ended, targets = self._agree(batch)
            if not ended:
                assert batch is not None
                handed_over += 1
                yield batch if targets else with_equal_weights(batch)
                continue
            self._held = batch  # another rank has none: it waits for the next epoch
            self._epoch += 1
            if handed_over:
                log.info("epoch %d ended on all ranks after %d batches", self._epoch - 1, handed_over)
                return

    def _next(self) -> Batch | None:
        """This rank's next batch, or None where its epoch has ended."""
        if self._held is not None:
            held, self._held = self._held, None
            return held
        if self._stream is None:
            self._stream = iter(self._ahead)
        for item in self._stream:
            if not isinstance(item, EpochEnd):
                return item
            if item.epoch == self._epoch:
                return None
            # A rank that is behind comes to its own end of an epoch that another has ended for all.
            assert item.epoch < self._epoch, "a rank cannot be ahead of the agreement"
        raise RuntimeError("there are no more batches: they were closed, or have failed before")

    def _agree(self, batch: Batch | None) -> tuple[bool, int]:
        """Whether the epoch has ended on any rank, and how many targets all ranks hold."""
        ended, targets = (False, get_num_targets_in_packed_batch(batch)) if batch is not None else (True, 0)
        if self._group is None:
            return ended, targets
        counts = torch.tensor([ended, targets], dtype=torch.int64)
        try:
            distributed.all_reduce(counts, group=self._group)
        except RuntimeError as error:
            raise RuntimeError("no answer from another rank: it has ended or is stuck; see its output") from error
        num_ended, all_targets = counts.tolist()
        return num_ended > 0, all_targets


def _epochs(source: Iterable[Batch]) -> Iterator[Batch | EpochEnd]:
    """The epochs of a source one after the other, each batch with its counts, a mark behind each epoch."""
    epoch = empty_epochs = 0
    while empty_epochs < PATIENCE:
        empty_epochs += 1
        for batch in source:
            empty_epochs = 0
            yield with_counts(batch)
        yield EpochEnd(epoch)
        epoch += 1
    raise ValueError(
        f"the documents of {PATIENCE} epochs did not fill one batch; "
        f"give more documents, or lower the batch size or the row length, unless a warning says that all were dropped"
    )
