"""A background thread that keeps the next items of an iterable ready.

The thread fills a bounded queue; the consumer takes from it. Both wait on one condition variable, nobody
polls. What the iterable raises is raised again, traceback and all, where the consumer stands. With each item travels
a snapshot of the iterable as it was behind that item, so that what is saved is where the consumer is, however far
ahead the thread. Of packing this file knows only that an iterable may have `rows_per_batch`.
"""

import atexit
import contextlib
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from composer_packing.common.snapshots import Snapshot, snapshot_of

Item = TypeVar("Item")


class BufferedIterable(Generic[Item]):
    """Iterates over `iterable` in a background thread, up to `buffer_size` items ahead.

    One iterator lives at a time: a new one first closes the old and waits for its thread. An iterator that is
    exhausted, closed or no longer referenced leaves no thread behind. At interpreter exit a thread that is
    stuck in its source is left to die.

    Args:
        iterable: what to iterate over, anew at every `iter()`. If it has `snapshot` and `load_state_dict`, as a
            `SequencePacker` has, so has this.
        buffer_size: items kept ready at most; 0 for no thread, each is made when it is asked for.

    Raises:
        ValueError: `buffer_size` is below 0.

    Attributes:
        wait_seconds: time consumers have spent waiting for an item, over all iterators.
    """

    def __init__(self, iterable: Iterable[Item], buffer_size: int) -> None:
        if buffer_size < 0:
            raise ValueError(f"{buffer_size=} must be at least 0")
        self.iterable = iterable
        self.buffer_size = buffer_size
        self.wait_seconds = 0.0
        self._live: tuple[_Queue[Item], threading.Thread] | None = None
        self._taken: Snapshot | None = None
        self._latest = 0

    def __iter__(self) -> "Iterator[Item]":
        self.close()
        self._taken = snapshot_of(self.iterable)
        if self.buffer_size == 0:
            return self._one_by_one(self._latest)
        queue: _Queue[Item] = _Queue(self.buffer_size)
        thread = threading.Thread(target=_fill, args=(self.iterable, queue), name=__name__, daemon=True)
        self._live = queue, thread
        _live_queues[thread] = queue
        iterator = _BufferedIterator(self, queue)
        thread.start()
        return iterator

    def close(self, timeout: float | None = None) -> None:
        """End the live iterator, if there is one, and wait for its thread.

        The thread ends once the item it is making is made; a source that blocks for ever blocks here too, and
        one that calls this itself gets a RuntimeError.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.
        """
        self._latest += 1
        live = self._live
        if live is not None:
            queue, thread = live
            if thread is threading.current_thread():
                raise RuntimeError("a source cannot close or iterate over the BufferedIterable that it feeds")
            queue.close()
            _join(thread, timeout)
            if self._live is live and not thread.is_alive():  # meanwhile another thread may have started anew
                self._live = None

    def snapshot(self) -> Snapshot | None:
        """The iterable's, as of the item that was taken last; None where it has none."""
        return self._taken or snapshot_of(self.iterable)

    def state_dict(self) -> dict[str, Any]:
        """What the next item follows from, whatever the thread has made ready; TypeError where that has no state."""
        taken = self.snapshot()
        if taken is None:
            raise TypeError(f"a {type(self.iterable).__name__} has no state that could be saved")
        return taken()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next `iter()`; a live iterator ends."""
        self.close()
        self.iterable.load_state_dict(state)  # type: ignore[attr-defined]
        self._taken = None

    def _one_by_one(self, serial: int) -> Iterator[Item]:
        items = iter(self.iterable)
        while serial == self._latest:
            started = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.wait_seconds += time.perf_counter() - started
            self._taken = snapshot_of(self.iterable)
            yield item

    @property
    def batch_size(self) -> int:
        """Rows of the packer's next batch; TypeError where the iterable is no sequence packer."""
        rows = getattr(self.iterable, "rows_per_batch", None)
        if not isinstance(rows, int):
            raise TypeError(f"batch_size is known over a SequencePacker only, not over {type(self.iterable).__name__}")
        return rows


