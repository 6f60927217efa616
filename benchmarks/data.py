"""Tokens per second that a process reads and packs, compared with a plain loop over a `StreamingDataset`.

Each contestant runs in a process of its own. The contestants take turns, and medians are printed. On a shared machine
only the ratios mean something. `make benchmark` runs this script.

From MDS shards of ids, whose lengths are lognormal:

- plain: a `DataLoader` over a `StreamingDataset`, shuffled, in batches of lists of arrays. It reads, and packs nothing.
- mds, read: source batches from the source `mds`.
- mds, packed: these source batches packed by subset sum with keyed masks, on one thread.
- streaming, read: source batches from the source `streaming`.

From MDS shards of texts, which are docstrings of installed packages and are tokenized as they are read:

- plain: the same loop. Each worker tokenizes text by text.
- mds of texts: source batches. Each worker tokenizes all texts of a source batch at once. Without workers, the
  tokenizer itself uses all cores.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from streaming import MDSWriter, StreamingDataset
from streaming.base.util import clean_stale_shared_memory
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from composer_packing import KeyedMasking, SubsetSumSequencePacker
from composer_packing.config.sources import StreamConfig, StreamingConfig
from composer_packing.data.docstrings.extract import documents, source_files
from composer_packing.data.document_loader import DocumentLoader
from composer_packing.data.mds.documents import MdsDocuments
from composer_packing.data.share_sampler import ShareSampler
from composer_packing.data.streams.documents import StreamedDocuments
from composer_packing.data.streams.index import open_streams
from composer_packing.data.streams.sampler import StreamSampler
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, train_tokenizer

SIZE, ROUNDS, VOCAB_SIZE, NUM_DOCUMENTS = 512, 3, 4096, 100_000
WARM_UP, MEASURED = {"ids": 3e6, "texts": 3e5}, {"ids": 15e6, "texts": 15e5}  # tokens; an epoch has 24 and 3 million


class PlainDataset(StreamingDataset):
    """What the plain loop reads: ids, or texts that are tokenized one by one."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__(local=str(folder), batch_size=SIZE, shuffle=True)
        self.tokenizer = tokenizer

    def __getitem__(self, index: Any) -> Any:
        sample = super().__getitem__(index)
        return sample["input_ids"] if "input_ids" in sample else np.array(self.tokenizer.encode(sample["text"]).ids)


def plain(folder: Path, tokenizer: Tokenizer, num_workers: int) -> Iterator[int]:
    loader: DataLoader[Any] = DataLoader(
        PlainDataset(folder, tokenizer), SIZE, num_workers=num_workers, collate_fn=list
    )
    for batch in loader:
        yield sum(map(len, batch))


def mds(folder: Path, tokenizer: TextTokenizer, num_workers: int) -> DocumentLoader:
    read = MdsDocuments(folder, tokenizer)
    sampler = ShareSampler(read, 1, 0, 17)
    return DocumentLoader(read, sampler, SIZE, num_workers, 2)


def mds_read(folder: Path, tokenizer: TextTokenizer, num_workers: int) -> Iterator[int]:
    for batch in mds(folder, tokenizer, num_workers):
        yield len(batch.tokens)


def mds_packed(folder: Path, tokenizer: TextTokenizer, num_workers: int) -> Iterator[int]:
    packer = SubsetSumSequencePacker.from_composer(
        mds(folder, tokenizer, num_workers),
        batch_size=SIZE,
        micro_batch_size=32,
        max_seq_len=1024,
        buffer_size=10 * SIZE,
        keyed_masking=KeyedMasking(17, VOCAB_SIZE, range(5)),
        over_long="split",
    )
    for batch in packer:
        yield sum(batch["num_tokens"])


