"""Reading a rank's documents epoch by epoch, in the packing thread or in worker processes."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data.distributed import DistributedSampler

from composer_packing.config import ConfigError
from composer_packing.source_batch import FlatSourceBatch

MOST_BY_DEFAULT = 8
"""Worker processes per rank, where their number is not given."""

MOST_DOWNLOADING = 2
"""The same where ids are downloaded, as each has further threads for that."""


class DocumentLoader:
    """Gives a rank's documents in flat source batches, an epoch of them at every `iter()`.

    Workers are started when this is made, in the thread that makes it, and live over all epochs: processes that are
    forked while threads run may wait for ever for a lock that one of those held.

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
        sampler: "DistributedSampler[int]",
        batches: "Sampler[Any]",
        num_workers: int,
        prefetch_factor: int,
    ) -> None:
        self.sampler = sampler
        self._loader: DataLoader[FlatSourceBatch] = DataLoader(
            documents,
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type] # `__getitems__` need not give a list
            worker_init_fn=_start_worker,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            # Or each epoch would draw from PyTorch's global generator, on the packing thread, at any time.
            generator=torch.Generator(),
        )
        self._first = iter(self._loader) if num_workers else None

    def __iter__(self) -> Iterator[FlatSourceBatch]:
        """Start an epoch; where there are workers, epoch 0 has been started already."""
        first, self._first = self._first, None
        return self._read(iter(self._loader) if first is None else first)

    def _read(self, batches: Iterator[FlatSourceBatch]) -> Iterator[FlatSourceBatch]:
        try:
            yield from batches
        except ConfigError as error:  # what a worker raises comes with its whole traceback as its text
            raise ConfigError(str(error).rstrip().rpartition("ConfigError: ")[2]) from error


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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker has one core, and a fork no threads
