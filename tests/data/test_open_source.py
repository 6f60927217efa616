import dataclasses
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import EvalLoaderConfig
from composer_packing.config.sources import DataConfig, MdsConfig, RecordsConfig, StreamConfig, StreamingConfig
from composer_packing.data.open_source import open_source
from composer_packing.data.tokenizer import train_tokenizer
from composer_packing.training.batches import document_loader, train_batches
from composer_packing.training.evaluation import eval_batches
from tests.tools.reference import originals
from tests.tools.running import COMPOSER, result_of
from tests.tools.written_sources import (
    HELD_OUT,
    TEXTS,
    VOCAB_SIZE,
    documents_in,
    run_over,
    sources,
    texts_by_ids,
    write_all,
    write_mds,
)

EPOCHS = 3
NAMES = list(sources(Path()))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_all(folder)
    return folder


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_every_document_comes_once_an_epoch_in_another_order_each_time(
    written: Path, name: str, num_workers: int
) -> None:
    config, by_ids = run_over(sources(written)[name], num_workers), texts_by_ids(written)
    data = open_source(config)
    loader, epochs, numbers = document_loader(data.train.documents, config), [], []
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        read = list(loader)
        assert all(len(batch.lengths) <= 8 for batch in read)
        epochs.append([by_ids[ids] for ids in documents_in(read)])
        numbers.append(np.concatenate([batch.numbers for batch in read if batch.numbers is not None]).tolist())
    assert all(sorted(epoch) == sorted(TEXTS) for epoch in epochs)
    assert epochs[0] not in (TEXTS, epochs[1], epochs[2])
    names = {pair for epoch in zip(numbers, epochs, strict=True) for pair in zip(*epoch, strict=True)}
    assert len(names) == 90, "a document has the same number in every epoch"
    assert data.train.per_epoch == 90
    num_tokens = sum(len(ids) for ids, text in by_ids.items() if text in TEXTS)
    # Of a stream only the first shard is read to tell.
    assert data.train.num_tokens == pytest.approx(num_tokens, rel=0.1 if "stream" in name else 0)


@pytest.mark.parametrize("name", NAMES)
def test_packed_batches_hold_the_documents_of_their_split(written: Path, name: str) -> None:
    config, by_ids = run_over(sources(written)[name]), texts_by_ids(written)
    data = open_source(config)
    batches = train_batches(data.train.documents, config, data.tokenizer.vocabulary)
    packed = [by_ids[tuple(ids)] for _ in range(EPOCHS) for ids in originals(list(batches))]
    batches.close()
    assert set(packed) == set(TEXTS)
    assert max(Counter(packed).values()) <= EPOCHS
    assert len(packed) > (EPOCHS - 0.5) * len(TEXTS), "the rest is carried"
    held_out = originals(eval_batches(data.val.documents, config, data.tokenizer.vocabulary))
    assert sorted(by_ids[tuple(ids)] for ids in held_out) == sorted(HELD_OUT)


@pytest.fixture
def streams_in_store(written: Path, object_store: Any) -> str:
    """Address of the two compressed streams."""
    object_store.create_bucket(Bucket="texts")
    for path in [*(written / "first").rglob("*.*"), *(written / "second").rglob("*.*")]:
        object_store.upload_file(str(path), "texts", f"data/{path.relative_to(written)}")
    return "s3://texts/data"


@pytest.mark.slow
def test_two_ranks_train_on_every_source_and_read_each_document_once_an_epoch(
    written: Path, streams_in_store: str
) -> None:
    found = result_of(COMPOSER, "-n", "2", "-m", "tests.tools.ranks_sources", str(written), streams_in_store)
    assert set(found) == {*NAMES, "s3"}
    for name, (one, two) in found.items():
        for epoch, (first, second) in enumerate(zip(one["read"], two["read"], strict=True)):
            assert sorted(first + second) == sorted(TEXTS), f"{name}, epoch {epoch}"
            assert len(first) == len(second) == 45
        assert one["trained"] == two["trained"]
        assert one["trained"]["documents"] >= 200
        assert one["trained"]["epochs"] in (2, 3)
        assert sorted(one["held out"] + two["held out"]) == sorted(HELD_OUT), name


