"""The same few texts in every form that a source can read, written by the libraries that users write them with."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from streaming import MDSWriter

from composer_packing.config.schema import TrainConfig, TrainLoaderConfig
from composer_packing.config.sources import (
    DataConfig,
    MdsConfig,
    PlainTextConfig,
    RecordsConfig,
    StreamConfig,
    StreamingConfig,
)
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, load_tokenizer, train_tokenizer
from composer_packing.model.config import ModernBertConfig
from composer_packing.packing.source_batch import FlatSourceBatch

TEXTS = [f"Document {number} has {'word ' * (number % 9)}and an end." for number in range(90)]
HELD_OUT = [f"Held out is {number}{' more' * (number % 4)}." for number in range(12)]
SPLITS = {"train": TEXTS, "val": HELD_OUT}
VOCAB_SIZE = 320


def write_all(folder: Path) -> None:
    """Every form, the splits beside each other."""
    tokenizer = write_tokenizer(folder / "tokenizer")
    for split, texts in SPLITS.items():
        (folder / "text" / split).mkdir(parents=True)
        for number, text in enumerate(texts):
            (folder / "text" / split / f"{number:03}.txt").write_text(text)
        records = "".join(json.dumps({"id": number, "content": text}) + "\n" for number, text in enumerate(texts))
        (folder / f"{split}.jsonl").write_text(records)
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(records.encode()))
        pq.write_table(pa.table({"text": texts, "n": range(len(texts))}), folder / f"{split}.parquet", row_group_size=7)
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved" / split)
        ids = [ids_of(tokenizer, text) for text in texts]
        write_mds(folder / "ours" / split, {"input_ids": "ndarray:uint16"}, [{"input_ids": one} for one in ids])
        foundry = [{"tokens": one.astype(np.int64).tobytes()} for one in ids]
        write_mds(folder / "foundry" / split, {"tokens": "bytes"}, foundry)
        modern = [{"id": f"a{n}", "input_ids": one.astype(np.int32), "len": len(one)} for n, one in enumerate(ids)]
        write_mds(folder / "modern" / split, {"id": "str", "input_ids": "ndarray", "len": "int"}, modern)
        write_mds(folder / "texts" / split, {"text": "str"}, [{"text": text} for text in texts])
        half = [{"input_ids": one} for one in ids]
        for name, part in (("first", half[::2]), ("second", half[1::2])):
            write_mds(folder / name / split, {"input_ids": "ndarray:uint16"}, part, compression="zstd")


def write_tokenizer(folder: Path) -> TextTokenizer:
    tokenizer = TextTokenizer(fast_tokenizer(train_tokenizer(TEXTS, VOCAB_SIZE)))
    tokenizer.save(folder)
    return tokenizer


def write_mds(folder: Path, columns: dict[str, str], samples: Sequence[dict[str, Any]], **more: Any) -> None:
    """Shards of a few samples each."""
    with MDSWriter(out=str(folder), columns=columns, **({"size_limit": 1200} | more)) as writer:
        for sample in samples:
            writer.write(sample)


def ids_of(tokenizer: TextTokenizer, text: str) -> Any:
    return tokenizer([text])[0]


def sources(folder: Path) -> dict[str, DataConfig]:
    """A configuration for each form."""
    files: dict[str, Any] = {"tokenizer": str(folder / "tokenizer")}
    cache: dict[str, Any] = {"cache_folder": str(folder / "cache")}

    def of(kind: str, names: str, **more: Any) -> DataConfig:
        form = PlainTextConfig if kind == "text" else RecordsConfig
        train, val = ([str(folder / names.format(split))] for split in SPLITS)
        source: Any = {kind: form(train=train, val=val, **files, **more)}
        return DataConfig(**cache, **source)

    def mds(name: str) -> DataConfig:
        return DataConfig(**cache, mds=MdsConfig(folder=str(folder / name), **files))

    def streams(**named: StreamConfig) -> DataConfig:
        return DataConfig(**cache, streaming=StreamingConfig(streams=dict(named), **files))

    return {
        "text": of("text", "text/{}"),
        "jsonl": of("jsonl", "{}.jsonl", text_field="content"),
        "jsonl.gz": of("jsonl", "{}.jsonl.gz", text_field="content"),
        "parquet": of("parquet", "{}.parquet"),
        "huggingface": of("huggingface", "saved/{}"),
        "mds": mds("ours"),
        "mds of llm-foundry": mds("foundry"),
        "mds of ModernBERT": mds("modern"),
        "mds of texts": mds("texts"),
        "local stream": streams(all=StreamConfig(local=str(folder / "foundry"))),
        "stream of texts": streams(all=StreamConfig(local=str(folder / "texts"))),
        "two streams": streams(
            one=StreamConfig(remote=str(folder / "first"), local=str(folder / "fetched" / "first")),
            two=StreamConfig(remote=str(folder / "second")),
        ),
    }


def run_over(data: DataConfig, num_workers: int | None = None, **changed: Any) -> TrainConfig:
    """A run over a source."""
    changed["train_loader"] = TrainLoaderConfig(num_workers=num_workers)
    model = ModernBertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    settings: dict[str, Any] = {"max_duration": "2000tok", "max_seq_len": 64, "global_train_batch_size": 8}
    return TrainConfig(**(settings | {"device_train_microbatch_size": 2, "model": model, "data": data} | changed))


def texts_by_ids(folder: Path) -> dict[tuple[int, ...], str]:
    """Every text, by its ids."""
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    return {tuple(ids_of(tokenizer, text).tolist()): text for texts in SPLITS.values() for text in texts}


def documents_in(batches: Iterable[FlatSourceBatch]) -> list[tuple[int, ...]]:
    """Ids of all documents of source batches, in order."""
    documents = (ids for batch in batches for ids in np.split(batch.tokens, np.cumsum(batch.lengths)[:-1]))
    return [tuple(ids.tolist()) for ids in documents]
