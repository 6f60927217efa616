import errno
import gzip
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import MDSWriter, StreamingDataset
from streaming.base.format import reader_from_json
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from composer_packing.common.errors import ConfigError
from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.chat_examples import ExampleTokenizer
from composer_packing.data.prepare import command as prepare
from composer_packing.data.prepare import tokenize_records
from composer_packing.data.prepare.files import check_apart
from composer_packing.data.prepare.ordered_pool import UNDER_WAY, map_in_order
from composer_packing.data.prepare.pipeline import write_shards
from composer_packing.data.prepare.record_text import held_out
from composer_packing.data.prepare.records import Raw
from composer_packing.data.prepare.shard_writer import encode_array, encode_sample
from composer_packing.data.prepare.tokenize_records import RecordGroup, RecordTokenizer
from composer_packing.data.prepare.tokenizer_sample import sample_texts
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, load_tokenizer, train_tokenizer


@pytest.fixture(autouse=True)
def nothing_of_the_command_stays() -> Iterator[None]:
    """It sets the level of the log and a handler, as it is a process of its own."""
    logger, handler = logging.getLogger("composer_packing"), signal.getsignal(signal.SIGTERM)
    yield
    logger.setLevel(logging.NOTSET)
    signal.signal(signal.SIGTERM, handler)


ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "runs", "through", "forests"]
DOCUMENTS = [" ".join(itertools.islice(itertools.cycle(WORDS[n % 7 :]), 3 + n % 40)) + f" {n}." for n in range(1500)]


