"""Milliseconds per item of a producer that needs two of them, alone and behind a buffer of one.

A thread that hands items over at once costs next to nothing, and a consumer of equal pace gets one about every two
milliseconds, not every four. Everything is measured in one process, in turns, and given as medians. It is
part of `make benchmark`. The contestants:

- producer alone: iterated directly, no thread.
- buffered, idle: behind `BufferedIterable`, the consumer does nothing but wait.
- buffered, busy: the same, and the consumer needs as long for an item as the producer.
- polling, idle and busy: a thread and a deque, where either side looks again every ten milliseconds.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from composer_packing import BufferedIterable

ITEMS, ROUNDS = 200, 9
NEEDED, POLL = 0.002, 0.010


def producer() -> Iterator[int]:
    """Items without end, each after `NEEDED` seconds."""
    while True:
        time.sleep(NEEDED)
        yield 0


def buffered() -> Iterator[int]:
    """The producer's items by way of our thread."""
    return iter(BufferedIterable(producer(), 1))


def polling() -> Iterator[int]:
    """The producer's items by way of a thread that polls."""
    items: deque[int] = deque()
    ended = threading.Event()

    def fill() -> None:
        for item in producer():
            while len(items) >= 1 and not ended.is_set():
                time.sleep(POLL)
            if ended.is_set():
                return
            items.append(item)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        while True:
            while not items:
                time.sleep(POLL)
            yield items.popleft()
    finally:
        ended.set()
        thread.join()


CONTESTANTS: dict[str, tuple[Callable[[], Iterator[int]], float]] = {
    "producer alone": (producer, 0.0),
    "buffered, idle": (buffered, 0.0),
    "buffered, busy": (buffered, NEEDED),
    "polling, idle": (polling, 0.0),
    "polling, busy": (polling, NEEDED),
}


def milliseconds_per_item(items: Iterator[int], consumer_needs: float) -> float:
    """Over `ITEMS` items, after one to warm up."""
    next(items)
    started = time.perf_counter()
    for _ in range(ITEMS):
        next(items)
        if consumer_needs:
            time.sleep(consumer_needs)
    return (time.perf_counter() - started) / ITEMS * 1000


def main() -> None:
    """Print a table."""
    rounds = [[milliseconds_per_item(make(), needs) for make, needs in CONTESTANTS.values()] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    print(" " * 16 + "   ms per item   ratio to the producer alone")
    for name, median in zip(CONTESTANTS, medians, strict=True):
        print(f"{name:16}{median:14.3f}{median / medians[0]:30.2f}")


if __name__ == "__main__":
    main()