def changed_copies(written: Path) -> None:
    """Shards that are not what their index says, and what `prepare` leaves beside them."""
    for name in ("cut", "gone", "prepared"):
        shutil.copytree(written / "ours", written / name)
    shards = [sorted((written / name / "train").glob("*.mds"))[0] for name in ("cut", "gone")]
    shards[0].write_bytes(shards[0].read_bytes()[:-5])
    shards[1].unlink()
    for split in ("train", "val"):
        write_mds(written / "floats" / split, {"input_ids": "ndarray"}, [{"input_ids": np.ones(3, np.float32)}] * 3)
    shutil.copytree(written / "saved", written / "both")
    (written / "both" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "val"]}))
    shutil.copytree(written / "tokenizer", written / "prepared" / "tokenizer")
    stats: dict[str, Any] = {"tokenizer": {"fingerprint": "abc"}}
    (written / "prepared" / "stats.json").write_text(json.dumps(stats))
    for name, train in (("fewer", {"documents": 90, "tokens": 5}), ("odd", 5)):
        shutil.copytree(written / "prepared", written / name)
        stats = {"train": train, "val": {"documents": 11, "tokens": 5}, "tokenizer": None}
        (written / name / "stats.json").write_text(json.dumps(stats))
    shutil.copytree(written / "ours", written / "twice")
    index = json.loads((written / "twice" / "train" / "index.json").read_text())
    index["shards"].append(index["shards"][0])
    (written / "twice" / "train" / "index.json").write_text(json.dumps(index))
    (written / "file").touch()


def of_mds(folder: str, tokenizer: str | None = "tokenizer", **more: Any) -> dict[str, Any]:
    return {"mds": MdsConfig(folder=folder, tokenizer=tokenizer, **more)}


def of_streams(
    tokenizer: str | None = "tokenizer", column: str | None = None, cache_limit: str | None = None, **streams: Any
) -> dict[str, Any]:
    of_each = {name: StreamConfig(**stream) for name, stream in streams.items()}
    return {"streaming": StreamingConfig(of_each, column=column, tokenizer=tokenizer, cache_limit=cache_limit)}


def of_records(kind: str, *train: str, **more: Any) -> dict[str, Any]:
    return {kind: RecordsConfig(train=list(train), tokenizer="tokenizer", **more)}