def word_tokenizer(size: int = 20, special: bool = True, normalizer: Any = None) -> TextTokenizer:
    """A token for each of the words w0, w1, ..., with [CLS] before and [SEP] behind."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + [f"w{number}" for number in range(size)]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizer
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))


def words(*counts: int) -> list[str]:
    """Texts of so many words, each another one."""
    return [" ".join(f"w{(number + at) % 20}" for at in range(count)) for number, count in enumerate(counts)]


def jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def samples(folder: Path) -> list[dict[str, Any]]:
    """All samples of a split, read by the library that the format is of."""
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [reader_from_json(str(folder.parent), folder.name, shard) for shard in shards]
    return [reader[number] for reader in readers for number in range(reader.size)]


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(fast_tokenizer(train_tokenizer(DOCUMENTS, 500)))


@pytest.fixture(scope="module")
def tokenizer_folder(tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return str(folder)


@pytest.fixture
def new_folder(tmp_path: Path) -> Callable[[], Path]:
    numbers = itertools.count()

    def made() -> Path:
        folder = tmp_path / f"out-{next(numbers)}"
        folder.mkdir()
        return folder

    return made


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="["), max_size=50).filter(str.strip)


@settings(max_examples=50)
@given(st.lists(ANY_TEXT, max_size=30), st.integers(1, 7), st.integers(0, 60))
def test_any_texts_come_back_in_order_from_ids_and_from_copies_however_records_are_grouped(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer, texts: list[str], records: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    texts = [*texts, *DOCUMENTS[:30]]
    file, how = jsonl(folder / "a.jsonl", texts), PrepareConfig(val_share=0.3, processes=1)
    (folder / "ids").mkdir()
    (folder / "texts").mkdir()
    with mock.patch.object(tokenize_records, "RECORDS", records), mock.patch.object(tokenize_records, "BLOCK", size):
        ids_stats = write_shards(folder / "ids", [file], [], how, tokenizer)
        stats = write_shards(folder / "texts", [file], [], how, None)
    for split in ("train", "val"):
        wanted = [text for text in texts if held_out(text, 0.3) == (split == "val")]
        assert [sample["text"] for sample in samples(folder / "texts" / split)] == wanted
        ids = [sample["input_ids"] for sample in samples(folder / "ids" / split)]
        decode = tokenizer._backend.decode
        assert [decode(one.tolist()) for one in ids] == wanted
        assert all(one.dtype == np.uint16 for one in ids)
        assert stats[split]["documents"] == ids_stats[split]["documents"] == len(wanted)
        assert ids_stats[split]["tokens"] == sum(map(len, ids))
        assert stats[split]["bytes"] == sum(len(text.encode()) for text in wanted)
    (folder / "again").mkdir()
    assert write_shards(folder / "again", [file], [], how, tokenizer) == ids_stats
    assert json.loads((folder / "again" / "stats.json").read_text()) == ids_stats


LONG = words(3, 4, 5, 8, 9)  # 5, 6, 7, 10 and 11 tokens; 6 have room for 4 words


@pytest.mark.parametrize(
    ("how", "lengths", "long"),
    [
        ({}, [5, 6, 7, 10, 11], (0, 0)),
        ({"long": "cut", "max_seq_len": 6}, [5, 6, 6, 6, 6], (3, 1 + 4 + 5)),
        ({"long": "chunk", "max_seq_len": 6}, [5, 6, 6, 3, 6, 6, 6, 6, 3], (3, 0)),
        ({"long": "split", "max_seq_len": 6}, [5, 6, 6, 1, 6, 4, 6, 5], (3, 0)),
    ],
)
def test_long_documents_are_kept_cut_chunked_or_split_and_counted(
    tmp_path: Path, new_folder: Callable[[], Path], how: dict[str, Any], lengths: list[int], long: tuple[int, ...]
) -> None:
    train, val = jsonl(tmp_path / "train.jsonl", LONG), jsonl(tmp_path / "val.jsonl", words(1))
    folder = new_folder()
    stats = write_shards(folder, [train], [val], PrepareConfig(processes=1, **how), word_tokenizer())
    ids = [sample["input_ids"].tolist() for sample in samples(folder / "train")]
    assert list(map(len, ids)) == lengths
    whole = [token for text in LONG for token in word_tokenizer()([text])[0].tolist()]
    if how.get("long") == "split":
        assert [token for one in ids for token in one] == whole
    else:
        assert all((one[0], one[-1]) == (2, 3) and not {2, 3} & set(one[1:-1]) for one in ids)
        words_of_all = [token for token in whole if token not in (2, 3)]
        assert how.get("long") == "cut" or [token for one in ids for token in one[1:-1]] == words_of_all
    assert tuple(stats["train"][name] for name in ("long", "tokens_cut_off")) == long
    assert (stats["train"]["given"], stats["val"]["given"], stats["train"]["dropped"]) == (5, 1, 0)
    assert {stats["val"][name] for name in ("long", "tokens_cut_off", "dropped")} == {0}
    assert stats["train"]["tokens"] == sum(lengths)
    assert stats["train"]["longest"] == max(lengths)
    assert stats["train"]["lengths"] == {
        str(bound): count
        for bound in (1, 2, 4, 8, 16)
        if (count := sum(bound // 2 < length <= bound for length in lengths))
    }
    assert stats["val"]["documents"] == 1


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(3, 12))
def test_a_text_of_any_length_is_split_and_no_token_is_lost(counts: list[int], max_seq_len: int) -> None:
    how, tokenizer = PrepareConfig(processes=1, long="split", max_seq_len=max_seq_len), word_tokenizer()
    raws = [Raw("a.txt", 1, "file", text.encode()) for text in words(*counts)]
    made = RecordTokenizer(how, tokenizer)(RecordGroup([*raws], 0.5, 0))
    tokens, lengths = tokenizer(words(*counts))
    assert made.data.tolist() == tokens.tolist()
    pieces = [[min(max_seq_len, length - at) for at in range(0, length, max_seq_len)] for length in lengths.tolist()]
    assert made.lengths.tolist() == list(itertools.chain(*pieces))
    in_val = [held_out(text, 0.5) for text in words(*counts)]
    assert made.held_out.tolist() == [is_val for is_val, some in zip(in_val, pieces, strict=True) for _ in some]
    for split, is_val in (("train", False), ("val", True)):
        of_split = [length for length, one in zip(lengths.tolist(), in_val, strict=True) if one == is_val]
        assert made.counts[split]["given"] == len(of_split)
        assert made.counts[split]["long"] == sum(length > max_seq_len for length in of_split)


EXAMPLES: list[dict[str, Any]] = [
    {"prompt": "w1 w2 ", "response": "w3"},
    {"messages": [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5 w6"}]},
    {"prompt": "w7", "response": "", "note": "nothing is to be learned here"},
    {"prompt": "w8 " * 30, "response": "w9"},
    {"prompt": "w8 ", "response": "w9 " * 30},
]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=9), st.sampled_from([None, *range(3, 12)]))
def test_examples_of_any_length_are_cut_and_dropped_if_nothing_is_to_be_learned(
    sizes: list[tuple[int, int]], max_seq_len: int | None
) -> None:
    examples = [{"prompt": "w1 " * prompt, "response": "w2 " * response} for prompt, response in sizes]
    long = "keep" if max_seq_len is None else "cut"
    how = PrepareConfig(examples=True, processes=1, long=long, max_seq_len=max_seq_len)
    raws = [Raw("a.jsonl", 1, "jsonl", json.dumps(example).encode()) for example in examples]
    made = RecordTokenizer(how, word_tokenizer())(RecordGroup([*raws], 0.5, 0))
    whole = ExampleTokenizer(word_tokenizer().named)(examples)
    cut = [(one["input_ids"].tolist()[:max_seq_len], one["loss_mask"].tolist()[:max_seq_len]) for one in whole]
    kept = [(ids, mask) for ids, mask in cut if any(mask[1:])]
    assert made.loss_mask is not None
    assert made.data.tolist() == [token for ids, _ in kept for token in ids]
    assert made.loss_mask.tolist() == [value for _, mask in kept for value in mask]
    assert made.lengths.tolist() == [len(ids) for ids, _ in kept]
    total = made.counts["train"] + made.counts["val"]
    limit = max_seq_len or 10**9
    assert (total["given"], total["dropped"]) == (len(examples), len(examples) - len(kept))
    assert total["long"] == sum(len(one["input_ids"]) > limit for one in whole)
    excess = [len(one["input_ids"]) - limit for one, (_, mask) in zip(whole, cut, strict=True) if any(mask[1:])]
    assert total["tokens_cut_off"] == sum(tokens for tokens in excess if tokens > 0)
    assert len(made.held_out) == len(kept)


def test_examples_of_every_format_give_the_same_ids_and_loss_masks(
    tmp_path: Path, command: Callable[..., Any], tokenizer_folder: str
) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    chats = [example for example in EXAMPLES if "messages" in example]
    jsonl_file = tmp_path / "a.jsonl"
    jsonl_file.write_text("".join(json.dumps(example) + "\n" for example in chats * 3))
    parquet.write_table(pyarrow.Table.from_pylist([*chats * 3]), tmp_path / "a.parquet")
    datasets.Dataset.from_list([*chats * 3]).save_to_disk(str(tmp_path / "a"))
    expected = ExampleTokenizer(load_tokenizer(tokenizer_folder).named)(chats * 3)
    val = tmp_path / "val.jsonl"
    val.write_text(json.dumps(EXAMPLES[0]) + "\n")
    for name in ("a.jsonl", "a.parquet", "a"):
        out = tmp_path / f"out-{name}"
        assert command(tmp_path / name, "--examples", "--val", val, "--out", out)[0] == 0
        found = samples(out / "train")
        assert [one["input_ids"].tolist() for one in found] == [one["input_ids"].tolist() for one in expected]
        assert [one["loss_mask"].tolist() for one in found] == [one["loss_mask"].tolist() for one in expected]
        assert {one["loss_mask"].dtype for one in found} == {np.dtype(np.uint8)}
        assert len(samples(out / "val")) == 1


def test_the_command_counts_examples_that_are_cut_and_dropped(tmp_path: Path, command: Callable[..., Any]) -> None:
    file, val, out = tmp_path / "a.jsonl", tmp_path / "val.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(example) + "\n" for example in EXAMPLES))
    val.write_text(json.dumps(EXAMPLES[0]) + "\n")
    code, printed, _ = command(file, "--examples", "--val", val, "--long", "cut", "--max-seq-len", 40, "--out", out)
    stats = json.loads((out / "stats.json").read_text())
    assert code == 0
    train = stats["train"]
    assert (train["given"], train["documents"], train["long"], train["dropped"]) == (5, 3, 2, 2)
    assert stats["val"]["given"] == stats["val"]["documents"] == 1
    cut_off = train["tokens_cut_off"]
    assert cut_off > 0
    assert f"; 2 longer than 40, {cut_off:,} tokens cut off; dropped 2, with nothing to learn; skipped none;" in printed


BAD_EXAMPLES = {
    '{"text": "a"}': "not an example: must have prompt and response, or else messages; got dict: {'text': 'a'}",
    '{"prompt": "a", "response": 7}': "not an example: 'response' must be a string; got int: 7",
    '{"messages": [{"role": "user"}]}': "not an example: messages[0] must be {'role': str, 'content': str}; got dict",
    '{"prompt": "a", "response": "\\udc00"}': "not an example: remove the lone surrogate '\\udc00'",
    "[1]": "not a JSON object ('[1]'); write {\"messages\": ...}",
    "a": "not JSON (Expecting value",
}


@pytest.mark.parametrize("line", BAD_EXAMPLES)
def test_a_line_that_is_not_an_example_is_named_or_skipped(
    tmp_path: Path, command: Callable[..., Any], line: str
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    good = [json.dumps({"prompt": "What?", "response": f"Number {number}."}) for number in range(50)]
    file.write_text("\n".join([*good[:20], line, *good[20:]]))
    code, _, [error] = command(file, "--examples", "--val-share", "0.2", "--out", out)
    assert code == 2
    assert error.startswith(f"prepare: {file}:21: {BAD_EXAMPLES[line]}")
    code, printed, _ = command(file, "--examples", "--val-share", "0.2", "--on-error", "skip", "--out", out)
    assert code == 0
    assert f"; skipped 1 ({BAD_EXAMPLES[line].split(' (')[0].split(':')[0]} 1); " in printed
    stats = json.loads((out / "stats.json").read_text())
    assert stats["train"]["documents"] + stats["val"]["documents"] == 50


def test_an_example_is_held_out_by_its_own_fields_alone(tmp_path: Path, command: Callable[..., Any]) -> None:
    pairs: list[dict[str, Any]] = [{"prompt": "What?", "response": f"Number {number}."} for number in range(50)]
    held = []
    for name, examples in {
        "a": pairs,
        "b": [{"id": number, "response": one["response"], "prompt": "What?"} for number, one in enumerate(pairs)],
    }.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(example) + "\n" for example in examples))
        assert command(file, "--examples", "--val-share", "0.2", "--out", tmp_path / name)[0] == 0
        held.append([one["input_ids"].tolist() for one in samples(tmp_path / name / "val")])
    assert held[0] == held[1]
    assert 0 < len(held[0]) < 25


def test_what_does_not_go_with_examples_is_an_error(tmp_path: Path, command: Callable[..., Any]) -> None:
    file, text, table = tmp_path / "a.jsonl", tmp_path / "a.txt", tmp_path / "a.parquet"
    file.write_text(json.dumps({"prompt": "a", "response": ""}) + "\n")
    text.write_text("a")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a"], "text": ["b"]}), table)
    out, how = tmp_path / "out", ("--examples", "--out", tmp_path / "out", "--val", file)
    for path, error in {
        text: f"{text}: is of another kind; give files (.jsonl, .jsonl.gz",
        table: f"{table}: missing field (there is no single 'prompt' with 'response', or 'messages' among ",
    }.items():
        code, _, [line] = command(path, *how)
        assert (code, line[: len(error) + 9]) == (2, f"prepare: {error}")
    code, _, [line] = command(file, "--examples", "--out", out)
    assert line == (
        "prepare: train: there is no document, as nothing is to be learned in 1 examples; give more files, or lower "
        "val_share"
    )
    code, _, [line] = command(file, "--examples", "--out", out, tokenizer=["--train-tokenizer", "300"])
    assert line.startswith("prepare: train_tokenizer=300: is trained on texts, not on examples; give tokenizer, the")
    assert not out.exists()


def test_the_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare.main(["--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option, default in {
        "--val-share VAL_SHARE": "0.01",
        "--text-field TEXT_FIELD": "text",
        "--document-per {file,blank_line}": "file",
        "--long {keep,cut,chunk,split}": "keep",
        "--on-error {stop,skip}": "stop",
    }.items():
        assert shown.split(f" {option} ")[-1].split("--")[0].rstrip().endswith(f"(default: {default})")
    assert "blank docstrings" not in shown
    assert "keep-blank" not in shown


def test_ids_above_65535_are_stored_in_32_bits(tmp_path: Path, new_folder: Callable[[], Path]) -> None:
    train, val = jsonl(tmp_path / "train.jsonl", ["w69999"]), jsonl(tmp_path / "val.jsonl", ["w0"])
    folder = new_folder()
    stats = write_shards(folder, [train], [val], PrepareConfig(processes=1), word_tokenizer(70_000))
    assert samples(folder / "train")[0]["input_ids"].tolist() == [2, 70_004, 3]
    assert json.loads((folder / "train/index.json").read_text())["shards"][0]["column_encodings"] == ["ndarray:uint32"]
    assert stats["tokenizer"]["vocab_size"] == 70_005


def test_a_fingerprint_tells_other_documents_and_other_bounds_between_them(
    tmp_path: Path, new_folder: Callable[[], Path]
) -> None:
    val, kinds = jsonl(tmp_path / "val.jsonl", words(1)), word_tokenizer(special=False)

    def fingerprint(*texts: str) -> str:
        train = jsonl(tmp_path / "train.jsonl", texts)
        made: str = write_shards(new_folder(), [train], [val], PrepareConfig(processes=1), kinds)["train"][
            "fingerprint"
        ]
        return made

    prints = [fingerprint("w0 w1", "w2"), fingerprint("w0", "w1 w2"), fingerprint("w0 w1", "w3"), fingerprint("w0")]
    assert len(set(prints)) == 4
    assert fingerprint("w0  w1", "w2 ") == prints[0]


def test_what_the_tokenizer_makes_nothing_of_is_told_or_skipped(tmp_path: Path, new_folder: Callable[[], Path]) -> None:
    nothing = word_tokenizer(special=False, normalizer=normalizers.Replace(Regex("x"), ""))
    train, val = jsonl(tmp_path / "a.jsonl", ["w0", "xx", "w1 w2"]), jsonl(tmp_path / "val.jsonl", ["w0"])
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: no token \('xx'\); leave the text out"):
        write_shards(new_folder(), [train], [val], PrepareConfig(processes=1), nothing)
    folder = new_folder()
    stats = write_shards(folder, [train], [val], PrepareConfig(processes=1, on_error="skip"), nothing)
    assert stats["skipped"] == {"no token": 1}
    assert [sample["input_ids"].tolist() for sample in samples(folder / "train")] == [[5], [6, 7]]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"val_share": 0.0}, r"^val_share=0\.0: must be above 0 and below 1$"),
        ({"val_share": 1.0}, r"^val_share=1\.0: must"),
        ({"val_share": float("nan")}, r"^val_share=nan: must"),
        ({"processes": 0}, r"^processes=0: must be at least 1$"),
        ({"long": "drop"}, r"^long=drop: must be keep, cut, chunk or split$"),
        ({"on_error": "no"}, r"^on_error=no: must be stop or skip$"),
        ({"document_per": "line"}, r"^document_per=line: must be file or blank_line$"),
        ({"long": "cut"}, r"^long=cut: needs max_seq_len; set it$"),
        ({"max_seq_len": 5}, r"^max_seq_len=5: long=keep leaves documents whole; choose cut, chunk or split$"),
        ({"examples": True, "long": "chunk", "max_seq_len": 9}, r"^long=chunk: an example is kept whole or cut; its"),
        ({"examples": True, "long": "split", "max_seq_len": 9}, r"^long=split: an example is kept whole or cut; its"),
    ],
)
def test_settings_that_will_not_do_are_an_error(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrepareConfig(**how)


def test_settings_that_do_not_go_with_the_inputs_are_an_error(tmp_path: Path, new_folder: Callable[[], Path]) -> None:
    file, other = jsonl(tmp_path / "a.jsonl", DOCUMENTS[:5]), jsonl(tmp_path / "b.jsonl", ["w0"])
    cut = PrepareConfig(processes=1, long="cut", max_seq_len=2)
    with pytest.raises(
        ConfigError, match=r"^max_seq_len=2: leaves no room for text next to 2 special tokens; raise it$"
    ):
        write_shards(new_folder(), [file], [other], cut, word_tokenizer())
    with pytest.raises(ConfigError, match=r"^long=cut: texts that are not tokenized stay whole; leave it out$"):
        write_shards(new_folder(), [file], [other], cut, None)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl: is given for training and for evaluation; remove it from one of them$"
    ):
        check_apart([file], [other, file])
    with pytest.raises(ConfigError, match=r"^val: there is no document; raise val_share, or give files for it$"):
        write_shards(new_folder(), [file], [], PrepareConfig(processes=1, val_share=1e-9), None)
    with pytest.raises(ConfigError, match=r"^train: there is no document; give more files, or lower val_share$"):
        write_shards(new_folder(), [file], [], PrepareConfig(processes=1, val_share=1 - 1e-9), None)
    other.write_text("no\nno\n")
    with pytest.raises(ConfigError, match=r"^val: there is no document, and 2 were skipped; give other files$"):
        write_shards(new_folder(), [file], [other], PrepareConfig(processes=1, on_error="skip"), None)


def test_texts_for_a_tokenizer_are_of_the_train_split_and_bounded(tmp_path: Path) -> None:
    file, how = jsonl(tmp_path / "a.jsonl", DOCUMENTS), PrepareConfig(processes=1, val_share=0.2)
    train = [text for text in DOCUMENTS if not held_out(text, 0.2)]
    assert sample_texts([file], [], how) == train
    assert sample_texts([file], [tmp_path / "never.jsonl"], how) == DOCUMENTS
    size = sum(map(len, train))
    some = sample_texts([file], [], how, max_bytes=size // 3)
    assert size // 5 < sum(map(len, some)) <= size // 3
    assert some == [text for text in train if text in set(some)]


@pytest.fixture
def command(
    tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, list[str]]]]:
    """The command in this process: exit code, what it printed, and lines of errors."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    handler = signal.getsignal(signal.SIGTERM)

    def run(
        *arguments: str | Path, tokenizer: Sequence[str] = ("--tokenizer", tokenizer_folder)
    ) -> tuple[int, str, list[str]]:
        code = prepare.main([*map(str, arguments), *tokenizer, "--processes", "1"])
        captured = capsys.readouterr()
        return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("prepare: ")]

    yield run
    signal.signal(signal.SIGTERM, handler)


