"""A pool of processes that applies a function to many items. Results come in order, and few items are in memory.

`Executor.map` takes all items at once, and gets a limit only in Python 3.14. Here an item is taken as a result leaves.
"""

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
"""Items per process that were handed out and whose results are not taken yet."""

_function: Callable[[Any], Any]
"""The function of a worker process. Each worker gets it once, as it may hold a large tokenizer."""


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], processes: int, preload: str
) -> Generator[Result, None, None]:
    """Results for all items, in their order. Closing the generator ends the workers.

    Workers also end with this process, however it ends. If `processes` is 1, this process does the work itself.

    Args:
        function: applied to each item. The function, items and results must be picklable.
        items: read by this process, at most `UNDER_WAY * processes` items ahead of the next result.
        processes: number of workers.
        preload: module that is imported once, in the process from which the workers are forked.

    Raises:
        ConfigError: a worker was killed.
    """
    if processes == 1:
        yield from map(function, items)
        return
    # This process has threads, which rules out a plain fork; importing everything in each worker takes seconds.
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
            f"processes={processes}: one was killed, perhaps because memory ran out; run again with fewer processes"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end of the block.

    An exception from their handlers while a worker starts would leave a worker that the pool does not know. That worker
    might take the message by which the pool tells another worker to end. The pool would wait for the other for ever.
    """
    handlers, came = {}, list[int]()
    if threading.current_thread() is threading.main_thread():  # only this thread runs and sets handlers
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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the work already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the workers
    threading.Thread(target=_end_with_the_first_process, daemon=True).start()


def _end_with_the_first_process() -> None:
    first = multiprocessing.parent_process()
    assert first is not None
    first.join()
    os._exit(1)


def _apply(item: Any) -> Any:
    return _function(item)