def streaming_read(folder: Path, tokenizer: TextTokenizer, num_workers: int) -> Iterator[int]:
    settings = StreamingConfig(streams={"all": StreamConfig(local=str(folder.parent), train=folder.name)})
    read = StreamedDocuments(open_streams(settings, "train", folder, 17), settings, tokenizer)
    sampler = StreamSampler(read, 1, 0, 1, 17)
    for batch in DocumentLoader(read, sampler, SIZE, num_workers, 2):
        yield len(batch.tokens)


def per_second(contestant: Callable[[], Iterator[int]], warm_up: float, measured: float) -> float:
    """Tokens per second, without the start and the first tokens."""
    tokens, started, seen, before = contestant(), 0.0, 0, 0
    for count in tokens:
        seen += count
        if not started and seen >= warm_up:
            started, before = time.perf_counter(), seen
        elif seen >= warm_up + measured:
            break
    return (seen - before) / (time.perf_counter() - started)


def in_a_process(contestant: Callable[[], Iterator[int]], warm_up: float, measured: float) -> float:
    """Tokens per second in a process of its own, as a `StreamingDataset` leaves threads behind."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def measure() -> None:
        sender.send(per_second(contestant, warm_up, measured))
        for child in multiprocessing.active_children():
            child.terminate()
        clean_stale_shared_memory()  # a `StreamingDataset` leaves some
        os._exit(0)

    process = context.Process(target=measure)
    process.start()
    sender.close()  # so that `recv` raises an error if the process dies
    found: float = receiver.recv()
    process.join()
    return found


def write(folder: Path) -> tuple[Tokenizer, TextTokenizer]:
    """Write shards of ids and of texts. Returns the tokenizer in both forms."""
    texts = list(documents(path for _, path in source_files()))
    tokenizer = train_tokenizer(texts[:5000], VOCAB_SIZE)
    with MDSWriter(out=str(folder / "texts"), columns={"text": "str"}) as writer:
        for text in texts:
            writer.write({"text": text})
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.0, 1.0, NUM_DOCUMENTS), 8, 8192).astype(np.int64)
    with MDSWriter(out=str(folder / "ids"), columns={"input_ids": "ndarray:uint16"}) as writer:
        for length in lengths:
            writer.write({"input_ids": rng.integers(5, VOCAB_SIZE, length, np.uint16)})
    return tokenizer, TextTokenizer(fast_tokenizer(tokenizer))


def main() -> None:
    """Print two tables."""
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # shared memory is cleaned up above
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        backend, tokenizer = write(folder)
        contestants: dict[str, dict[str, Callable[[], Iterator[int]]]] = {"ids": {}, "texts": {}}
        for workers in (0, 1, 2):
            of_ids, of_texts = (folder / kind for kind in contestants)
            contestants["ids"][f"plain, {workers} workers"] = partial(plain, of_ids, backend, workers)
            contestants["ids"][f"mds, read, {workers} workers"] = partial(mds_read, of_ids, tokenizer, workers)
            contestants["ids"][f"mds, packed, {workers} workers"] = partial(mds_packed, of_ids, tokenizer, workers)
            contestants["ids"][f"streaming, read, {workers} workers"] = partial(
                streaming_read, of_ids, tokenizer, workers
            )
            contestants["texts"][f"plain, {workers} workers"] = partial(plain, of_texts, backend, workers)
            contestants["texts"][f"mds of texts, {workers} workers"] = partial(mds_read, of_texts, tokenizer, workers)
        for kind, named in contestants.items():
            took: dict[str, list[float]] = {name: [] for name in named}
            for _ in range(ROUNDS):
                for name, contestant in named.items():
                    took[name].append(in_a_process(contestant, WARM_UP[kind], MEASURED[kind]))
            print(f"{'shards of ' + kind:32}  tokens/s   times plain without workers")
            base = statistics.median(took["plain, 0 workers"])
            for name, times in took.items():
                print(f"{name:32}{statistics.median(times):12,.0f}{statistics.median(times) / base:10.1f}")


if __name__ == "__main__":
    main()
