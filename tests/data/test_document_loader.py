import gc
import itertools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainLoaderConfig
from composer_packing.data.document_loader import MAX_TEXT_WORKERS, DocumentLoader, choose_num_workers
from composer_packing.data.share_sampler import ShareSampler
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.training.batches import train_batches
from tests.tools.array_documents import DocumentDataset
from tests.tools.runs import VOCABULARY, config_of, documents_of, read_as


@pytest.fixture(autouse=True)
def nothing_is_left(no_thread_is_left: None) -> Iterator[None]:
    yield
    gc.collect()
    for child in multiprocessing.active_children():  # each has been told to end
        child.join(60)
    assert multiprocessing.active_children() == []


def loader_of(documents: Any, num_workers: int) -> DocumentLoader:
    sampler = ShareSampler(documents, 1, 0, seed=5)
    return DocumentLoader(documents, sampler, 4, num_workers, 2)


def epochs_of(loader: DocumentLoader, count: int = 3) -> list[list[list[int]]]:
    epochs = []
    for epoch in range(count):
        loader.sampler.set_epoch(epoch)
        epochs.append([batch.numbers.tolist() for batch in loader if batch.numbers is not None])
    return epochs


def test_workers_give_the_same_source_batches_in_the_same_order_as_no_workers() -> None:
    documents = documents_of(31)
    alone = epochs_of(loader_of(documents, 0))
    assert all(sorted(itertools.chain(*epoch)) == list(range(len(documents))) for epoch in alone)
    assert alone[0] != alone[1]
    for num_workers in (1, 2):
        assert epochs_of(loader_of(documents, num_workers)) == alone


class Whereabouts(DocumentDataset):
    """Gives the id of the process that reads, instead of document numbers."""

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        read = super().__getitems__(indices)
        return read._replace(numbers=np.full(len(read.lengths), os.getpid()))


def test_workers_are_started_before_any_thread_and_live_over_all_epochs() -> None:
    whereabouts = read_as(Whereabouts, documents_of(31))
    batches = train_batches(whereabouts, config_of(train_loader=TrainLoaderConfig(num_workers=2)), VOCABULARY)
    workers = {child.pid for child in multiprocessing.active_children()}
    assert len(workers) == 2
    assert not [thread for thread in threading.enumerate() if "buffered" in thread.name], "no thread packs until then"
    for _ in range(4):
        assert len(list(batches)) > 0
        assert {child.pid for child in multiprocessing.active_children()} == workers
    batches.close()
    loader = loader_of(whereabouts, 2)
    workers = {child.pid for child in multiprocessing.active_children()} - workers
    assert {number for epoch in epochs_of(loader) for batch in epoch for number in batch} == workers


@pytest.mark.parametrize("num_workers", [0, 1])
def test_starting_and_stopping_fifty_times_leaves_nothing_behind_and_never_hangs(num_workers: int) -> None:
    """`nothing_is_left` asserts after every test here that nothing is left."""
    documents, config = documents_of(31), config_of(train_loader=TrainLoaderConfig(num_workers=num_workers))
    for cycle in range(50):
        batches = train_batches(documents, config, VOCABULARY)
        for _ in zip(range(cycle % 3), batches, strict=False):  # no batch, or some, or an early break
            pass
        batches.close()


class Broken(DocumentDataset):
    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        if 7 in indices:
            raise OSError("record 7 cannot be read")
        return super().__getitems__(indices)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_a_worker_is_raised_where_the_batch_is_asked_for(num_workers: int) -> None:
    broken = read_as(Broken, documents_of(31))
    batches = train_batches(broken, config_of(train_loader=TrainLoaderConfig(num_workers=num_workers)), VOCABULARY)
    with pytest.raises(OSError, match="record 7 cannot be read"):
        list(itertools.chain(batches, batches, batches))
    batches.close()


class Unreadable(DocumentDataset):
    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        raise ConfigError("a.mds: is damaged; write the shards again")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_that_a_user_can_fix_is_one_line_from_a_worker_too(num_workers: int) -> None:
    loader = loader_of(read_as(Unreadable, documents_of(5)), num_workers)
    with pytest.raises(ConfigError, match=r"^a\.mds: is damaged; write the shards again$"):
        list(loader)


def test_the_number_of_workers_follows_the_work_and_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    assert choose_num_workers(3, are_texts=False, are_streamed=False, ranks_of_machine=8) == 3
    assert choose_num_workers(None, are_texts=False, are_streamed=False, ranks_of_machine=8) == 0
    assert choose_num_workers(None, are_texts=True, are_streamed=False, ranks_of_machine=8) == 3
    assert choose_num_workers(None, are_texts=True, are_streamed=True, ranks_of_machine=1) == MAX_TEXT_WORKERS
    assert choose_num_workers(None, are_texts=False, are_streamed=True, ranks_of_machine=1) == 2
    assert choose_num_workers(None, are_texts=True, are_streamed=False, ranks_of_machine=32) == 1
