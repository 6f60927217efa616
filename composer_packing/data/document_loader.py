"""Reading a rank's documents epoch by epoch, in the packing thread or in worker processes."""

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, Sampler

from composer_packing.common.errors import ConfigError
from composer_packing.common.processes import end_only_by_parent
from composer_packing.data.share_sampler import ALL, Deal, NumberBatches, ShareSampler
from composer_packing.data.streams.sampler import WantedBatches
from composer_packing.packing.source_batch import FlatSourceBatch

MOST_BY_DEFAULT = 8
"""Worker processes per rank, where their number is not given."""

MOST_DOWNLOADING = 2
"""The same where ids are downloaded, as each has further threads for that."""


class LoaderState(TypedDict):
    """Position of a rank in its share of the documents.

    Attributes:
        epoch: the current epoch.
        read: documents of its share that the packer has been given in that epoch, whatever workers have read ahead.
        ranks_per_node: ranks that share a disk.
        deals: how the current and later epochs were dealt out before, by epoch. Each deal is a list of its
            `ranks_per_node` and of what each of its ranks had read; see `share_sampler.Deal`.
    """

    epoch: int
    read: int
    ranks_per_node: int
    deals: dict[int, list[list[Any]]]


class DocumentLoader:
    """Gives a rank's documents in flat source batches, an epoch of them at every `iter()`.

    Workers are started when this is made, in the thread that makes it, and live over all epochs: processes that are
    forked while threads run may wait for ever for a lock that one of those held. They are given nothing to read before
    the first `iter()`.

    Args:
        documents: a map-style dataset with `__getitems__`, which gives a `FlatSourceBatch`.
        sampler: what the packer tells the epoch.
        batches: gives what `__getitems__` is to be asked for, by that sampler.
        num_workers: processes; 0 for none.
        prefetch_factor: source batches that each worker keeps ready.
    """

    def __init__(
        self,
        documents: Any,
        sampler: ShareSampler,
        batches: NumberBatches | WantedBatches,
        num_workers: int,
        prefetch_factor: int,
    ) -> None:
        self.sampler = sampler
        self._to_read = _ToRead(batches)
        self._read = 0
        self._loaded_epoch: int | None = None
        self._loader: DataLoader[FlatSourceBatch] = DataLoader(
            documents,
            batch_sampler=self._to_read,
            num_workers=num_workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type] # `__getitems__` need not give a list
            worker_init_fn=_start_worker,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            # Or each epoch would draw from PyTorch's global generator, on the packing thread, at any time.
            generator=torch.Generator(),
        )
        if num_workers:
            iter(self._loader)
        self._to_read.read = 0

    def state_dict(self) -> LoaderState:
        """This rank's place: its epoch, and how many documents of it have been given, whatever workers have ready."""
        sampler = self.sampler
        return {
            "epoch": sampler.epoch,
            "read": self._read,
            "ranks_per_node": sampler.ranks_per_node,
            "deals": {
                epoch: [[deal.ranks_per_node, list(deal.read)] for deal in deals]
                for epoch, deals in sampler.deals.items()
                if epoch >= sampler.epoch
            },
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on from there at the next `iter()`; nothing that lies before is read."""
        self.sampler.set_epoch(state["epoch"])
        self.sampler.deals = {
            epoch: [Deal(per_node, tuple(read)) for per_node, read in deals] for epoch, deals in state["deals"].items()
        }
        self._read, self._loaded_epoch = state["read"], state["epoch"]

    def has_same_shares(self, state: Mapping[str, Any] | None) -> bool:
        """Whether documents were dealt out to the saved ranks as to these; see `common.redealing`.

        Args:
            state: of the source of that rank, which need not be a `DocumentLoader`.
        """
        return state is not None and state.get("ranks_per_node") == self.sampler.ranks_per_node

    def redeal(self, states: Sequence[Any], rank: int, world_size: int) -> LoaderState:
        """The position at which the ranks that resume begin; it is the same on all, see `common.redealing`.

        Raises:
            ValueError: a state is not that of a `DocumentLoader`.
        """
        if not all(isinstance(state, Mapping) and "deals" in state for state in states):
            raise ValueError("the saved position in the documents is not one of a DocumentLoader")
        saved: Sequence[LoaderState] = states
        epochs = [state["epoch"] for state in saved]
        deals = {epoch: list(earlier) for state in saved for epoch, earlier in state["deals"].items()}
        for epoch in range(min(epochs), max(epochs) + 1):
            read = [ALL if s["epoch"] > epoch else s["read"] if s["epoch"] == epoch else 0 for s in saved]
            deals.setdefault(epoch, []).append([saved[0]["ranks_per_node"], read])
        return {"epoch": min(epochs), "read": 0, "ranks_per_node": self.sampler.ranks_per_node, "deals": deals}

    def __iter__(self) -> Iterator[FlatSourceBatch]:
        """Start an epoch, or go on with the one of a state that was loaded."""
        if self._loaded_epoch != self.sampler.epoch:
            self._read = 0
        self._loaded_epoch = None
        self._to_read.read = self._read
        return self._batches(iter(self._loader))

    def _batches(self, batches: Iterator[FlatSourceBatch]) -> Iterator[FlatSourceBatch]:
        try:
            for batch in batches:
                self._read += len(batch.lengths)
                yield batch
        except ConfigError as error:  # what a worker raises comes with its whole traceback as its text
            raise ConfigError(str(error).rstrip().rpartition("ConfigError: ")[2]) from error


class _ToRead(Sampler[Any]):
    """What the loader is to ask for: nothing before `read` is set, then an epoch's documents behind as many."""

    def __init__(self, batches: NumberBatches | WantedBatches) -> None:
        self._batches = batches
        self.read: int | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.read is None else iter(self._batches.after(self.read))


def num_workers_of(given: int | None, are_texts: bool, are_streamed: bool, ranks_of_machine: int) -> int:
    """Worker processes of a rank, where the configuration leaves it to the number of cores.

    Args:
        given: what it says.
        are_texts: documents are tokenized as they are read; a core makes about a million tokens a second.
        are_streamed: they are downloaded.
        ranks_of_machine: ranks that share the cores.
    """
    if given is not None:
        return given
    if not (are_texts or are_streamed):
        return 0  # reading ids from a memory map costs less than handing them over from another process
    cores = len(os.sched_getaffinity(0)) // ranks_of_machine - 1  # one for the rank itself
    return max(1, min(cores, MOST_BY_DEFAULT if are_texts else MOST_DOWNLOADING))


def _as_it_is(documents: FlatSourceBatch) -> FlatSourceBatch:
    return documents


def _start_worker(number: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_only_by_parent(parent.pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core, and a fork no threads
