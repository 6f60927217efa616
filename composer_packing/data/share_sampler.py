"""Which documents a rank reads in an epoch, and in which order."""

from collections.abc import Iterator, Sized
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

ALL = 2**62
"""Documents read of a share that has been read to its end."""


class Deal(NamedTuple):
    """How an epoch was dealt out to ranks before others took over, and how far those came.

    Attributes:
        ranks_per_node: ranks that shared a disk.
        read: documents that each rank had read of its share; `ALL` for all.
    """

    ranks_per_node: int
    read: tuple[int, ...]


class ShareSampler(DistributedSampler[int]):
    """Shuffles the documents anew each epoch and deals them out: every one to one rank, none twice, none left out.

    Dealing goes on where the last epoch stopped, so that ranks get the same number of documents in the long
    run, and every rank some, even where there are fewer documents than ranks. Five documents on two ranks::

        epoch 0   d3 d0 d4 d1 d2     ranks 0 1 0 1 0
        epoch 1   d1 d2 d0 d4 d3           1 0 1 0 1

    Where a run goes on with another number of ranks in the middle of an epoch, what is left of it is dealt out again.
    The two ranks above had read `d3` and `d0`, and one goes on::

        epoch 0   d4 d1 d2           ranks 0 0 0

    The packer tells it the epoch, as any `DistributedSampler`.

    Args:
        documents: what is dealt out; only its length is used.
        num_replicas: number of ranks.
        rank: the one that reads.
        seed: of the order.

    Attributes:
        ranks_per_node: ranks that share a disk; of no consequence here, but in a subclass.
        deals: of epochs that have been dealt out before, the earlier ones first.
    """

    def __init__(self, documents: Sized, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(documents, num_replicas, rank, seed=seed)  # type: ignore[arg-type]
        self._count = len(documents)
        self.ranks_per_node = num_replicas
        self.deals: dict[int, list[Deal]] = {}

    def __iter__(self) -> Iterator[int]:
        """Numbers of this rank's documents in this epoch."""
        return iter(self.numbers().tolist())

    def numbers(self) -> NDArray[np.int64]:
        """The same as an array, int64 `(documents,)`."""
        order = self._order()
        for deal in self.deals.get(self.epoch, ()):
            is_left = np.ones(len(order), np.bool_)
            for rank, read in enumerate(deal.read):
                share = self._share(len(order), rank, len(deal.read), deal.ranks_per_node)[:read]
                is_left[share.start : share.stop : share.step] = False
            order = order[is_left]
        share = self._share(len(order), self.rank, self.num_replicas, self.ranks_per_node)
        return order[share.start : share.stop : share.step]

    def __len__(self) -> int:
        """How many they are."""
        return len(self.numbers())

    def _order(self) -> NDArray[np.int64]:
        """All documents of the epoch."""
        return np.random.default_rng([self.seed, self.epoch]).permutation(self._count)

    def _share(self, count: int, rank: int, num_ranks: int, ranks_per_node: int) -> range:
        """Places in the epoch's order, or in what is left of it, that are a rank's."""
        dealt_before = self.epoch * self._count
        return range((rank - dealt_before) % num_ranks, count, num_ranks)


class NumberBatches:
    """What a rank reads, `batch_size` documents at a time."""

    def __init__(self, sampler: ShareSampler, batch_size: int) -> None:
        self._sampler, self._batch_size = sampler, batch_size

    def after(self, read: int) -> Iterator[NDArray[np.int64]]:
        """Arrays of what an epoch has behind the first `read` documents; the last may be shorter."""
        numbers = self._sampler.numbers()
        for at in range(read, len(numbers), self._batch_size):
            yield numbers[at : at + self._batch_size]
