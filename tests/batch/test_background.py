import gc
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from composer_packing import BufferedIterable, GreedyBestFitSequencePacker
from tests.tools.packers import new_packer

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "composer_packing.batch.background":
            thread.join(60)


class Source:
    """Gives `items` at every `iter()`, and counts what was given, opened and closed."""

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


class Summing:
    """Gives the sum of all answers so far, and awaits an answer to each item until the sum is 6."""

    def __init__(self) -> None:
        self.sum = 0

    @property
    def awaits_answer(self) -> bool:
        return self.sum < 6

    def take_answer(self, answer: int) -> None:
        self.sum += answer

    def __iter__(self) -> Iterator[int]:
        for _ in range(6):
            yield self.sum


@pytest.mark.parametrize("size", [0, 1, 5])
def test_an_iterable_that_awaits_answers_has_each_before_it_makes_the_next_item(size: int) -> None:
    buffered = BufferedIterable(Summing(), size)
    found = []
    for item in buffered:
        found.append(item)
        if item < 6:
            buffered.answer(len(found))
    assert found == [0, 1, 3, 6, 6, 6]


def test_a_thread_that_waits_for_an_answer_ends_with_its_iterator() -> None:
    buffered = BufferedIterable(Summing(), 3)
    assert next(iter(buffered)) == 0
    buffered.close()
    iterator = iter(buffered)
    assert next(iterator) == 0
    del iterator, buffered
    gc.collect()
    wait_for_threads()


@pytest.mark.parametrize("size", [1, 2, 100])
def test_items_come_in_order_at_every_iteration(size: int) -> None:
    buffered = BufferedIterable(Source(range(50)), size)
    assert list(buffered) == list(buffered) == list(range(50))


def test_the_thread_stays_at_most_the_buffer_size_ahead() -> None:
    source = Source(range(1000))
    iterator = iter(BufferedIterable(source, 3))
    assert next(iterator) == 0
    deadline = time.monotonic() + 60
    while source.given < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert source.given == 5, "one taken, three ready, one waiting for room"
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


def test_a_stop_iteration_out_of_opening_the_source_is_an_error_and_not_the_end() -> None:
    class Unopened:
        def __iter__(self) -> Iterator[int]:
            return iter([next(iter([]))])

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(BufferedIterable(Unopened(), 1))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_the_source_raises_reaches_the_consumer(kind: type[BaseException]) -> None:
    def source() -> Iterator[int]:
        yield 0
        raise kind("in the source")

    iterator = iter(BufferedIterable(source(), 1))
    assert next(iterator) == 0
    with pytest.raises(kind, match="in the source"):
        next(iterator)


class WatchedError(LookupError):
    """An error that can be watched by a weak reference."""


class Precious:
    """An object that a source holds in its frames. It calls `last_words` when it is freed."""

    def __init__(self, last_words: Callable[[], object]) -> None:
        self.last_words = last_words

    def __del__(self) -> None:
        self.last_words()


def test_an_error_does_not_wait_until_the_objects_of_the_source_are_freed() -> None:
    caught_in_main, went_after_it = threading.Event(), []

    def source() -> Iterator[int]:
        held = Precious(lambda: went_after_it.append(caught_in_main.wait(60)))
        yield 0
        raise OSError(f"with {held.__class__.__name__}")

    buffered = BufferedIterable(source(), 2)
    with pytest.raises(OSError, match="with Precious") as caught:
        list(buffered)
    caught_in_main.set()
    buffered.close()
    assert went_after_it == [True], f"although {caught} still has its traceback"


def test_an_error_that_has_been_handled_leaves_nothing_to_the_garbage_collector() -> None:
    raised: list[weakref.ref[WatchedError]] = []

    def source() -> Iterator[int]:
        yield 0
        error = WatchedError("handled")  # a local name in the frame that raises it, as in PyTorch
        raised.append(weakref.ref(error))
        raise error

    buffered = BufferedIterable(source(), 2)
    gc.disable()
    try:
        with suppress(WatchedError):
            list(buffered)
        buffered.close()
        assert raised[0]() is None
    finally:
        gc.enable()


def test_an_error_that_nobody_came_for_goes_with_the_iterator() -> None:
    raised: list[weakref.ref[WatchedError]] = []

    def source() -> Iterator[int]:
        yield 0
        error = WatchedError("unseen")
        raised.append(weakref.ref(error))
        raise error

    buffered = BufferedIterable(source(), 2)
    iterator = iter(buffered)
    assert next(iterator) == 0
    wait_for_threads()
    assert raised[0]() is not None
    del iterator
    gc.collect()
    assert raised[0]() is None


