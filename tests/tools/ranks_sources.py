"""Run by `composer -n N`: what each rank reads of every source, trains on and evaluates. Prints a JSON line."""

import json
import sys
from pathlib import Path
from typing import Any

from composer.utils import dist

from composer_packing.common.processes import run_and_exit
from composer_packing.config.sources import DataConfig, StreamConfig, StreamingConfig
from composer_packing.data.open_source import open_source
from composer_packing.training.batches import document_loader, train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.evaluation import eval_batches
from tests.tools.reference import RESULT, originals
from tests.tools.runs import trainer_of
from tests.tools.written_sources import documents_in, run_over, sources, texts_by_ids

EPOCHS = 3


def fed(data_config: DataConfig, by_ids: dict[tuple[int, ...], str], num_workers: int) -> dict[str, Any]:
    config = run_over(data_config, num_workers, max_duration="200sp")
    data = open_source(config)
    loader, read = document_loader(data.train.documents, config), []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        read.append([by_ids[ids] for ids in documents_in(loader)])
    batches = train_batches(data.train.documents, config, data.tokenizer.vocabulary)
    trainer = trainer_of(config, batches, PackedLanguageModel(config.model))
    trainer.fit()
    batches.close()
    trainer.engine.close()
    trained = {"epochs": trainer.state.timestamp.epoch.value, "documents": trainer.state.timestamp.sample.value}
    held_out = originals(eval_batches(data.val.documents, config, data.tokenizer.vocabulary))
    return {"read": read, "trained": trained, "held out": [by_ids[tuple(ids)] for ids in held_out]}


def main(arguments: list[str]) -> int:
    dist.initialize_dist("cpu")
    folder, remote = Path(arguments[0]), arguments[1]
    cache_folder = str(folder / "cache")
    streams = {name: StreamConfig(remote=f"{remote}/{name}") for name in ("first", "second")}
    settings = StreamingConfig(streams=streams, tokenizer=str(folder / "tokenizer"))
    all_sources = sources(folder) | {"s3": DataConfig(cache_folder, streaming=settings)}
    by_ids = texts_by_ids(folder)
    found = {
        name: dist.all_gather_object(fed(source, by_ids, num_workers=2 if name == "s3" else number % 3))
        for number, (name, source) in enumerate(all_sources.items())
    }
    if dist.get_global_rank() == 0:
        print(RESULT + json.dumps(found))
    return 0


run_and_exit(main, sys.argv[1:])