class _Queue(Generic[Item]):
    """A bounded queue between one producer and one consumer that either of them can end."""

    def __init__(self, size: int) -> None:
        self._items: deque[tuple[Item, Snapshot | None]] = deque()
        self._size = size
        self._changed = threading.Condition()
        self._ended = False  # by the producer: nothing more will come
        self._closed = False  # by the consumer: nothing more is wanted
        self._error: BaseException | None = None

    def put(self, item: Item, snapshot: Snapshot | None) -> bool:
        """Add an item, and what is to be taken with it, once there is room; False where the consumer wants no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._size)
            if not self._closed:
                self._items.append((item, snapshot))
                self._changed.notify_all()
            return not self._closed

    def get(self) -> tuple[Item, Snapshot | None]:
        """Take an item once there is one; after the last, the producer's error once, then StopIteration."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended or self._closed)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            if self._error is None:
                raise StopIteration
            try:
                raise self._error
            finally:
                self._error = None  # a local name would tie the error to its own traceback

    def end(self, error: BaseException | None) -> None:
        """Say that no more items come, and why."""
        with self._changed:
            self._ended = True
            self._error = None if self._closed else error
            self._changed.notify_all()

    def close(self) -> None:
        """Say that no more items are wanted, and forget those that wait."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._error = None
            self._changed.notify_all()


def _fill(iterable: Iterable[Item], queue: _Queue[Item]) -> None:
    """Body of the thread. It holds the iterable and the queue but not the iterator, so that can be freed."""
    try:
        with contextlib.closing(_each(iterable)) as items:  # cleanup belongs to the thread that ran the source
            for item in items:
                if not queue.put(item, snapshot_of(iterable)):
                    break
    except BaseException as raised:  # the consumer's to handle, whatever it is
        _end_with_error(queue, raised)
    else:
        queue.end(None)


def _each(iterable: Iterable[Item]) -> Generator[Item, None, None]:
    """The items. A StopIteration that escapes from `iter()` turns into an error here: it is not the end."""
    yield from iterable


def _end_with_error(queue: _Queue[Any], error: BaseException) -> None:
    """Hand the error over and empty the frames that it and its causes keep: they hold a DataLoader's workers."""
    errors = [error]
    for one in errors:
        errors += [cause for cause in (one.__cause__, one.__context__) if cause is not None and cause not in errors]
    tracebacks = [one.__traceback__ for one in errors]  # before the consumer's frames are among them
    queue.end(error)  # first, as workers may take seconds to go
    for one_traceback in tracebacks:
        traceback.clear_frames(one_traceback)


class _BufferedIterator(Iterator[Item]):
    """The consumer's end of the queue; when nobody refers to it any more, the thread is told to end."""

    def __init__(self, owner: BufferedIterable[Item], queue: _Queue[Item]) -> None:
        self._owner = owner
        self._queue = queue
        # Only told, not waited for: a collection may run anywhere, under any lock, even in that thread.
        weakref.finalize(self, queue.close)

    def __next__(self) -> Item:
        started = time.perf_counter()
        try:
            item, self._owner._taken = self._queue.get()
            return item
        finally:
            self._owner.wait_seconds += time.perf_counter() - started


def _join(thread: threading.Thread, timeout: float | None = None) -> None:
    """Wait for a thread, unless its start failed or was interrupted: Python takes it for never started then."""
    with contextlib.suppress(RuntimeError):
        thread.join(timeout)


_live_queues: "weakref.WeakKeyDictionary[threading.Thread, _Queue[Any]]" = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads_at_exit() -> None:
    """Let threads end before the interpreter goes, but never wait for a stuck one."""
    for queue in list(_live_queues.values()):
        queue.close()
    for thread in list(_live_queues):
        _join(thread, timeout=1.0)


def _end_iterators_in_child() -> None:
    """In a forked process no thread fills the queues, and nobody gives back a lock that was held at the fork."""
    for queue in list(_live_queues.values()):
        queue._changed = threading.Condition()
        if not queue._ended:
            queue.end(RuntimeError("an iterator over a BufferedIterable cannot go on in a forked process"))


os.register_at_fork(after_in_child=_end_iterators_in_child)
