"""Which documents a rank reads in an epoch, and in which order."""

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

WHOLE_SHARE = 2**62
"""Stands for the number of documents that a rank has read of its share, if it has read all of them."""


class EarlierDeal(NamedTuple):
    """How an epoch was dealt out to the ranks of an earlier run, and how far each of these ranks came.

    Attributes:
        ranks_per_node: ranks that shared a disk.
        read: for each rank the number of documents that it had read of its share, or `WHOLE_SHARE`.
    """

    ranks_per_node: int
    read: tuple[int, ...]


class ShareSampler(DistributedSampler[int]):
    """Shuffles the documents for each epoch and deals every document to exactly one rank.

    The ranks take turns, and an epoch begins with the rank whose turn came when the last epoch ended. So all ranks get
    the same number of documents in the long run, and every rank gets some, even if there are fewer documents than
    ranks. Five documents on two ranks::

        epoch 0   documents 3 0 4 1 2     ranks 0 1 0 1 0
        epoch 1   documents 1 2 0 4 3     ranks 1 0 1 0 1

    If a run resumes with another number of ranks in the middle of an epoch, the documents that no rank has read are
    dealt out again. Say that the two ranks above had read documents 3 and 0, and that the run resumes on one rank::

        epoch 0   documents 4 1 2         ranks 0 0 0

    The base class is PyTorch's `DistributedSampler`, as a packer calls `set_epoch` of such a sampler. The dealing of
    the base class is not used: it repeats or drops documents until all ranks have equally many, and it cannot deal out
    the rest of an epoch.

    Args:
        documents: the dataset; only its length is used.
        num_replicas: number of ranks.
        rank: the rank that reads.
        seed: of the order.

    Attributes:
        ranks_per_node: ranks that share a disk. Has no effect here, but in `StreamSampler`.
        deals: for each epoch that earlier runs have begun, how they dealt it out, from the first run to the last.
    """

    def __init__(self, documents: Sized, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(documents, num_replicas, rank, seed=seed)  # type: ignore[arg-type]
        self._count = len(documents)
        self.ranks_per_node = num_replicas
        self.deals: dict[int, list[EarlierDeal]] = {}

    def __iter__(self) -> Iterator[int]:
        """The numbers of this rank's documents in this epoch."""
        return iter(self.numbers().tolist())

    def __len__(self) -> int:
        """How many documents this rank reads in this epoch."""
        return len(self.numbers())

    def numbers(self) -> NDArray[np.int64]:
        """The numbers of this rank's documents in this epoch, int64 `(documents,)`."""
        order = self._order()
        for deal in self.deals.get(self.epoch, ()):
            is_left = np.ones(len(order), np.bool_)
            for rank, read in enumerate(deal.read):
                share = self._share(len(order), rank, len(deal.read), deal.ranks_per_node)[:read]
                is_left[share.start : share.stop : share.step] = False
            order = order[is_left]
        share = self._share(len(order), self.rank, self.num_replicas, self.ranks_per_node)
        return order[share.start : share.stop : share.step]

    def batches_after(self, read: int, batch_size: int) -> Iterator[Any]:
        """What to ask the dataset for, batch by batch, once this rank has read some documents of this epoch.

        Args:
            read: documents that have been read.
            batch_size: documents of a batch. The last batch of an epoch may have fewer.
        """
        numbers = self.numbers()
        for start in range(read, len(numbers), batch_size):
            yield self._request(numbers, start, batch_size)

    def _request(self, numbers: NDArray[np.int64], start: int, batch_size: int) -> Any:
        """The argument of the dataset's `__getitems__` for the batch that begins at index `start` of the numbers."""
        return numbers[start : start + batch_size]

    def _order(self) -> NDArray[np.int64]:
        """The numbers of all documents of the epoch in the order in which they are dealt out."""
        return np.random.default_rng([self.seed, self.epoch]).permutation(self._count)

    def _share(self, count: int, rank: int, num_ranks: int, ranks_per_node: int) -> range:
        """Which indices into an order of `count` documents are a rank's."""
        dealt_before = self.epoch * self._count
        return range((rank - dealt_before) % num_ranks, count, num_ranks)
