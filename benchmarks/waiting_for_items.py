"""Milliseconds per item of a producer that takes two milliseconds for an item, alone and through a buffer of one.

The claim: a thread that passes items on at once costs next to nothing. A consumer that takes as long as the producer
gets an item about every two milliseconds, not every four.

Everything is measured in one process. The contestants take turns, and medians are printed. `make benchmark` runs this
script. The contestants:

- producer alone: iterated directly, without a thread.
- buffered, idle: through `BufferedIterable`. The consumer does nothing but wait.
- buffered, busy: through `BufferedIterable`. The consumer takes as long for an item as the producer.
- polling, idle and busy: through a thread and a deque. Either side looks again every ten milliseconds.
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
    """Endless items, each after `NEEDED` seconds."""
    while True:
        time.sleep(NEEDED)
        yield 0


def buffered() -> Iterator[int]:
    """The producer's items through our thread."""
    return iter(BufferedIterable(producer(), 1))


def polling() -> Iterator[int]:
    """The producer's items through a thread that polls."""
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
    """Milliseconds per item of `ITEMS` items, after one to warm up."""
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
