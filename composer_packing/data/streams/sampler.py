"""Which documents of streams a rank reads in an epoch, in an order that needs few shards at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.sampling import get_sampling
from streaming.base.shuffle import get_shuffle

from composer_packing.data.share_sampler import ShareSampler
from composer_packing.data.streams.documents import StreamedDocuments, StreamRequest

SHUFFLE_BLOCK = 4_000_000
"""Documents that are shuffled with one another, over all nodes. Streaming's default is the same."""

SMALLEST_SHUFFLE_BLOCK = 2**18
"""Documents of a node that are shuffled with one another at the least. Streaming's default is the same."""

AHEAD = 8
"""Shards are fetched ahead for this many source batches after the one that is read."""


class StreamSampler(ShareSampler):
    """Takes from each stream what its weight says, shuffles, and deals every document to exactly one rank.

    mosaicml-streaming decides what is taken and in which order: by its sampling, and by its shuffle `py1e`, which mixes
    the documents of neighbouring shards. Each node reads one stretch of the order, and so downloads only its part of
    the shards. The ranks of the node take turns::

        documents   7 2 5 1 | 0 6 3 4
        node           0    |    1
        rank        0 1 0 1 | 2 3 2 3

    Args:
        documents: the streams.
        num_replicas: number of ranks.
        rank: the rank that reads.
        ranks_per_node: ranks that share a disk.
        seed: of what is taken, and of the order.
    """

    def __init__(
        self, documents: StreamedDocuments, num_replicas: int, rank: int, ranks_per_node: int, seed: int
    ) -> None:
        super().__init__(documents, num_replicas, rank, seed)
        self._documents, self.ranks_per_node = documents, ranks_per_node

    def _order(self) -> NDArray[np.int64]:
        sizes, taken = self._take()
        ranks, ranks_per_node = self.num_replicas, self.ranks_per_node
        # The order depends on the number of nodes. What is left of an epoch keeps the order that the epoch began with.
        for deal in self.deals.get(self.epoch, ())[:1]:
            ranks, ranks_per_node = len(deal.read), deal.ranks_per_node
        num_nodes = ranks // ranks_per_node
        block_size = max(SHUFFLE_BLOCK // num_nodes, SMALLEST_SHUFFLE_BLOCK)
        order: NDArray[np.int64] = taken[get_shuffle("py1e", sizes, num_nodes, self.seed, self.epoch, block_size)]
        return order

    def _share(self, count: int, rank: int, num_ranks: int, ranks_per_node: int) -> range:
        node, rank_of_node = divmod(rank, ranks_per_node)
        num_nodes = num_ranks // ranks_per_node
        # Each epoch begins with another rank, so that the ranks of a node get equally many in the long run.
        first = (rank_of_node - self.epoch) % ranks_per_node
        return range(count * node // num_nodes + first, count * (node + 1) // num_nodes, ranks_per_node)

    def _take(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Choose the documents of this epoch.

        Returns:
            int64 `(groups,)`, the number of documents of each group, and int64 `(documents,)`, the numbers of the
            documents, group after group. The documents of a group lie in one shard. A shard has several groups if an
            epoch has its documents more than once.
        """
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
                times, rest = divmod(count, size)
                groups = [np.arange(size)] * times
                if rest:
                    groups.append(np.sort(rng.choice(size, rest, replace=False)))
                sizes += map(len, groups)
                taken += [first_document + group for group in groups]
                first_document += size
            first_shard += shards
        return np.array(sizes, np.int64), np.concatenate(taken)

    def _request(self, numbers: NDArray[np.int64], start: int, batch_size: int) -> StreamRequest:
        shards_ahead = self._documents.shards_of(numbers[start : start + (1 + AHEAD) * batch_size])
        shards, first_indices = np.unique(shards_ahead, return_index=True)
        return StreamRequest(numbers[start : start + batch_size], shards[np.argsort(first_indices)])
