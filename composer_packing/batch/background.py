"""A background thread that keeps the next items of an iterable ready.

The thread puts items into a bounded queue, and the consumer takes them from it::

    iterable --> thread --> [item, snapshot] [item, snapshot] ... --> consumer
                            at most buffer_size of them

- Thread and consumer wait on one condition variable. Neither polls.
- An error of the iterable is raised again in the consumer, with its traceback.
- An iterable may need to hear something of an item before it makes the next one, see `Answered`. The thread waits for
  that answer.
- Each item travels with a snapshot of the iterable, taken right after the item was made. The saved state therefore
  belongs to the last item that the consumer took, however far ahead the thread is.

The only thing this file knows of packing is that an iterable may have `rows_per_batch`.
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
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from composer_packing.common.snapshots import Snapshot, snapshot_of

Item = TypeVar("Item")


@runtime_checkable
class Answered(Protocol):
    """An iterable that needs an answer to some of its items before it makes the next one."""

    @property
    def awaits_answer(self) -> bool:
        """Whether the item that was made last needs an answer."""

    def take_answer(self, answer: Any) -> None:
        """Take the answer to that item."""


class BufferedIterable(Generic[Item]):
    """Iterates over `iterable` on a background thread, up to `buffer_size` items ahead.

    Only one iterator lives at a time: a new iterator first closes the old one and waits for its thread. The thread ends
    when its iterator is exhausted, closed or no longer referenced. The exit of the interpreter waits at most a second
    for a thread: the thread may be stuck in its source.

    Args:
        iterable: what to iterate over. Every `iter()` starts a new iteration. Saving state needs an iterable with
            `snapshot` and `load_state_dict`, such as a `SequencePacker`.
        buffer_size: largest number of items kept ready. With 0 there is no thread, and each item is made when the
            consumer asks for it.

    Raises:
        ValueError: `buffer_size` is below 0.

    Attributes:
        wait_seconds: seconds that consumers have waited for items, over all iterators.
    """

    def __init__(self, iterable: Iterable[Item], buffer_size: int) -> None:
        if buffer_size < 0:
            raise ValueError(f"{buffer_size=} must be at least 0")
        self.iterable = iterable
        self.buffer_size = buffer_size
        self.wait_seconds = 0.0
        self._live: tuple[_Queue[Item], threading.Thread] | None = None
        self._last_snapshot: Snapshot | None = None
        self._latest_iterator = 0

    def __iter__(self) -> "Iterator[Item]":
        self.close()
        self._last_snapshot = snapshot_of(self.iterable)
        if self.buffer_size == 0:
            return self._one_by_one(self._latest_iterator)
        queue: _Queue[Item] = _Queue(self.buffer_size)
        thread = threading.Thread(target=_fill, args=(self.iterable, queue), name=__name__, daemon=True)
        self._live = queue, thread
        _live_queues[thread] = queue
        iterator = _BufferedIterator(self, queue)
        thread.start()
        return iterator

    def close(self, timeout: float | None = None) -> None:
        """End the live iterator, if there is one, and wait for its thread.

        The thread first finishes the item it is making. If the source blocks for ever, so does this call.

        Args:
            timeout: seconds to wait at most. None waits as long as it takes.

        Raises:
            RuntimeError: the thread itself, that is the source, makes this call.
        """
        self._latest_iterator += 1
        live = self._live
        if live is not None:
            queue, thread = live
            if thread is threading.current_thread():
                raise RuntimeError("a source cannot close or iterate over the BufferedIterable that it feeds")
            queue.close()
            _wait_for_thread(thread, timeout)
            if self._live is live and not thread.is_alive():  # another thread may have called iter() meanwhile
                self._live = None

    def answer(self, answer: Any) -> None:
        """Answer the item that was taken last, for an `Answered` iterable."""
        if self._live is not None:
            self._live[0].answer(answer)
        elif isinstance(self.iterable, Answered):
            self.iterable.take_answer(answer)

    def snapshot(self) -> Snapshot | None:
        """Return the iterable's snapshot after the last item that was taken, or None if it has no `snapshot`."""
        return self._last_snapshot or snapshot_of(self.iterable)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which the next item can be made again, however far ahead the thread is.

        Raises:
            TypeError: the iterable has no `snapshot`.
        """
        snapshot = self.snapshot()
        if snapshot is None:
            raise TypeError(f"a {type(self.iterable).__name__} has no state that could be saved")
        return snapshot()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next `iter()`. This ends the live iterator."""
        self.close()
        self.iterable.load_state_dict(state)  # type: ignore[attr-defined]
        self._last_snapshot = None

    def _one_by_one(self, iterator_number: int) -> Iterator[Item]:
        """Iterate without a thread."""
        items = iter(self.iterable)
        while iterator_number == self._latest_iterator:
            started = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.wait_seconds += time.perf_counter() - started
            self._last_snapshot = snapshot_of(self.iterable)
            yield item

    @property
    def batch_size(self) -> int:
        """Number of rows of the packer's next batch. TypeError if the iterable is not a sequence packer."""
        rows = getattr(self.iterable, "rows_per_batch", None)
        if not isinstance(rows, int):
            raise TypeError(f"batch_size needs a SequencePacker as the iterable, not a {type(self.iterable).__name__}")
        return rows


