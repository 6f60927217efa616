"""Reading a rank's documents epoch by epoch, in the thread that asks for them or in worker processes."""

import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, Sampler

from composer_packing.common.errors import ConfigError
from composer_packing.common.processes import end_only_by_parent
from composer_packing.data.share_sampler import WHOLE_SHARE, EarlierDeal, ShareSampler
from composer_packing.packing.source_batch import FlatSourceBatch

MAX_TEXT_WORKERS = 8
"""Most worker processes of a rank that tokenize texts, if the configuration does not give their number."""

MAX_DOWNLOAD_WORKERS = 2
"""Most worker processes of a rank that download ids. Each has more threads that download."""


class LoaderState(TypedDict):
    """Position of a rank in its share of the documents.

    Attributes:
        epoch: the current epoch.
        read: documents of its share that the packer has been given in that epoch, whatever workers have read ahead.
        ranks_per_node: ranks that share a disk.
        deals: how the current and later epochs were dealt out before, by epoch. Each deal is a list of its
            `ranks_per_node` and of what each of its ranks had read; see `share_sampler.EarlierDeal`.
    """

    epoch: int
    read: int
    ranks_per_node: int
    deals: dict[int, list[list[Any]]]


class DocumentLoader:
    """Reads a rank's documents as flat source batches; every `iter()` reads an epoch.

    PyTorch's `DataLoader` runs the worker processes and puts their batches in order. The constructor starts the workers
    in the thread that calls it, and they live over all epochs. The reason is that a process that is forked while other
    threads run may wait for ever for a lock that one of these threads held. Until the first `iter()`, workers have
    nothing to read.

    `torchdata.StatefulDataLoader` has a state too. It is not used, as its state can be loaded only with the same number
    of workers, and holds nothing from which the rest of an epoch could be dealt out to other ranks. The state here is
    the number of documents that have been given, and so does not depend on workers.

    Args:
        documents: a map-style dataset whose `__getitems__` gives a `FlatSourceBatch`.
        sampler: deals the documents out to ranks. The packer sets its epoch.
        batch_size: documents of a source batch.
        num_workers: worker processes; 0 reads in the thread that asks for the batch.
        prefetch_factor: source batches that each worker keeps ready.

    Attributes:
        sampler: the sampler that was given.
    """

    def __init__(
        self, documents: Any, sampler: ShareSampler, batch_size: int, num_workers: int, prefetch_factor: int
    ) -> None:
        self.sampler = sampler
        self._batch_size = batch_size
        self._read = 0
        self._loaded_epoch: int | None = None
        self._requests = _Requests()
        self._loader: DataLoader[FlatSourceBatch] = DataLoader(
            documents,
            batch_sampler=self._requests,
            num_workers=num_workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type] # `__getitems__` need not give a list
            worker_init_fn=_start_worker,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            # Without a generator, each epoch would draw a number from PyTorch's global generator, on the packing
            # thread, at a time that differs from run to run.
            generator=torch.Generator(),
        )
        if num_workers:
            iter(self._loader)  # starts the workers

    def state_dict(self) -> LoaderState:
        """This rank's position: its epoch, and how many documents were given. Those that workers hold do not count."""
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
        """Resume from the position of `state` at the next `iter()`. No document before the position is read."""
        self.sampler.set_epoch(state["epoch"])
        self.sampler.deals = {
            epoch: [EarlierDeal(per_node, tuple(read)) for per_node, read in deals]
            for epoch, deals in state["deals"].items()
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
            read = [WHOLE_SHARE if s["epoch"] > epoch else s["read"] if s["epoch"] == epoch else 0 for s in saved]
            deals.setdefault(epoch, []).append([saved[0]["ranks_per_node"], read])
        return {"epoch": min(epochs), "read": 0, "ranks_per_node": self.sampler.ranks_per_node, "deals": deals}

    def __iter__(self) -> Iterator[FlatSourceBatch]:
        """Start the epoch that the sampler is at, or resume the epoch of a state that was loaded."""
        if self._loaded_epoch != self.sampler.epoch:
            self._read = 0
        self._loaded_epoch = None
        self._requests.of_epoch = self.sampler.batches_after(self._read, self._batch_size)
        return self._batches(iter(self._loader))

    def _batches(self, batches: Iterator[FlatSourceBatch]) -> Iterator[FlatSourceBatch]:
        try:
            for batch in batches:
                self._read += len(batch.lengths)
                yield batch
        except ConfigError as error:  # from a worker, its text is a traceback that ends in what the worker raised
            raise ConfigError(str(error).rstrip().rpartition("ConfigError: ")[2]) from error


class _Requests(Sampler[Any]):
    """What PyTorch's `DataLoader` asks the dataset for in the next epoch.

    The loader iterates over this once when it starts its workers, and once an epoch. At the start there is nothing to
    read: then it only starts the workers.

    Attributes:
        of_epoch: one argument of `__getitems__` for each source batch.
    """

    def __init__(self) -> None:
        self.of_epoch: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of_epoch)


def choose_num_workers(given: int | None, are_texts: bool, are_streamed: bool, ranks_of_machine: int) -> int:
    """How many worker processes a rank has: the number that the configuration gives, or one that suits the cores.

    Args:
        given: the number in the configuration; None if it gives none.
        are_texts: documents are tokenized as they are read. A core makes about a million tokens a second.
        are_streamed: documents are downloaded.
        ranks_of_machine: ranks that share the cores of this machine.
    """
    if given is not None:
        return given
    if not (are_texts or are_streamed):
        return 0  # reading ids from a memory map costs less than sending them from one process to another
    cores = len(os.sched_getaffinity(0)) // ranks_of_machine - 1  # one core is for the rank itself
    return max(1, min(cores, MAX_TEXT_WORKERS if are_texts else MAX_DOWNLOAD_WORKERS))


def _as_it_is(documents: FlatSourceBatch) -> FlatSourceBatch:
    return documents


def _start_worker(worker: int) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_only_by_parent(parent.pid)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core, and a fork has no threads