WRONG = {
    "data.mds.folder=nope: there is no such folder; give one that holds the splits": of_mds("nope"),
    "ours/test: there is no such folder": of_mds("ours", val="test"),
    "data.mds.tokenizer: must be given, as there is none next to the data, in ours/tokenizer": of_mds("ours", None),
    "tokenizer=/nowhere: there is no such folder; give a folder that save_pretrained wrote": of_mds("ours", "/nowhere"),
    "tokenizer=train.jsonl: there is no such folder": of_mds("ours", "train.jsonl"),
    "tokenizer=ours: cannot be read": of_mds("ours", "ours"),
    "ours/train: has no column ids; give one of input_ids": of_mds("ours", column="ids"),
    "bytes_dtype=int32: the ids are those of the tokenizer as uint64 too; give that, or int64": of_mds(
        "foundry", bytes_dtype="int32"
    ),
    "bytes_dtype=uint16: the ids are those of the tokenizer as uint32 too": of_mds("foundry", bytes_dtype="uint16"),
    "bytes_dtype=uint8: the ids are those of the tokenizer as uint": of_mds("foundry", bytes_dtype="uint8"),
    "cut/train/shard.00000.mds: differs from what index.json says": of_mds("cut"),
    "gone/train/shard.00000.mds: is missing, though index.json lists it": of_mds("gone"),
    "must be unpacked from shard.00000.mds.zstd; or use the source `streaming`, which": of_mds("first"),
    "data.mds.tokenizer: prepared was made with another tokenizer, of fingerprint abc, not": of_mds("prepared"),
    "prepared was made with another tokenizer, of fingerprint abc": of_mds("prepared", None),
    "data.streaming.streams.a: Unsupported remote path: ftp://x/y": of_streams(a={"remote": "ftp://x/y"}),
    "a: nope/train: its index cannot be read (FileNotFoundError": of_streams(a={"remote": "nope"}),
    "a: nope/train: holds no index.json; give the folder of": of_streams(a={"local": "nope"}),
    "streams: no stream has a val split; give at least one": of_streams(a={"local": "ours", "val": None}),
    "incompatible with each other (error in stream 1)": of_streams(
        a={"local": "ours", "proportion": 1.0}, b={"local": "foundry"}
    ),
    "At most one of `proportion`, `repeat`, and `choose`": of_streams(
        a={"local": "ours", "proportion": 1.0, "repeat": 2.0}
    ),
    "/ours/train is a folder of stream a too; leave": of_streams(a={"local": "ours"}, b={"local": "./ours"}),
    "/first/train is a folder of stream a too": of_streams(
        a={"remote": "first", "local": "x"}, b={"remote": "first/", "local": "y"}
    ),
    "/z/train is a folder of stream a too": of_streams(
        a={"remote": "first", "local": "z"}, b={"remote": "second", "local": "z"}
    ),
    "fewer/val: lists 12 documents, but stats.json next to it says 11; prepare the data again": of_mds("fewer", None),
    "odd/stats.json: has no counts of train (TypeError": of_mds("odd", None),
    "twice/train/index.json: cannot be used (ValueError: a shard is listed twice)": of_mds("twice"),
    "file/train: cannot be used (Not a directory); give another": of_streams(a={"remote": "first", "local": "file"}),
    "has no column x of ids or text, but {'input_ids'": of_streams(column="x", a={"local": "ours"}),
    "its index says 1,189; delete the file, or the index.json next to it": of_streams(a={"local": "cut"}),
    "gone/train/shard.00000.mds: is missing, though": of_streams(a={"local": "gone"}),
    "data.streaming.tokenizer: prepared was made with another": of_streams(None, a={"local": "prepared"}),
    "data.streaming.tokenizer: prepared was made": of_streams(None, a={"remote": "prepared"}),
    "tokenizer: prepared was made with another": of_streams(a={"local": "ours"}, b={"local": "prepared"}),
    "data.streaming.tokenizer: must be given, as there is none next to the data, in cache/stream-": of_streams(
        None, a={"remote": "ours"}
    ),
    "data.streaming.cache_limit=big: must be a size": of_streams(a={"local": "ours"}, cache_limit="big"),
    "input_ids has dtype float32; it must hold integers": of_streams(a={"local": "floats"}),
    "no.jsonl: does not exist; give files (.jsonl": of_records("jsonl", "no.jsonl"),
    "train.jsonl:1: missing field (there is no 'text' among 'id', 'content')": of_records("jsonl", "train.jsonl"),
    "train.jsonl: is given for training and for evaluation": of_records(
        "jsonl", "train.jsonl", val=["train.jsonl"], text_field="content"
    ),
    "train.jsonl: is of another kind; give files (.parquet)": of_records("parquet", "train.jsonl"),
    "val: there is no document; raise val_share": of_records(
        "jsonl", "train.jsonl", text_field="content", val_share=1e-6
    ),
    "both: holds several splits": of_records("huggingface", "both"),
}


@pytest.fixture(scope="module")
def damaged(written: Path) -> Path:
    changed_copies(written)
    return written


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_said_in_one_line_before_the_first_batch(
    damaged: Path, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(damaged)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        open_source(run_over(DataConfig(cache_folder="cache", **WRONG[words])))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_larger_than_the_model_is_an_error(written: Path) -> None:
    config = run_over(sources(written)["mds"])
    with pytest.raises(ConfigError, match=r"model.vocab_size=100: must be at least 320, the entries of the tokenizer"):
        open_source(dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=100)))


