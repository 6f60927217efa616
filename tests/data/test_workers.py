"""A packing thread over a real packer, which reads from a real DataLoader with worker processes."""

import gc
import itertools
import multiprocessing
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from composer_packing import BufferedIterable, GreedyBestFitSequencePacker
from composer_packing.batch.contract import Batch
from composer_packing.packing.source_batch import SourceBatch
from tests.tools import ROOT
from tests.tools.packers import new_packer

pytestmark = pytest.mark.timeout(400)

ROW_LEN = 16


class Documents(Dataset[dict[str, list[int]]]):
    """So many short documents that workers still read when something happens. One of them may be special."""

    def __init__(self, unreadable: int = -1, too_long: int = -1) -> None:
        self.unreadable = unreadable
        self.too_long = too_long

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index == self.unreadable:
            raise OSError(f"record {index} cannot be read")
        return {"input_ids": [5] * (ROW_LEN + 1 if index == self.too_long else 1 + index % 7)}


def as_it_is(documents: Any) -> Any:
    return documents


def loader_of(documents: Documents) -> DataLoader[SourceBatch]:
    return DataLoader(documents, batch_size=8, num_workers=2, collate_fn=as_it_is)  # type: ignore[arg-type]


def packed(source: Iterable[SourceBatch]) -> BufferedIterable[Batch]:
    return BufferedIterable(new_packer(GreedyBestFitSequencePacker, source, 8, 2, ROW_LEN, 32), 2)


def becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def no_worker_is_left() -> bool:
    return not multiprocessing.active_children()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert becomes_true(no_worker_is_left)
    assert becomes_true(lambda: set(threading.enumerate()) <= before)


def test_a_bad_record_in_a_worker_is_the_consumers_error_and_ends_the_workers_while_the_error_is_kept() -> None:
    batches = packed(loader_of(Documents(unreadable=100)))
    with pytest.raises(OSError, match="record 100 cannot be read") as caught:
        list(batches)
    assert "Caught OSError in DataLoader worker process" in str(caught.value)
    assert "in __getitem__" in str(caught.value), "the traceback in the worker"
    assert "_refill" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert becomes_true(no_worker_is_left)


def test_an_error_of_the_packer_ends_the_workers_while_the_error_is_kept() -> None:
    batches = packed(loader_of(Documents(too_long=100)))
    with pytest.raises(ValueError, match="a document of 17 tokens is longer than the 16 that") as caught:
        list(batches)
    assert "_refill" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert becomes_true(no_worker_is_left)


@pytest.mark.parametrize("explicitly", [True, False])
def test_an_error_that_followed_from_another_ends_the_workers_too(explicitly: bool) -> None:
    class Translating:
        def __iter__(self) -> Iterator[SourceBatch]:
            try:
                yield from loader_of(Documents(unreadable=100))
            except OSError as error:
                if explicitly:
                    raise LookupError("shard 3") from error
                raise LookupError("shard 3")  # noqa: B904

    with pytest.raises(LookupError, match="shard 3") as caught:
        list(packed(Translating()))
    assert "in __getitem__" in "".join(traceback.format_exception(caught.value))
    assert becomes_true(no_worker_is_left)


def test_an_error_without_a_packer_ends_the_workers_too() -> None:
    with pytest.raises(OSError, match="record 100 cannot be read") as caught:
        list(BufferedIterable(loader_of(Documents(unreadable=100)), 2))
    assert becomes_true(no_worker_is_left), caught


def test_close_ends_the_workers_before_it_returns() -> None:
    batches = packed(loader_of(Documents()))
    assert next(iter(batches))
    iterator = iter(batches)
    assert next(iterator)
    assert len(multiprocessing.active_children()) == 2, "the workers of the first iterator have ended"
    batches.close()
    assert no_worker_is_left()
    assert list(iterator) == []


def test_a_break_ends_the_workers_without_a_call() -> None:
    batches = packed(loader_of(Documents()))
    for _ in batches:
        break
    assert becomes_true(no_worker_is_left)


def test_a_new_iterator_ends_the_workers_of_the_old() -> None:
    batches = packed(loader_of(Documents()))
    old = iter(batches)
    assert next(old)
    workers = set(multiprocessing.active_children())
    new = iter(batches)
    assert next(new)
    assert not workers & set(multiprocessing.active_children())
    assert list(old) == []


@pytest.mark.slow
def test_twenty_starts_with_another_loader_between_them_leave_nothing() -> None:
    batches = packed(loader_of(Documents()))
    evaluation: DataLoader[int] = DataLoader(range(64), batch_size=8, num_workers=2)  # type: ignore[arg-type]
    for _ in range(20):
        assert len(list(itertools.islice(batches, 5))) == 5
        iterator = iter(batches)
        assert next(iterator)
        assert sum(len(batch) for batch in evaluation) == 64
        assert next(iterator)
    batches.close()
    assert no_worker_is_left()


BLOCKED = """
    import os, signal, sys, time
    from tests.data.test_workers import Documents, loader_of, packed
    class Blocked(Documents):
        def __getitem__(self, index):
            if index == 100:
                time.sleep(0.5)  # until the main thread only waits
                {happening}
                time.sleep(600)
            return super().__getitem__(index)
    for batch in packed(loader_of(Blocked())):
        pass
"""


def run_until_nothing_is_left(script: str) -> "subprocess.CompletedProcess[str]":
    """Run a script. `run` waits until no process can write to the standard output, which workers share."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("to", ["os.kill(os.getppid(), signal.SIGINT)", "os.killpg(0, signal.SIGINT)"])
def test_ctrl_c_while_the_consumer_waits_ends_the_process_and_its_workers(to: str) -> None:
    """A terminal interrupts the whole process group. A launcher or a notebook interrupts only the process."""
    done = run_until_nothing_is_left(BLOCKED.format(happening=to))
    assert done.returncode == -2, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.endswith("KeyboardInterrupt\n"), done.stderr


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_ends_the_process() -> None:
    done = run_until_nothing_is_left(BLOCKED.format(happening="os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 1
    assert "RuntimeError: DataLoader worker" in done.stderr
