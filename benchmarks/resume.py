"""Seconds until a resumed run has its next batch, by the number of batches before it: from a state, and by a replay.

The batches are those of `yamls/pretrain.yaml` on one rank, made by `train_batches` as for `train.py`: 16 rows of 512
slots, packed on a thread. The documents lie in MDS shards of ids, and in MDS shards of texts (docstrings of installed
packages), which are tokenized as they are read. Both are read for many epochs. The two ways to resume take turns, and
medians are printed:

- state: the loader and the packer are made, load the state, and give the next batch.
- replay: they are made, and give all batches before the next one too, as in a trainer that saves no state.

The script checks that both give the same next batch. The size of the state is the size of its file. A checkpoint waits
for `state_dict`. `make benchmark` runs this script.
"""

import dataclasses
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import write

from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep
from composer_packing.config.loading import load_config
from composer_packing.config.schema import TrainConfig
from composer_packing.data.mds.documents import MdsDocuments
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.training.batches import train_batches

ROUNDS = 3
BEFORE = {"ids": (10, 100, 1_000, 10_000), "texts": (10, 100, 1_000, 10_000)}
"""Batches that a run took before it stopped."""

ONCE = 5.0
"""Seconds. What takes longer is measured only once."""


def batch_after(batches: Lockstep, count: int) -> Batch:
    """The batch after `count` others, over all epochs."""
    while True:
        for batch in batches:
            if count == 0:
                return batch
            count -= 1


def timed(make: Callable[[], Lockstep], state: Any, count: int) -> tuple[float, Batch]:
    started = time.perf_counter()
    batches = make()
    if state is not None:
        batches.load_state_dict(state)
    batch = batch_after(batches, count)
    took = time.perf_counter() - started
    batches.close()
    return took, batch


def median_of(make: Callable[[], Lockstep], state: Any, count: int) -> tuple[float, Batch]:
    took, batch = timed(make, state, count)
    times = [took]
    while took < ONCE and len(times) < ROUNDS:
        took, batch = timed(make, state, count)
        times.append(took)
    return statistics.median(times), batch


def rows(kind: str, config: TrainConfig, folder: Path, tokenizer: TextTokenizer) -> None:
    documents = MdsDocuments(folder, tokenizer)

    def make() -> Lockstep:
        return train_batches(documents, config, tokenizer.vocabulary)

    state, had = None, 0
    for before in BEFORE[kind]:
        batches = make()
        if state is not None:
            batches.load_state_dict(state)
        batch_after(batches, before - had - 1)
        started = time.perf_counter()
        state, had = batches.state_dict(), before
        saving = time.perf_counter() - started
        batches.close()
        file = io.BytesIO()
        torch.save(state, file)
        by_state, batch = median_of(make, state, 0)
        by_replay, same = median_of(make, None, before)
        assert torch.equal(batch["input_ids"], same["input_ids"])
        print(
            f"{kind:6}{before:8,}{by_state:12.3f}{by_replay:12.3f}{by_replay / by_state:10.1f}"
            f"{len(file.getvalue()) / 1e3:12.0f}{1e3 * saving:12.2f}",
            flush=True,
        )


def main() -> None:
    """Print a table."""
    pretrain = Path(__file__).parent.parent / "yamls" / "pretrain.yaml"
    config = load_config(str(pretrain), ["train_loader.num_workers=0"], 1)
    with tempfile.TemporaryDirectory() as folder:
        _, tokenizer = write(Path(folder))
        config = dataclasses.replace(config, max_duration="1000000ba")
        print("source  before     state s    replay s    ratio    state kB  state_dict ms")
        for kind in BEFORE:
            rows(kind, config, Path(folder) / kind, tokenizer)


if __name__ == "__main__":
    main()