@pytest.mark.parametrize("kind", ["mds", "streaming"])
def test_ids_beyond_the_tokenizer_are_an_error(written: Path, tmp_path: Path, kind: str) -> None:
    for split, last in (("train", 320), ("val", 5)):
        write_mds(tmp_path / split, {"input_ids": "ndarray:int64"}, [{"input_ids": np.array([3, last])}] * 9)
    tokenizer = f"{written}/tokenizer"
    sources_of = {
        "mds": of_mds(str(tmp_path), tokenizer),
        "streaming": of_streams(tokenizer, a={"local": str(tmp_path)}),
    }
    with pytest.raises(ConfigError, match="between 0 and 319; got 320, as the tokenizer has 320 entries"):
        open_source(run_over(DataConfig(str(tmp_path / "cache"), **sources_of[kind])))


def test_an_objective_that_masks_needs_a_mask_token(written: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=train_tokenizer(TEXTS, VOCAB_SIZE), pad_token="[PAD]")
    tokenizer.save_pretrained(tmp_path)
    data = DataConfig(**of_mds(f"{written}/ours", str(tmp_path)))
    with pytest.raises(ConfigError, match="objective=mlm: the tokenizer has no mask token; give one that has"):
        open_source(run_over(data))
    assert open_source(run_over(data, objective="causal")).train.per_epoch == 90