GOOD = [json.dumps({"text": text}).encode() for text in DOCUMENTS[:200]]
BAD_LINES = {
    "wrong encoding": b'{"text": "\xff"}',
    "not JSON": b"text",
    "not a JSON object": b"7",
    "missing field": b"{}",
    "field not a string": b'{"text": 7}',
    "empty text": b'{"text": ""}',
    "lone surrogate": b'{"text": "\\udc00"}',
    "too long record": b'{"text": "' + b"x" * (1 << 24) + b'"}',
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_stops_the_command_or_is_skipped_and_counted(
    tmp_path: Path, command: Callable[..., Any], caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    file.write_bytes(b"\n".join([*GOOD[:100], BAD_LINES[reason], *GOOD[100:], BAD_LINES[reason], b"", b""]))
    code, printed, [error] = command(file, "--out", out)
    assert (code, printed) == (2, "")
    assert error.startswith(f"prepare: {file}:101: {reason} (")
    assert error.endswith(", or skip such records by on_error=skip")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "a.jsonl"]

    code, printed, errors = command(file, "--out", out, "--on-error", "skip")
    assert (code, errors) == (0, [])
    assert f"; skipped 2 ({reason} 2); repaired 1 (blank line 1); " in printed
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [message.split(" (")[0] for message in warned] == [
        f"skipped, as the first of its kind: {file}:101: {reason}"
    ]
    stats = json.loads((out / "stats.json").read_text())
    assert stats["skipped"] == {reason: 2}
    assert stats["train"]["documents"] + stats["val"]["documents"] == 200
    assert load_tokenizer(str(out / "tokenizer")).fingerprint == stats["tokenizer"]["fingerprint"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("b.jsonl", b"", "empty file"),
        ("b.txt", b" \n", "empty text"),
        ("b.txt", b"\xff\xfea\0", "wrong encoding"),
        ("b.jsonl.gz", gzip.compress(b"\n".join(GOOD), mtime=0)[:-50], "unreadable file"),
        ("b.jsonl.zst", zstandard.compress(b"\n".join(GOOD))[:-5], "unreadable file"),
        ("b.parquet", b"PAR1", "unreadable file"),
    ],
)
def test_a_bad_file_stops_the_command_or_is_skipped_and_counted(
    tmp_path: Path, command: Callable[..., Any], name: str, content: bytes, reason: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(b"\n".join(GOOD))
    (tmp_path / "in" / name).write_bytes(content)
    code, _, [error] = command(tmp_path / "in", "--out", tmp_path / "out")
    assert code == 2
    assert error.startswith(f"prepare: {tmp_path}/in/{name}")
    assert f": {reason} (" in error
    assert not (tmp_path / "out").exists()
    code, printed, _ = command(tmp_path / "in", "--out", tmp_path / "out", "--on-error", "skip")
    assert code == 0
    assert f"; skipped 1 ({reason} 1); " in printed


def test_what_the_user_can_fix_is_one_line(tmp_path: Path, command: Callable[..., Any]) -> None:
    file = jsonl(tmp_path / "a.jsonl", DOCUMENTS[:300])
    out = tmp_path / "out"
    for arguments, error in {
        (tmp_path / "no.txt", "--out", out): f"{tmp_path}/no.txt: does not exist; give files",
        (file, "--out", tmp_path): f"out={tmp_path}: exists already; give another folder, or delete this one",
        (file, "--out", file / "out"): f"{file}: File exists; fix that",
        (file, "--out", out, "--max-seq-len", "9"): "max_seq_len=9: long=keep",
        (file, "--out", out, "--val-share", "1e-12"): "val: there is no document; raise val_share",
        (file, "--out", out, "--val", file): f"{file}: is given for training and for evaluation",
    }.items():
        code, printed, lines = command(*arguments)
        assert (code, printed, len(lines)) == (2, "", 1)
        assert lines[0].startswith(f"prepare: {error}")
        assert not out.exists()
    code, _, [line] = command(file, "--out", out, tokenizer=["--tokenizer", str(tmp_path)])
    assert line.startswith(f"prepare: tokenizer={tmp_path}: ")
    code, _, [line] = command(file, "--out", out, tokenizer=["--train-tokenizer", "100"])
    assert line.startswith("prepare: train_tokenizer=100: must be at least 261")


@pytest.mark.parametrize("arguments", [["a.txt"], ["--out", "x", "--tokenizer", "y"], ["a", "--out", "x"]])
def test_arguments_that_are_missing_end_the_command(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare.main(arguments)
    assert ended.value.code == 2


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    file, before = jsonl(tmp_path / "a.jsonl", DOCUMENTS), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))  # enough for a tokenizer
    try:
        code, _, lines = command(file, "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, lines) == (2, [f"prepare: {tmp_path}/out: {os.strerror(errno.EFBIG)}; fix that"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "a.jsonl"]


@pytest.mark.slow
def test_results_come_in_order_and_few_items_are_under_way() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield -number

    results = map_in_order(abs, items(), 2, "composer_packing.data.prepare.ordered_pool")
    for number, result in enumerate(results):
        assert result == number
        assert len(taken) - number <= 2 * UNDER_WAY
    assert number == 99


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error_and_no_hang() -> None:
    results = map_in_order(signal.raise_signal, [signal.SIGKILL] * 9, 2, "composer_packing.data.prepare.ordered_pool")
    with pytest.raises(ConfigError, match=r"^processes=2: one was killed, perhaps because memory ran out; run again"):
        list(results)


def child(*arguments: str | Path, tokenizer: Sequence[str]) -> "subprocess.Popen[str]":
    """The command in a session of its own, on two processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "composer_packing.prepare", *map(str, arguments), *tokenizer, "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )


@pytest.mark.slow
def test_all_formats_give_the_same_bytes_from_one_process_and_from_two_and_streaming_reads_them(
    tmp_path: Path, command: Callable[..., Any]
) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    folder = tmp_path / "in"
    folder.mkdir()
    parts = [DOCUMENTS[start : start + 250] for start in range(0, 1500, 250)]
    (folder / "a.txt").write_text("\n\n".join(parts[0]))
    (folder / "b.txt.zst").write_bytes(zstandard.compress("\n \n".join(parts[1]).encode()))
    jsonl(folder / "c.jsonl", [*parts[2], ""])
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(jsonl(tmp_path / "d", parts[3]).read_bytes()))
    parquet.write_table(pyarrow.table({"text": parts[4]}), folder / "e.parquet", row_group_size=100)
    datasets.Dataset.from_dict({"text": parts[5]}).save_to_disk(str(folder / "f"))

    how = (folder, "--document-per", "blank_line", "--on-error", "skip", "--val-share", "0.1")
    trained = ("--train-tokenizer", "400")
    one, two = tmp_path / "one", tmp_path / "two"
    process = child(*how, "--out", two, tokenizer=trained)
    assert command(*how, "--out", one, tokenizer=trained)[0] == 0
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 0
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)

    stats = json.loads((two / "stats.json").read_text())
    assert printed.splitlines()[-1].startswith(
        f"{two}: train {stats['train']['documents']:,} documents, {stats['train']['tokens']:,} tokens; "
        f"val {stats['val']['documents']} documents, {stats['val']['tokens']:,} tokens; "
        f"skipped 1 (empty text 1); repaired none; "
    )
    decode = load_tokenizer(str(two / "tokenizer"))._backend.decode
    read = []
    for split in ("train", "val"):
        rows = StreamingDataset(local=str(two / split), shuffle=False, batch_size=1)
        read += [decode(rows[number]["input_ids"].tolist()) for number in range(len(rows))]
    assert read == [text for share in (False, True) for text in DOCUMENTS if held_out(text, 0.1) == share]


def session_of(leader: int) -> dict[int, int]:
    """Processes of a session that have not ended, and the parent of each."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            state, parent, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and int(session) == leader and state != "Z":
            found[int(entry.name)] = int(parent)
    return found


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


ENDS = {"killed": -9, "terminated": 143, "interrupted": 130}
"""What can happen to a run, and the exit code of the command."""


@pytest.mark.slow
def test_runs_that_end_in_the_middle_leave_no_process_and_nothing_that_looks_finished(
    tmp_path: Path, command: Callable[..., Any], tokenizer_folder: str
) -> None:
    file = jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    large = tmp_path / "large.jsonl"
    large.write_text(file.read_text() * 600)
    runs = {
        how: child(large, "--out", tmp_path / how / "out", tokenizer=["--tokenizer", tokenizer_folder]) for how in ENDS
    }

    def workers(leader: int) -> list[int]:
        there = session_of(leader)
        return [one for one, parent in there.items() if there.get(parent) == leader]

    for how, process in runs.items():
        until(lambda leader=process.pid: len(workers(leader)) == 2)  # type: ignore[misc]
        if how == "interrupted":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGTERM)
    for how, process in runs.items():
        out = tmp_path / how / "out"
        _, errors = process.communicate(timeout=400)
        assert process.returncode == ENDS[how]
        assert "Traceback" not in errors
        until(lambda leader=process.pid: not session_of(leader))  # type: ignore[misc]
        left = {".out.lock"} | ({".out.building"} if how == "killed" else set())
        assert {path.name for path in out.parent.iterdir()} == left

        assert command(file, "--out", out)[0] == 0
        stats = json.loads((out / "stats.json").read_text())
        assert stats["train"]["documents"] + stats["val"]["documents"] == len(DOCUMENTS)
        assert {path.name for path in out.parent.iterdir()} == {"out", ".out.lock"}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_starting_a_worker_ends_the_run_like_any_other(number: int, code: int) -> None:
    script = """
        import os, signal, sys, time
        from multiprocessing import forkserver
        from composer_packing.data.prepare.ordered_pool import map_in_order

        def interrupted(descriptor):
            started.append(read_signed(descriptor))  # the worker is there, and its pool does not know of it
            if len(started) == 2:
                os.kill(os.getpid(), int(sys.argv[1]))
            return started[-1]

        started, read_signed, forkserver.read_signed = [], forkserver.read_signed, interrupted
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        for _ in map_in_order(time.sleep, [2.0, 0.0, 0.0, 0.0], 2, "composer_packing.data.prepare.ordered_pool"):
            print("a result")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_memory_does_not_grow_with_the_size_of_files_or_lines(tmp_path: Path) -> None:
    script = """
        import resource, sys, pathlib
        from composer_packing.config.prepare import PrepareConfig
        from composer_packing.data.prepare.pipeline import documents_of

        def peak(name):
            for some in documents_of([([pathlib.Path(name)], 0.0)], PrepareConfig(processes=1, on_error="skip"), None):
                documents.append(len(some.lengths))
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

        documents = []
        print(peak(sys.argv[1]), peak(sys.argv[2]), peak(sys.argv[3]), sum(documents))
    """
    line = json.dumps({"text": "x" * 100}) + "\n"
    few, many, long = tmp_path / "few.jsonl", tmp_path / "many.jsonl", tmp_path / "long.jsonl"
    few.write_text(line * 20_000)
    many.write_text(line * 400_000)
    long.write_text(line)
    os.truncate(long, 1 << 29)
    code = [sys.executable, "-c", textwrap.dedent(script), str(few), str(many), str(long)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=400, check=True, env=ENVIRONMENT)
    after_few, after_many, after_long, documents = map(int, done.stdout.split())
    assert documents == 420_001
    assert after_many - after_few < 20
    assert after_long - after_few < 100


@pytest.mark.parametrize("count", [1, 255, 256, 65535, 65536])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_sample_is_encoded_as_the_library_does_it(count: int, dtype: Any, tmp_path: Path) -> None:
    ids = np.arange(count).astype(dtype)
    writer = MDSWriter(columns={"input_ids": f"ndarray:{ids.dtype.name}"}, out=str(tmp_path))
    assert encode_sample(encode_array(ids)) == writer.encode_sample({"input_ids": ids})
    both = {"input_ids": f"ndarray:{ids.dtype.name}", "loss_mask": "ndarray:uint8"}
    writer = MDSWriter(columns=both, out=str(tmp_path / "both"))
    mask = (ids % 2).astype(np.uint8)
    sample = writer.encode_sample({"input_ids": ids, "loss_mask": mask})
    assert encode_sample(encode_array(ids), encode_array(mask)) == sample
    writer = MDSWriter(columns={"text": "str"}, out=str(tmp_path / "text"))
    text = "é" * count
    assert encode_sample(text.encode()) == writer.encode_sample({"text": text})