def test_the_error_of_a_packer_reaches_the_consumer() -> None:
    packer = new_packer(GreedyBestFitSequencePacker, [[{"input_ids": [1] * 9}]], 1, 1, 8, 2)
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


def test_close_wakes_a_consumer_that_waits_for_a_stuck_source() -> None:
    stuck, go = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 0
        stuck.set()
        go.wait(60)
        yield 1

    buffered = BufferedIterable(source(), 1)
    iterator = iter(buffered)
    assert next(iterator) == 0
    assert stuck.wait(60)
    closer = threading.Timer(0.1, buffered.close)
    closer.start()
    assert list(iterator) == []
    assert not go.is_set()
    assert closer.is_alive(), "it waits for the thread"
    started = time.monotonic()
    buffered.close(timeout=0.1)
    assert time.monotonic() - started < 5
    assert closer.is_alive(), "only this one did not wait"
    go.set()
    closer.join()
    assert list(buffered) == [], "the thread has ended"


@pytest.mark.parametrize("mistake", [BufferedIterable.close, iter])
def test_a_source_that_ends_its_own_thread_is_an_error(mistake: Callable[[BufferedIterable[int]], object]) -> None:
    def source() -> Iterator[int]:
        yield 0
        mistake(buffered)

    buffered = BufferedIterable(source(), 2)
    with pytest.raises(RuntimeError, match="cannot close or iterate over the BufferedIterable that it feeds"):
        list(buffered)


def test_a_thread_that_cannot_be_started_is_an_error_that_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    buffered = BufferedIterable(Source(range(3)), 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            iter(buffered)
    buffered.close()
    assert list(buffered) == [0, 1, 2]


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
    wait_for_threads()  # the thread was only told to end: an iterator that nothing refers to cannot wait
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
    packer = new_packer(
        GreedyBestFitSequencePacker,
        [[{"input_ids": [1] * 4}] * 4],
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


def test_a_new_iterator_waits_for_a_thread_whose_iterator_was_dropped_without_closing() -> None:
    """The old thread is still making an item when the new iterator starts."""
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


def test_dropping_an_iterator_does_not_wait_for_its_thread() -> None:
    """Garbage may be collected under a lock that the thread wants. Here the main thread holds the lock."""
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


@pytest.mark.parametrize("size", [-1, -2])
def test_a_buffer_below_zero_is_an_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"buffer_size={size}"):
        BufferedIterable([], size)


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), signal.SIGINT)", -2)]
)
def test_a_process_ends_at_once_with_an_iterator_still_open(ending: str, code: int) -> None:
    script = textwrap.dedent(
        f"""
        import itertools, os, signal
        from composer_packing.batch.background import BufferedIterable
        iterator = iter(BufferedIterable(itertools.count(), 2))
        next(iterator)
        {ending}
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stderr
    assert "Fatal" not in done.stderr


def test_a_process_ends_although_its_source_is_stuck() -> None:
    script = textwrap.dedent(
        """
        import threading
        from composer_packing.batch.background import BufferedIterable
        def stuck():
            yield 0
            threading.Event().wait()
        iterator = iter(BufferedIterable(stuck(), 1))
        next(iterator)
        raise SystemExit(3)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 3, done.stderr


def test_ctrl_c_interrupts_a_consumer_that_waits_for_a_stuck_source() -> None:
    script = textwrap.dedent(
        """
        import os, signal, threading
        from composer_packing.batch.background import BufferedIterable
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "interrupted", done.stderr
    assert done.returncode == 0


FORKING = """
    import os, threading
    from composer_packing.batch.background import BufferedIterable
    class Item:
        def __del__(self):
            {as_it_goes}
    class Source:
        def __iter__(self):
            while True:
                yield Item()
    buffered = BufferedIterable(Source(), 1)
    iterator = iter(buffered)
    kept = [next(iterator)]
    {before}
    child = os.fork()
    if child == 0:
        try:
            list(iterator)
        except RuntimeError as error:
            print(error, flush=True)
        again = iter(buffered)
        kept.append(next(again))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os._exit(0)
"""


def test_a_forked_process_starts_again_and_cannot_continue_an_iterator_of_its_parent() -> None:
    script = textwrap.dedent(FORKING.format(as_it_goes="pass", before="pass"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "an iterator over a BufferedIterable cannot continue in a forked process\n"


def test_a_process_forked_while_another_thread_holds_the_lock_does_not_wait_for_it() -> None:
    """`close` holds the lock while it drops the items in the queue, and here dropping takes for ever."""
    before = "here = threading.Event(); threading.Thread(target=buffered.close).start(); here.wait()"
    script = textwrap.dedent(FORKING.format(as_it_goes="here.set(); threading.Event().wait()", before=before))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