def test_documents_longer_than_max_seq_len_come_in_pieces_and_no_token_is_lost(written: Path) -> None:
    by_ids = texts_by_ids(written)
    for name in ("jsonl", "mds", "two streams"):
        config = run_over(sources(written)[name], max_seq_len=8, objective="causal")
        data = open_source(config)
        batches = eval_batches(data.val.documents, config, data.tokenizer.vocabulary)
        lengths = [np.diff(ends) for batch in batches for ends in batch["cu_seqlens"]]
        assert max(map(max, lengths)) <= 16
        pieces = sum(batch["num_documents"][row] for batch in batches for row in range(len(batch["input_ids"])))
        assert pieces == sum(-(-len(ids) // 8) for ids, text in by_ids.items() if text in HELD_OUT)
        tokens = sum(sum(batch["num_tokens"]) for batch in batches)
        assert tokens == sum(len(ids) for ids, text in by_ids.items() if text in HELD_OUT)


EXAMPLES = [
    ([5, 6, 7, 8], [0, 0, 1, 1]),
    ([9, 10], [1, 1]),
    ([11] * 20 + [12], [0] * 20 + [1]),
    ([13, 14] * 9, [1, 0] * 9),
]
"""Ids and loss masks. With 16 tokens nothing is left to learn in the third; the fourth is longer too."""


def write_examples(folder: Path, split: str, examples: list[tuple[list[int], list[int]]], dtype: str = "uint8") -> None:
    columns = {"input_ids": "ndarray:uint16", "loss_mask": f"ndarray:{dtype}"}
    samples = [{"input_ids": np.array(ids, np.uint16), "loss_mask": np.array(mask, dtype)} for ids, mask in examples]
    write_mds(folder / split, columns, samples)


def targets_of(examples: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """What is to be learned of each example that comes into batches of 16 tokens."""
    cut = [list(zip(ids[1:16], mask[1:16], strict=True)) for ids, mask in examples]
    return sorted(targets for one in cut if (targets := [token for token, is_target in one if is_target]))


def targets_in(batches: Any) -> list[list[int]]:
    found = []
    for batch in batches:
        for labels, ends in zip(batch["labels"], batch["cu_seqlens"], strict=True):
            segments = (labels[start:end] for start, end in itertools.pairwise(ends))
            found += [targets for one in segments if (targets := one[one != -100].tolist())]
    return sorted(found)


@pytest.mark.parametrize("dtype", ["uint8", "int64"])
def test_examples_in_shards_are_fine_tuned_on_where_their_loss_mask_says(
    written: Path, tmp_path: Path, dtype: str
) -> None:
    write_examples(tmp_path, "train", EXAMPLES * 20, dtype)
    write_examples(tmp_path, "val", EXAMPLES, dtype)
    data = DataConfig(**of_mds(str(tmp_path), f"{written}/tokenizer"))
    config = run_over(data, objective="sft", max_seq_len=16)
    opened = open_source(config)
    assert opened.train.summary == "80 examples, about 900 tokens; those longer than 16 cut"
    vocabulary = opened.tokenizer.vocabulary
    assert targets_in(eval_batches(opened.val.documents, config, vocabulary)) == targets_of(EXAMPLES)
    batches = train_batches(opened.train.documents, config, vocabulary)
    found = targets_in([*batches, *batches])
    batches.close()
    assert {tuple(one) for one in found} == {tuple(one) for one in targets_of(EXAMPLES)}
    assert len(found) > 1.5 * 3 * 20


def test_the_loss_masks_of_shards_are_ignored_by_other_objectives_and_the_run_says_so(
    written: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        write_examples(tmp_path, split, EXAMPLES)
    data = DataConfig(**of_mds(str(tmp_path), f"{written}/tokenizer"))
    config = run_over(data, objective="causal")
    opened = open_source(config)
    assert opened.train.summary.endswith("come in pieces; objective=causal ignores their loss masks")
    held_out = originals(eval_batches(opened.val.documents, config, opened.tokenizer.vocabulary))
    assert sorted(map(len, held_out)) == sorted(len(ids) for ids, _ in EXAMPLES)
    fingerprint = opened.train.documents.fingerprint
    assert open_source(run_over(data, objective="sft")).train.documents.fingerprint == fingerprint


def test_what_is_wrong_with_loss_masks_is_one_line(written: Path, tmp_path: Path) -> None:
    tokenizer = f"{written}/tokenizer"

    def error_of(folder: Path) -> str:
        config = run_over(DataConfig(**of_mds(str(folder), tokenizer)), objective="sft")
        with pytest.raises(ConfigError) as caught:
            eval_batches((data := open_source(config)).val.documents, config, data.tokenizer.vocabulary)
        assert "\n" not in str(caught.value)
        return str(caught.value).replace(str(folder), "")

    cure = "prepare examples by python -m composer_packing.prepare --examples"
    needs = "and objective=sft needs ids with loss masks"
    assert error_of(written / "ours") == f"/train: there is no column loss_mask, {needs}; {cure}"
    assert error_of(written / "texts") == f"/train: text holds texts, {needs}; {cure}"
    for name, example, error in (
        (
            "short",
            ([5, 6, 7], [0, 1]),
            "/train: loss_mask of sample 0 has 2 values for 3 tokens; write the shards again",
        ),
        ("two", ([5, 6, 7], [0, 1, 2]), "/train: loss_mask holds other values than 0 and 1; write the shards again"),
        ("none", ([5, 6, 7], [1, 0, 0]), "held-out documents: epoch 0: every document was dropped: 0 are longer"),
    ):
        for split in ("train", "val"):
            write_examples(tmp_path / name, split, [example] * 3)
        assert error_of(tmp_path / name).startswith(error)


def test_evaluation_takes_so_many_documents_evenly(written: Path) -> None:
    config = run_over(sources(written)["mds"], eval_loader=EvalLoaderConfig(max_documents=4))
    data = open_source(config)
    by_ids = texts_by_ids(written)
    held_out = originals(eval_batches(data.val.documents, config, data.tokenizer.vocabulary))
    assert sorted(by_ids[tuple(ids)] for ids in held_out) == sorted(HELD_OUT[::3])


def test_a_text_that_is_not_utf_8_is_an_error_of_one_line_that_names_it(written: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_mds(tmp_path / split, {"text": "str"}, [{"text": "abcdef"}] * 9)
    path = tmp_path / "train" / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-3] + b"\xff\xff\xff")
    with pytest.raises(ConfigError, match=r"/train: the text of sample 8 is not UTF-8 \(invalid start byte\); w"):
        open_source(run_over(DataConfig(**of_mds(str(tmp_path), f"{written}/tokenizer"))))
