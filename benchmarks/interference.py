"""Share of its speed that a training thread keeps while batches are packed on another thread.

The claim: a training thread of small torch operations keeps at least 98 % of its speed while 20 batches per second are
delivered.

The main thread trains a small network, forward, backward and update, on a core of its own. Twenty times a second it
takes a batch and drops it, and the other thread packs a new one. The time of taking counts as lost too. Packing ends
long before half of such a period is over. So the steps in the first half of a period are compared with those in the
second halves before and after it, as both see the same machine. The share is computed for the whole period, and its
median is printed.

The script needs Linux, which lets a thread have a core of its own. `make benchmark` runs it. The contestants:

- nothing: no batch is taken. The difference from 1 is noise.
- buffered: `BufferedIterable` over a `SubsetSumSequencePacker` with keyed masks, from flat source batches.
- lockstep: `Lockstep` over the same packer, as in a run.
- buffered, same core: both threads share one core, as on a machine without a spare core.
- plain, buffered: `BufferedIterable` over the plain packer of the benchmark `packing`, from arrays.

The column `taking` is the time of `next()` and of dropping the batch. The rest of the loss comes from the interpreter's
lock and from the memory that both threads share.
"""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from packing import KEYED_MASKING, WORKLOADS, labels, plain_batches, sources

from composer_packing import BufferedIterable, Lockstep, SubsetSumSequencePacker

PERIOD, PERIODS, ROUNDS = 1 / 20, 20, 16
PREFETCH, WIDTH = 5, 32


def small_training() -> Callable[[], None]:
    """Make a training step of a network so small that calls take nearly all of the time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given = torch.randn(8, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(given).square().mean().backward()
        optimizer.step()

    return step


def steps_per_second(step: Callable[[], None], started: float, seconds: float) -> float:
    """Train until `seconds` after `started`. The time before the first step counts too."""
    steps = 0
    now = time.perf_counter()
    while now < started + seconds:
        step()
        steps += 1
        now = time.perf_counter()
    return steps / (now - started)


def measured(step: Callable[[], None], batches: Iterator[Any]) -> tuple[list[float], list[float], list[float]]:
    """Take a batch in each period. Returns steps per second in first and in second halves, and seconds of taking."""
    first, second, taking = [], [], []
    for _ in range(PERIODS):
        started = time.perf_counter()
        next(batches)
        taking.append(time.perf_counter() - started)
        first.append(steps_per_second(step, started, PERIOD / 2))
        second.append(steps_per_second(step, time.perf_counter(), PERIOD / 2))
    return first, second, taking


def main() -> None:
    """Print a table."""
    workload = WORKLOADS[0]
    size, forms = sources(workload)

    def packer() -> SubsetSumSequencePacker:
        return SubsetSumSequencePacker(
            itertools.cycle(forms["flat"]), workload.shape(size), labels(keyed_masking=KEYED_MASKING)
        )

    def plain() -> Iterator[dict[str, Any]]:
        arrays = itertools.cycle(forms["arrays"])
        return plain_batches(arrays, size, workload.rows, workload.row_len, 10 * size)

    own, *others = sorted(os.sched_getaffinity(0))
    made: dict[str, tuple[Callable[[], Iterable[Any]], list[int]]] = {
        "buffered": (lambda: BufferedIterable(packer(), PREFETCH), others),
        "lockstep": (lambda: Lockstep(packer(), PREFETCH), others),
        "buffered, same core": (lambda: BufferedIterable(packer(), PREFETCH), [own]),
        "plain, buffered": (lambda: BufferedIterable(plain(), PREFETCH), others),
    }
    contestants: dict[str, Iterator[Any]] = {"nothing": itertools.repeat(None)}
    for name, (make, cores) in made.items():
        os.sched_setaffinity(0, cores or [own])  # of this thread, and of the threads that it starts
        batches = iter(make())
        contestants[name] = batches
        next(batches)
    os.sched_setaffinity(0, [own])
    step = small_training()
    for batches in contestants.values():
        measured(step, batches)
    kept: dict[str, list[float]] = {name: [] for name in contestants}
    took: dict[str, list[float]] = {name: [] for name in contestants}
    alone: list[float] = []
    started = time.perf_counter()
    for _ in range(ROUNDS):
        for name, batches in contestants.items():
            first, second, taking = measured(step, batches)
            around = map(statistics.mean, itertools.pairwise(second))
            kept[name] += [(beside / other + 1) / 2 for beside, other in zip(first[1:], around, strict=True)]
            took[name] += taking
            alone += second
    delivered = ROUNDS * PERIODS * len(contestants) / (time.perf_counter() - started)

    print(f"{statistics.median(alone):.0f} steps per second alone; {delivered:.1f} batches per second were taken")
    print(" " * 20 + "   share of steps   give or take   taking, ms")
    for name, shares in kept.items():
        lower, share, upper = statistics.quantiles(shares)
        noise = (upper - lower) / len(shares) ** 0.5
        print(f"{name:20}{share:17.4f}{noise:15.4f}{statistics.median(took[name]) * 1000:13.3f}")


if __name__ == "__main__":
    main()
