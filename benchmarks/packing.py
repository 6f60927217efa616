"""Nanoseconds per token of packing and masking, compared with a plain implementation and with writing alone.

Everything is measured in one process. The contestants take turns, and medians are printed. On a shared machine only the
ratios mean something. `make benchmark` runs this script. The contestants:

- ours: best fit with keyed masks, as in a run from a YAML file. It reads flat source batches (uint16), int64 arrays, or
  Python lists. Four more read flat source batches: subset sum with keyed masks, best fit with the published masks, and
  subset sum with next-token labels, either for all tokens or, by a loss mask, for the second half of each document.
- plain: the published batches made in numpy, one document at a time with a compiled best fit, from arrays or lists.
- floor: writes three int64 arrays of the batch's shape and nothing else.
- packing alone, without masks: both of our strategies from flat source batches in the order in which they are read,
  and TRL's best-fit decreasing, in memory, on the documents of as many batches. TRL packs 1,000 documents at a time and
  does not pad. It is compared if it is installed: `pip install trl datasets`.
"""

import importlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing import (
    BatchShape,
    FlatSourceBatch,
    GreedyBestFitSequencePacker,
    KeyedMasking,
    LabelSettings,
    SequencePacker,
    SubsetSumSequencePacker,
    find_best_fit,
)
from composer_packing.packing.source_batch import SourceBatch

WARMUP_BATCHES, BATCHES, ROUNDS = 40, 12, 15
SOURCE_BATCHES = 48
VOCAB_SIZE, MASK, PAD, IGNORE, MASK_PROB = 50_000, 4, 0, -100, 0.3


