"""A function applied to many items in several processes, with the results in order and a bound on what is under way."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from composer_packing.common.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

UNDER_WAY = 3
"""Items per process that are handed out and whose results are not taken yet."""

_function: Callable[[Any], Any]
"""What a worker process applies; it is handed over once, as it may hold a large tokenizer."""


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int, preload: str
) -> Generator[Result, None, None]:
    """Results for all items, in their order. Close it, and the workers end.

    Workers end with this process too, however it ends. With one process the work is done in this one.

    Args:
        function: can be pickled, as items and results can.
        items: taken by this process, never more than `UNDER_WAY * processes` before the result that is given next.
        processes: how many do the work.
        preload: module that the workers share, as it is loaded before they are forked from a process of their own.

    Raises:
        ConfigError: a worker was killed.
    """
    if processes == 1:
        yield from map(function, items)
        return
    # Threads of this process rule out a plain fork, and loading everything anew in each worker takes seconds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", preload])
    pool = ProcessPoolExecutor(processes, context, _start_worker, (function,))
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            with _interrupts_held():
                under_way.append(pool.submit(_apply, item))
            if len(under_way) == UNDER_WAY * processes:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except (BrokenProcessPool, BrokenPipeError, ConnectionResetError) as error:
        raise ConfigError(
            f"processes={processes}: one of them was killed, perhaps as memory ran out; run again, with fewer of them"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Handle SIGINT and SIGTERM at the end only.

    What their handlers raise in the middle of starting a worker would leave one that its pool does not know of. That
    one might take the note by which the pool tells another to end, and the pool would wait for the other for ever.
    """
    handlers, came = {}, list[int]()
    if threading.current_thread() is threading.main_thread():  # in which handlers run, and which alone may set them
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as the work is shared out already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    threading.Thread(target=_end_with_the_first_process, daemon=True).start()


def _end_with_the_first_process() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _apply(item: Any) -> Any:
    return _function(item)
