"""Run by itself: what ranks are fed that go on where others stopped. Prints a JSON line."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from composer import Callback, Logger, State
from composer.utils import dist

from composer_packing.batch.lockstep import Lockstep
from composer_packing.checkpointing.packed_dataset import DataState, PackedDataset
from composer_packing.checkpointing.resumption import Resumption
from composer_packing.config.schema import TrainConfig, TrainLoaderConfig
from composer_packing.data.tokenizer import Vocabulary
from composer_packing.model.config import ModernBertConfig
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from tests.tools.array_documents import DocumentDataset
from tests.tools.forked import on_ranks
from tests.tools.reference import RESULT, originals
from tests.tools.resumed import assert_same, taken
from tests.tools.runs import config_of, trainer_of

COUNT = 700
VOCABULARY = Vocabulary(1024, 0, 4, range(5))
STOPS = (5, 12)
"""Batches behind which checkpoints are written."""

EPOCHS = 3


def documents() -> DocumentDataset:
    """Each says in its tokens which it is. Their lengths are such that ranks drift apart."""
    lengths = np.random.default_rng(5).integers(1, 15, COUNT)
    tokens = np.repeat(np.arange(5, 5 + COUNT), lengths).astype(np.uint16)
    return DocumentDataset(tokens, np.cumsum([0, *lengths]), 16)


def config(num_workers: int = 0) -> TrainConfig:
    model = ModernBertConfig(
        vocab_size=1024, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    loader = TrainLoaderConfig(
        num_workers=num_workers,
        packing_prefetch_factor=3,
        batch_size_warmup_min_size=16,
        batch_size_warmup_tokens="3000tok",
        masking_ratio_cooldown_start_tokens="1000tok",
        masking_ratio_cooldown_tokens="6000tok",
        final_masking_ratio=0.1,
    )
    return config_of(
        max_duration="9000tok",
        model=model,
        global_train_batch_size=32,
        device_train_microbatch_size=2,
        train_loader=loader,
    )


def batches_of(num_workers: int = 0) -> Lockstep:
    return train_batches(documents(), config(num_workers), VOCABULARY)


def restored_at_every_step() -> int:
    """On each rank the rest is what it would have been, from every batch, by the state of all ranks."""
    dist.initialize_dist("cpu")
    undisturbed, states = [], []
    batches = batches_of()
    for _ in range(EPOCHS):
        for batch in batches:
            undisturbed.append(batch)
            state: DataState = {"settings": {"version": 1}, "ranks": dist.all_gather_object(batches.state_dict())}
            states.append(state)
            assert batches.state_dicts() == [] or dist.get_global_rank() == 0
    batches.close()
    for number, state in enumerate(states):
        again = batches_of(num_workers=number % 2)
        PackedDataset(again).load_state_dict(state)
        rest, _ = taken(again, range(state["ranks"][0]["epoch"], EPOCHS))
        assert_same([batch for _, batch in rest], undisturbed[number + 1 :])
    return len(states)


class Fed(Callback):
    """The documents that this rank is fed, by batch, and the clock and the schedules there."""

    def __init__(self) -> None:
        self.documents: list[list[int]] = []
        self.values: list[list[float]] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        batch = state.batch
        self.documents.append([document[0] - 5 for document in originals([batch])])
        clock = state.timestamp
        self.values.append([clock.token.value, clock.sample.value, len(batch["input_ids"]), float(batch["mask_prob"])])


def trained(folder: str, load_path: str | None, max_duration: str) -> dict[str, Any]:
    """A run, from a checkpoint if one is given: what this rank was fed, and what waits at the end."""
    dist.initialize_dist("cpu")
    batches = batches_of()
    data, fed = PackedDataset(batches), Fed()
    trainer = trainer_of(
        config(),
        data,
        PackedLanguageModel(config().model),
        callbacks=[fed, Resumption(data)],
        max_duration=max_duration,
        save_folder=folder,
        save_interval=lambda state, event: state.timestamp.batch.value in STOPS,
        save_overwrite=True,
        load_path=load_path,
    )
    trainer.fit()
    state = batches.state_dict()["stream"]["source"]
    batches.close()
    trainer.engine.close()
    left = {"waiting": (state["waiting"]["documents"]["number"]).tolist(), "epoch": state["source"]["epoch"]}
    numbers = {}
    sampler = batches._buffered.iterable.source.src_iterable.sampler  # type: ignore[attr-defined]
    for epoch in range(left["epoch"], EPOCHS + 2):
        sampler.set_epoch(epoch)
        read = state["source"]["read"] if epoch == left["epoch"] else 0
        numbers[epoch] = sampler.numbers()[read:].tolist()
    return {"documents": fed.documents, "values": fed.values, "unread": numbers, **left}


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": on_ranks(2, restored_at_every_step, folder)}
    found["whole"] = on_ranks(2, trained, folder, str(folder / "two"), None, "20ba")
    for world_size in (1, 2, 4):
        for stop in STOPS:
            (path,) = (folder / "two").glob(f"ep*-ba{stop}-rank0.pt")
            name = f"{world_size} from {stop}"
            found[name] = on_ranks(world_size, trained, folder, str(folder / f"w{world_size}"), str(path), "20ba")
    (path,) = (folder / "w4").glob(f"ep*-ba{STOPS[1]}-rank0.pt")
    found["2 from 4"] = on_ranks(2, trained, folder, str(folder / "again"), str(path), "20ba")
    return found


if __name__ == "__main__":
    print(RESULT + json.dumps(main(Path(sys.argv[1]))))
