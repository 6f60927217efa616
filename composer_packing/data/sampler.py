"""Which documents a rank reads in an epoch, and in which order."""

from collections.abc import Iterator, Sized

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler


class ShareSampler(DistributedSampler[int]):
    """Shuffles the documents anew each epoch and deals them out: every one to one rank, none twice, none left out.

    Dealing goes on where the last epoch stopped, so that ranks get the same number of documents in the long
    run, and every rank some, even where there are fewer documents than ranks. Five documents on two ranks::

        epoch 0   d3 d0 d4 d1 d2     ranks 0 1 0 1 0
        epoch 1   d1 d2 d0 d4 d3           1 0 1 0 1

    The packer tells it the epoch, as any `DistributedSampler`.

    Args:
        documents: what is dealt out; only its length is used.
        num_replicas: number of ranks.
        rank: the one that reads.
        seed: of the order.
    """

    def __init__(self, documents: Sized, num_replicas: int, rank: int, seed: int) -> None:
        super().__init__(documents, num_replicas, rank, seed=seed)  # type: ignore[arg-type]
        self._count = len(documents)

    def __iter__(self) -> Iterator[int]:
        """Numbers of this rank's documents in this epoch."""
        return iter(self.numbers().tolist())

    def numbers(self) -> NDArray[np.int64]:
        """The same as an array, int64 `(documents,)`."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self._count)
        return order[self._first() :: self.num_replicas]

    def __len__(self) -> int:
        """How many they are."""
        return len(range(self._first(), self._count, self.num_replicas))

    def _first(self) -> int:
        """Place in the epoch's order of this rank's first document."""
        dealt_before = self.epoch * self._count
        return (self.rank - dealt_before) % self.num_replicas


class NumberBatches(Sampler[NDArray[np.int64]]):
    """The numbers of a sampler in arrays of `batch_size`, which a `DataLoader` takes as its `batch_sampler`."""

    def __init__(self, sampler: ShareSampler, batch_size: int) -> None:
        self._sampler, self._batch_size = sampler, batch_size

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Arrays of one epoch; the last may be shorter."""
        numbers = self._sampler.numbers()
        for at in range(0, len(numbers), self._batch_size):
            yield numbers[at : at + self._batch_size]