class _Queue(Generic[Item]):
    """A bounded queue between one producer and one consumer. Either of them can end it."""

    def __init__(self, size: int) -> None:
        self._items: deque[tuple[Item, Snapshot | None]] = deque()
        self._size = size
        self._changed = threading.Condition()
        self._ended = False  # set by the producer: no more items will come
        self._closed = False  # set by the consumer: no more items are wanted
        self._error: BaseException | None = None
        self._answers: deque[Any] = deque(maxlen=1)  # an iterable that awaits no answer leaves it here

    def put(self, item: Item, snapshot: Snapshot | None) -> bool:
        """Wait for room, then add an item with its snapshot. Return False if the consumer wants no more items."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._size)
            if not self._closed:
                self._items.append((item, snapshot))
                self._changed.notify_all()
            return not self._closed

    def get(self) -> tuple[Item, Snapshot | None]:
        """Wait for an item and take it. After the last item raise the producer's error once, then StopIteration."""
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
                self._error = None  # no local name: it would tie the error to its own traceback

    def answer(self, answer: Any) -> None:
        """Answer the item that the consumer took last."""
        with self._changed:
            self._answers.append(answer)
            self._changed.notify_all()

    def pass_answer_on(self, iterable: Answered) -> bool:
        """Wait for an answer and give it to the iterable. Return False if the consumer wants no more items."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._answers)
            if not self._closed:
                iterable.take_answer(self._answers.popleft())
            return not self._closed

    def end(self, error: BaseException | None) -> None:
        """Tell the consumer that no more items come, and the error if there was one."""
        with self._changed:
            self._ended = True
            self._error = None if self._closed else error
            self._changed.notify_all()

    def close(self) -> None:
        """Tell the producer that no more items are wanted, and drop the items in the queue."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._error = None
            self._changed.notify_all()


def _fill(iterable: Iterable[Item], queue: _Queue[Item]) -> None:
    """Run the thread. The thread refers to the iterable and the queue only, so the iterator can be freed."""
    try:
        with contextlib.closing(_each(iterable)) as items:  # the thread that ran the source also cleans it up
            for item in items:
                if not queue.put(item, snapshot_of(iterable)):
                    break
                if isinstance(iterable, Answered) and iterable.awaits_answer and not queue.pass_answer_on(iterable):
                    break
    except BaseException as raised:  # of whatever kind: the consumer handles it
        _end_with_error(queue, raised)
    else:
        queue.end(None)


def _each(iterable: Iterable[Item]) -> Generator[Item, None, None]:
    """Give the items. A generator turns a StopIteration that escapes from `iter()` into an error: it is not the end."""
    yield from iterable


def _end_with_error(queue: _Queue[Any], error: BaseException) -> None:
    """Hand an error to the consumer, and clear the frames of its tracebacks: they may hold a DataLoader's workers."""
    errors = [error]
    for each in errors:
        errors += [cause for cause in (each.__cause__, each.__context__) if cause is not None and cause not in errors]
    tracebacks = [each.__traceback__ for each in errors]  # before raising adds the consumer's frames to them
    queue.end(error)  # before the frames are cleared, because workers may take seconds to end
    for each_traceback in tracebacks:
        traceback.clear_frames(each_traceback)


class _BufferedIterator(Iterator[Item]):
    """The consumer's end of the queue. When nothing refers to it any more, the thread is told to end."""

    def __init__(self, owner: BufferedIterable[Item], queue: _Queue[Item]) -> None:
        self._owner = owner
        self._queue = queue
        # Do not wait for the thread: garbage collection may run anywhere, under any lock, even in this thread.
        weakref.finalize(self, queue.close)

    def __next__(self) -> Item:
        started = time.perf_counter()
        try:
            item, self._owner._last_snapshot = self._queue.get()
            return item
        finally:
            self._owner.wait_seconds += time.perf_counter() - started


def _wait_for_thread(thread: threading.Thread, timeout: float | None = None) -> None:
    """Wait for a thread to end. A thread whose start failed or was interrupted cannot be joined, and needs no wait."""
    with contextlib.suppress(RuntimeError):
        thread.join(timeout)


_live_queues: "weakref.WeakKeyDictionary[threading.Thread, _Queue[Any]]" = weakref.WeakKeyDictionary()


@atexit.register
def _end_threads_at_exit() -> None:
    """Let threads end before the interpreter goes, but wait at most a second for each: a thread may be stuck."""
    for queue in list(_live_queues.values()):
        queue.close()
    for thread in list(_live_queues):
        _wait_for_thread(thread, timeout=1.0)


def _end_iterators_in_child() -> None:
    """End the iterators in a forked process: no thread fills their queues, and a lock held at the fork stays locked."""
    for queue in list(_live_queues.values()):
        queue._changed = threading.Condition()
        if not queue._ended:
            queue.end(RuntimeError("an iterator over a BufferedIterable cannot continue in a forked process"))


os.register_at_fork(after_in_child=_end_iterators_in_child)