class Workload(NamedTuple):
    """Lognormal document lengths, limited to a range, and the shape of a batch."""

    name: str
    mean: float
    deviation: float
    shortest: int
    longest: int
    row_len: int
    rows: int

    def documents(self) -> list[NDArray[np.int64]]:
        """Documents that fill `SOURCE_BATCHES` batches."""
        rng = np.random.default_rng(0)
        tokens = SOURCE_BATCHES * self.row_len * self.rows
        lengths = rng.lognormal(self.mean, self.deviation, tokens // self.shortest)
        lengths = np.clip(lengths, self.shortest, self.longest).astype(np.int64)
        lengths = lengths[: np.searchsorted(lengths.cumsum(), tokens)]
        return np.split(rng.integers(5, VOCAB_SIZE, lengths.sum()), lengths.cumsum()[:-1])

    def shape(self, size: int) -> BatchShape:
        """The shape of a batch, from source batches of `size` documents."""
        return BatchShape(size, self.rows, self.row_len, 10 * size)


WORKLOADS = (
    Workload("medium documents", 5.25, 0.85, 8, 1024, 8192, 16),
    Workload("long documents", 7.0, 1.1, 16, 8192, 8192, 16),
    Workload("short documents", 3.2, 0.65, 4, 256, 1024, 128),
)


class Endless:
    """The same source batches again and again."""

    def __init__(self, batches: list[SourceBatch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[SourceBatch]:
        return itertools.cycle(self.batches)


KEYED_MASKING = KeyedMasking(17, VOCAB_SIZE, range(5))


def labels(**settings: Any) -> LabelSettings:
    """Label settings with the token ids and the mask ratio of the benchmarks."""
    return LabelSettings(pad_token_id=PAD, mask_token_id=MASK, mask_prob=MASK_PROB, **settings)


def ours(
    strategy: type[SequencePacker], source: Endless, size: int, workload: Workload, settings: LabelSettings
) -> Iterator[Any]:
    """Attention masks of our packer's batches."""
    for batch in strategy(source, workload.shape(size), settings):
        yield batch["attention_mask"].numpy()


def plain(source: Endless, size: int, workload: Workload) -> Iterator[Any]:
    """Attention masks of the published batches, which are made without our kernels."""
    for batch in plain_batches(source, size, workload.rows, workload.row_len, 10 * size):
        yield batch["attention_mask"]


def plain_batches(
    source: Iterable[Any], size: int, rows: int, row_len: int, buffer_size: int, seed: int = 42
) -> Iterator[dict[str, Any]]:
    """The published batches, made one document at a time."""
    rng = np.random.default_rng(seed)
    waiting: deque[NDArray[np.int64]] = deque()
    reader = iter(source)
    while True:
        ids = np.full((rows, row_len), PAD, np.int64)
        real = np.zeros((rows, row_len), np.int64)
        room = np.full(rows, row_len)
        cu_seqlens: list[list[int]] = [[0] for _ in range(rows)]
        max_seqlen = [0] * rows
        skipped: list[NDArray[np.int64]] = []
        while True:
            if not waiting:
                limit = buffer_size - len(skipped)
                while buffer_size - len(waiting) > size and len(waiting) + size <= limit:
                    documents = next(reader, None)
                    if documents is None:
                        break
                    waiting.extend(np.asarray(document["input_ids"]) for document in documents)
                if not waiting:
                    break
            document = waiting.popleft()
            row = find_best_fit(room, len(document))
            if row < 0:
                skipped.append(document)
                continue
            start = row_len - int(room[row])
            end = start + len(document)
            ids[row, start:end] = document
            real[row, start:end] = 1
            room[row] -= len(document)
            cu_seqlens[row].append(end)
            max_seqlen[row] = max(max_seqlen[row], len(document))
        waiting.extendleft(skipped)
        if (room == row_len).any():
            return
        for row in np.flatnonzero(room).tolist():
            cu_seqlens[row].append(row_len)
            max_seqlen[row] = max(max_seqlen[row], int(room[row]))
        draw = rng.random(ids.shape)
        labels = np.where((draw < MASK_PROB) & (real == 1), ids, IGNORE)
        ids = np.where(draw < MASK_PROB * 0.8, MASK, ids)
        words = rng.integers(0, ids.max() + 1, ids.shape)
        ids = np.where((draw >= MASK_PROB * 0.8) & (draw < MASK_PROB * 0.9), words, ids)
        yield {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": real,
            "cu_seqlens": [np.array(row, np.int32) for row in cu_seqlens],
            "max_seqlen": max_seqlen,
        }


def floor(workload: Workload) -> Iterator[Any]:
    """Three arrays of the batch's shape, written once."""
    while True:
        ids, labels, real = (np.full((workload.rows, workload.row_len), number) for number in (5, IGNORE, 1))
        assert ids.shape == labels.shape
        yield real


def nanoseconds_per_token(masks: Iterator[Any]) -> float:
    """Nanoseconds per token of the next `BATCHES` batches."""
    started = time.perf_counter_ns()
    taken = list(itertools.islice(masks, BATCHES))
    spent = time.perf_counter_ns() - started
    return spent / sum(int(mask.sum()) for mask in taken)


def sources(workload: Workload) -> tuple[int, dict[str, list[SourceBatch]]]:
    """The number of documents of a source batch, and the same source batches in each form."""
    documents = workload.documents()
    size = len(documents) // SOURCE_BATCHES
    batches = [documents[at : at + size] for at in range(0, len(documents), size)]
    lengths = [np.array([len(document) for document in batch]) for batch in batches]
    numbers = [np.arange(size * i, size * i + len(batch)) for i, batch in enumerate(batches)]
    return size, {
        "flat": [
            FlatSourceBatch(np.concatenate(batch).astype(np.uint16), *more)
            for batch, *more in zip(batches, lengths, numbers, strict=True)
        ],
        "arrays": [
            [{"input_ids": ids, "document": number} for ids, number in zip(batch, of.tolist(), strict=True)]
            for batch, of in zip(batches, numbers, strict=True)
        ],
        "lists": [
            [{"input_ids": ids.tolist(), "document": number} for ids, number in zip(batch, of.tolist(), strict=True)]
            for batch, of in zip(batches, numbers, strict=True)
        ],
    }


def with_loss_masks(source: Endless) -> list[SourceBatch]:
    """Flat source batches with a loss mask: the second half of each document is to be learned."""
    masked: list[SourceBatch] = []
    for batch in source.batches:
        assert isinstance(batch, FlatSourceBatch)
        document = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        position = np.arange(len(batch.tokens)) - (np.cumsum(batch.lengths) - batch.lengths)[document]
        masked.append(batch._replace(loss_mask=(2 * position >= batch.lengths[document]).astype(np.uint8)))
    return masked


def packing_alone(strategy: type[SequencePacker], source: Endless, size: int, workload: Workload) -> Callable[[], Any]:
    """A function that packs `BATCHES` batches and gives the tokens in them and the rows."""
    packer = strategy(source, workload.shape(size), labels(suppress_masking=True))
    batches = iter(packer)

    def pack() -> tuple[int, int]:
        before = packer.token_account.emitted
        for _ in itertools.islice(batches, BATCHES):
            pass
        return packer.token_account.emitted - before, BATCHES * workload.rows

    return pack


def trl_alone(workload: Workload) -> Callable[[], Any] | None:
    """Make such a function that packs the documents of `BATCHES` batches by TRL; None if TRL is not installed."""
    try:
        datasets, trl = (importlib.import_module(name) for name in ("datasets", "trl"))
        pack_dataset = trl.pack_dataset
    except ImportError as error:
        print(f"TRL is left out: {error}")
        return None
    datasets.disable_caching()
    datasets.disable_progress_bars()
    documents = workload.documents()
    ends = np.cumsum([len(document) for document in documents])
    count = int(np.searchsorted(ends, BATCHES * workload.rows * workload.row_len, "right"))
    dataset = datasets.Dataset.from_dict({"input_ids": documents[:count]})

    def pack() -> tuple[int, int]:
        packed = pack_dataset(dataset, workload.row_len, "bfd", {"keep_in_memory": True, "load_from_cache_file": False})
        return int(ends[count - 1]), len(packed)

    return pack


def compare_packing_alone(source: Endless, size: int, workload: Workload) -> None:
    """Print a table."""
    contestants = {
        "ours, best fit": packing_alone(GreedyBestFitSequencePacker, source, size, workload),
        "ours, subset sum": packing_alone(SubsetSumSequencePacker, source, size, workload),
    }
    trl = trl_alone(workload)
    if trl is not None:
        contestants["TRL, best-fit decreasing"] = trl
    took: dict[str, list[float]] = {name: [] for name in contestants}
    efficiency: dict[str, float] = {}
    for pack in contestants.values():
        pack()
    for _ in range(ROUNDS):
        for name, pack in contestants.items():
            started = time.perf_counter_ns()
            tokens, rows = pack()
            took[name].append((time.perf_counter_ns() - started) / tokens)
            efficiency[name] = tokens / (rows * workload.row_len)
    print(f"{'  packing alone':28}ns/token     TRL x   efficiency")
    medians = {name: statistics.median(times) for name, times in took.items()}
    for name, nanoseconds in medians.items():
        against = medians.get("TRL, best-fit decreasing", float("nan")) / nanoseconds
        print(f"    {name:25}{nanoseconds:7.2f}{against:10.2f}{efficiency[name]:13.4f}")


def main() -> None:
    """Print tables."""
    best_fit, subset_sum = GreedyBestFitSequencePacker, SubsetSumSequencePacker
    for workload in WORKLOADS:
        size, forms = sources(workload)
        flat, arrays, lists = (Endless(forms[form]) for form in ("flat", "arrays", "lists"))
        masked, keyed = Endless(with_loss_masks(flat)), labels(keyed_masking=KEYED_MASKING)
        contestants = {
            "floor": floor(workload),
            "plain, arrays": plain(arrays, size, workload),
            "plain, lists": plain(lists, size, workload),
            "ours, flat": ours(best_fit, flat, size, workload, keyed),
            "ours, arrays": ours(best_fit, arrays, size, workload, keyed),
            "ours, lists": ours(best_fit, lists, size, workload, keyed),
            "ours, subset sum": ours(subset_sum, flat, size, workload, keyed),
            "ours, published masks": ours(best_fit, flat, size, workload, labels()),
            "ours, causal": ours(subset_sum, flat, size, workload, labels(objective="causal")),
            "ours, sft": ours(subset_sum, masked, size, workload, labels(objective="sft")),
        }
        efficiency = {
            name: np.mean([mask.mean() for mask in itertools.islice(masks, WARMUP_BATCHES)])
            for name, masks in contestants.items()
        }
        rounds = [[nanoseconds_per_token(masks) for masks in contestants.values()] for _ in range(ROUNDS)]
        took = dict(zip(contestants, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        print(f"{workload.name:24}ns/token  x floor  plain x   efficiency")
        for name, nanoseconds in took.items():
            against = took["plain, lists" if "lists" in name else "plain, arrays"]
            print(
                f"  {name:22}{nanoseconds:8.2f}{nanoseconds / took['floor']:9.2f}{against / nanoseconds:9.2f}", end=""
            )
            print(f"{efficiency[name]:13.4f}" if name != "floor" else "")
        compare_packing_alone(flat, size, workload)


if __name__ == "__main__":
    main()
