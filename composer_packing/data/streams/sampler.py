"""Which documents of streams a rank reads in an epoch, in an order that wants few shards at a time."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.sampling import get_sampling
from streaming.base.shuffle import get_shuffle

from composer_packing.data.share_sampler import ShareSampler
from composer_packing.data.streams.documents import StreamedDocuments, Wanted

SHUFFLE_BLOCK = 4_000_000
"""Documents that are mixed with one another, over all nodes; with this and the least of 2**18 for one node Streaming
mixes by default."""

AHEAD = 8
"""Source batches ahead of the one that is read for which shards are downloaded."""


class StreamSampler(ShareSampler):
    """Takes of each stream what an epoch is to have of it, shuffles, and deals it out: every document to one rank.

    What is taken and the order are Streaming's: its sampling, and its shuffle `py1e`, which mixes the documents of
    neighbouring shards. Each node reads a stretch of that order, so that it downloads its part of the shards only; its
    ranks take turns::

        order     d7 d2 d5 d1 | d0 d6 d3 d4
        node      0             1
        rank      0  1  0  1    2  3  2  3

    Args:
        documents: the streams.
        num_replicas: number of ranks.
        rank: the one that reads.
        ranks_per_node: ranks that share a disk.
        seed: of what is taken, and of the order.
    """

    def __init__(
        self, documents: StreamedDocuments, num_replicas: int, rank: int, ranks_per_node: int, seed: int
    ) -> None:
        super().__init__(documents, num_replicas, rank, seed)
        self._documents, self.ranks_per_node = documents, ranks_per_node

    def _order(self) -> NDArray[np.int64]:
        sizes, taken = self._taken()
        ranks, ranks_per_node = self.num_replicas, self.ranks_per_node
        for deal in self.deals.get(self.epoch, ())[:1]:  # what is left of an epoch is in the order that it began with
            ranks, ranks_per_node = len(deal.read), deal.ranks_per_node
        num_nodes = ranks // ranks_per_node
        block_size = max(SHUFFLE_BLOCK // num_nodes, 2**18)
        order: NDArray[np.int64] = taken[get_shuffle("py1e", sizes, num_nodes, self.seed, self.epoch, block_size)]
        return order

    def _share(self, count: int, rank: int, num_ranks: int, ranks_per_node: int) -> range:
        node, rank_of_node = divmod(rank, ranks_per_node)
        num_nodes = num_ranks // ranks_per_node
        # Dealing starts with another rank each epoch, so that those of a node have equally many in the long run.
        first = (rank_of_node - self.epoch) % ranks_per_node
        return range(count * node // num_nodes + first, count * (node + 1) // num_nodes, ranks_per_node)

    def _taken(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What the epoch has of each shard: how many documents at a time, and which, one shard behind the other."""
        documents, rng = self._documents, np.random.default_rng([self.seed, self.epoch])
        sizes: list[int] = []
        taken: list[NDArray[Any]] = [np.empty(0, np.int64)]
        first_shard = first_document = 0
        for shards, choose in zip(
            documents.streams.shards_per_stream, documents.streams.choose_per_stream, strict=True
        ):
            per_shard = documents.samples_per_shard[first_shard : first_shard + shards]
            counts = get_sampling(per_shard, choose, 1, self.seed, self.epoch, True)
            for size, count in zip(per_shard.tolist(), counts.tolist(), strict=True):
                whole, rest = divmod(count, size)
                parts = [np.arange(size)] * whole
                if rest:
                    parts.append(np.sort(rng.choice(size, rest, replace=False)))
                sizes += map(len, parts)
                taken += [first_document + part for part in parts]
                first_document += size
            first_shard += shards
        return np.array(sizes, np.int64), np.concatenate(taken)


class WantedBatches:
    """What a rank reads, `batch_size` documents at a time, with the shards that are wanted soon after."""

    def __init__(self, sampler: ShareSampler, documents: StreamedDocuments, batch_size: int) -> None:
        self._sampler, self._documents, self._batch_size = sampler, documents, batch_size

    def after(self, read: int) -> Iterator[Wanted]:
        """What an epoch has behind the first `read` documents; the last may have fewer documents."""
        numbers = self._sampler.numbers()
        for at in range(read, len(numbers), self._batch_size):
            soon = self._documents.shards_of(numbers[at : at + (1 + AHEAD) * self._batch_size])
            shards, first_places = np.unique(soon, return_index=True)
            yield Wanted(numbers[at : at + self._batch_size], shards[np.argsort(first_places)])
