import gc
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from composer_packing import BufferedIterable, GreedyBestFitSequencePacker


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) == before


class Source:
    """Gives `items`, anew each time, and keeps an account of it."""

    def __init__(self, items: Iterable[int], fails_after: int | None = None) -> None:
        self.items = items
        self.fails_after = fails_after
        self.given = 0
        self.opened = 0
        self.closed = 0

    def __iter__(self) -> Iterator[int]:
        self.opened += 1
        try:
            for count, item in enumerate(self.items):
                if count == self.fails_after:
                    raise KeyError("record 37 is broken")
                self.given += 1
                yield item
        finally:
            self.closed += 1


@pytest.mark.parametrize("size", [1, 2, 100])
def test_items_come_in_order_at_every_iteration(size: int) -> None:
    buffered = BufferedIterable(Source(range(50)), size)
    assert list(buffered) == list(buffered) == list(range(50))


def test_the_thread_stays_at_most_the_buffer_size_ahead() -> None:
    source = Source(range(1000))
    iterator = iter(BufferedIterable(source, 3))
    assert next(iterator) == 0
    deadline = time.monotonic() + 10
    while source.given < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert source.given == 5, "one taken, three ready, one in the hand"
    assert next(iterator) == 1


def test_an_error_reaches_the_consumer_after_the_items_before_it_with_its_own_traceback() -> None:
    iterator = iter(BufferedIterable(Source(range(50), fails_after=2), 10))
    assert [next(iterator), next(iterator)] == [0, 1]
    with pytest.raises(KeyError, match="record 37 is broken") as caught:
        next(iterator)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[0] == "test_an_error_reaches_the_consumer_after_the_items_before_it_with_its_own_traceback"
    assert frames[-1] == "__iter__", "the line that raised"
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_in_opening_the_source_reaches_the_consumer_too() -> None:
    buffered: BufferedIterable[Any] = BufferedIterable(3, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not iterable"):
        next(iter(buffered))


def test_the_error_of_a_packer_reaches_the_consumer() -> None:
    packer = GreedyBestFitSequencePacker([[{"input_ids": [1] * 9}]], 1, 8, 1, 8, 2)
    with pytest.raises(ValueError, match="document of 9 tokens"):
        list(BufferedIterable(packer, 2))


def test_close_ends_the_thread_and_closes_the_source() -> None:
    source = Source(range(1000))
    buffered = BufferedIterable(source, 2)
    iterator = iter(buffered)
    next(iterator)
    buffered.close()
    assert source.closed == 1
    assert list(iterator) == []
    buffered.close()
    assert next(iter(buffered)) == 0, "it can be iterated again"
    buffered.close()


def test_a_new_iterator_retires_the_old_one_before_it_starts() -> None:
    source = Source(range(1000))
    buffered = BufferedIterable(source, 2)
    old = iter(buffered)
    next(old)
    new = iter(buffered)
    assert source.closed == 1
    assert next(new) == 0
    assert list(old) == []
    assert source.opened == 2


def test_an_abandoned_iterator_leaves_no_thread() -> None:
    source = Source(range(1000))
    buffered = BufferedIterable(source, 2)
    for item in buffered:
        if item == 5:
            break
    gc.collect()
    assert source.closed == 1


def test_fifty_starts_and_stops_leave_no_thread() -> None:
    source = Source(range(10))
    buffered = BufferedIterable(source, 2)
    for _ in range(50):
        assert next(iter(buffered)) == 0
    buffered.close()
    assert source.opened == source.closed == 50


def test_waiting_is_measured() -> None:
    def slow() -> Iterator[int]:
        yield 0
        time.sleep(0.2)
        yield 1

    buffered = BufferedIterable(slow(), 1)
    assert buffered.wait_seconds == 0.0
    assert list(buffered) == [0, 1]
    assert buffered.wait_seconds >= 0.15


def test_batch_size_is_the_packers_current_rows() -> None:
    packer = GreedyBestFitSequencePacker(
        [[{"input_ids": [1] * 4}] * 4],
        4,
        4,
        2,
        4,
        5,
        batch_size_warmup_min_size=1,
        batch_size_warmup_tokens=16,
    )
    buffered = BufferedIterable(packer, 1)
    assert buffered.batch_size == 1
    list(buffered)
    assert buffered.batch_size == 2
    with pytest.raises(TypeError, match="list"):
        _ = BufferedIterable([1], 1).batch_size


def test_an_error_after_close_is_not_kept() -> None:
    closing = threading.Event()

    def fails_late() -> Iterator[int]:
        yield 0
        closing.wait()
        raise OSError("late")

    buffered = BufferedIterable(fails_late(), 1)
    iterator = iter(buffered)
    assert next(iterator) == 0
    threading.Timer(0.1, closing.set).start()
    buffered.close()
    assert list(iterator) == []


def test_a_new_iterator_waits_for_a_thread_whose_iterator_was_only_forgotten() -> None:
    """The old thread is still making an item when the new iterator is asked for."""
    running = 0
    most = 0

    class Counted:
        def __iter__(self) -> Iterator[int]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                for item in range(1000):
                    time.sleep(0.02)
                    yield item
            finally:
                running -= 1

    buffered = BufferedIterable(Counted(), 1)
    for _ in range(5):
        next(iter(buffered))
        gc.collect()
    buffered.close()
    assert most == 1


def test_forgetting_an_iterator_does_not_wait_for_its_thread() -> None:
    """A collection may run under a lock that the thread wants: here, this thread holds it."""
    lock = threading.Lock()

    def wants_lock() -> Iterator[int]:
        yield 0
        with lock:
            yield 1

    buffered = BufferedIterable(wants_lock(), 2)
    with lock:
        iterator = iter(buffered)
        assert next(iterator) == 0
        del iterator
        gc.collect()
    buffered.close()


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_below_one_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"buffer_size={size}"):
        BufferedIterable([], size)


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), signal.SIGINT)", -2)]
)
def test_a_process_ends_at_once_with_an_iterator_still_open(ending: str, code: int) -> None:
    script = textwrap.dedent(
        f"""
        import itertools, os, signal
        from composer_packing.buffered import BufferedIterable
        iterator = iter(BufferedIterable(itertools.count(), 2))
        next(iterator)
        {ending}
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr


def test_a_process_ends_although_its_source_is_stuck() -> None:
    script = textwrap.dedent(
        """
        import threading
        from composer_packing.buffered import BufferedIterable
        def stuck():
            yield 0
            threading.Event().wait()
        iterator = iter(BufferedIterable(stuck(), 1))
        next(iterator)
        raise SystemExit(3)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr


def test_ctrl_c_interrupts_a_consumer_that_waits_for_a_stuck_source() -> None:
    script = textwrap.dedent(
        """
        import os, signal, threading
        from composer_packing.buffered import BufferedIterable
        go = threading.Event()
        def stuck():
            go.wait()
            yield
        iterator = iter(BufferedIterable(stuck(), 1))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            next(iterator)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            go.set()
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "interrupted", done.stderr
    assert done.returncode == 0
