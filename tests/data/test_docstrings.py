import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.config.sources import DataConfig, DocsConfig
from composer_packing.data.docstrings import corpus
from composer_packing.data.docstrings.corpus import prepare_docstrings
from composer_packing.data.docstrings.extract import docstrings, documents, source_files
from composer_packing.data.mds.documents import MdsDocuments
from composer_packing.data.open_source import open_source
from composer_packing.data.tokenizer import TextTokenizer, load_tokenizer
from composer_packing.packing.source_batch import FlatSourceBatch
from tests.tools.written_sources import documents_in, run_over

VOCAB_SIZE = 600
SPLITS = ("train", "val")


def tokenizer_of(folder: Path) -> TextTokenizer:
    return load_tokenizer(str(folder / "tokenizer"))


def run_of(tmp_path: Path, **changed: Any) -> TrainConfig:
    config = run_over(DataConfig(str(tmp_path / "cache"), docs=DocsConfig(VOCAB_SIZE)), **changed)
    config.model.vocab_size = VOCAB_SIZE
    return config


def read(folder: Path, split: str, loss_masked: bool = False) -> FlatSourceBatch:
    documents = MdsDocuments(folder / split, tokenizer_of(folder), loss_masked=loss_masked)
    return documents.__getitems__(range(len(documents)))


def texts_in(folder: Path, split: str) -> list[str]:
    decode = tokenizer_of(folder)._backend.decode
    return [decode(list(ids)) for ids in documents_in([read(folder, split)])]


def test_docstrings_of_modules_classes_and_functions_are_found_and_nothing_else() -> None:
    source = textwrap.dedent(
        '''
        """Module."""
        "No docstring."
        class A:
            """Class."""
            x = "no"
            async def f(self):
                """  Method,
                cleaned.
                """
        def g():
            pass
        '''
    )
    assert [text for text, _ in docstrings(source)] == ["Module.", "Class.", "Method,\ncleaned."]


@pytest.mark.parametrize("source", ["def f(:", "\0", "print 'python 2'", '"\\d invalid escape"'])
def test_a_file_that_does_not_parse_or_warns_gives_no_error(source: str) -> None:
    assert len(list(docstrings(source))) <= 1


def test_every_text_comes_once_and_files_in_another_encoding_not_at_all(tmp_path: Path) -> None:
    for name, content in {
        "a": b'"""Same."""',
        "b": b'"""Same."""',
        "c": b'"""\xff"""',
        "d": b'"""Other."""',
    }.items():
        (tmp_path / name).write_bytes(content)
    assert list(documents(sorted(tmp_path.iterdir()))) == ["Same.", "Other."]


def test_files_of_the_standard_library_and_of_packages_are_found_in_one_order() -> None:
    names = [name for name, _ in source_files()]
    assert names == sorted(names)
    assert {name.split("/")[0] for name in names} == {
        "stdlib",
        "composer",
        "networkx",
        "numpy",
        "streaming",
        "torch",
    }
    assert not any("/tests/" in name or "site-packages" in name for name in names)


@pytest.fixture
def few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Two hundred documented files instead of the installed packages."""
    folder = tmp_path / "sources"
    folder.mkdir()
    files = []
    for number in range(200):
        path = folder / f"{number:03}.py"
        path.write_text(f'"""Document {number} of the set. ' + "Words and more words. " * (number % 7) + '"""')
        files.append((path.name, path))
    monkeypatch.setattr(corpus, "source_files", lambda: files)
    return files


def test_a_corpus_holds_every_document_once_with_cls_and_sep(few_files: Any, tmp_path: Path) -> None:
    folder = prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256)
    tokenizer = tokenizer_of(folder)
    token = tokenizer._backend.id_to_token
    for split in SPLITS:
        assert read(folder, split).tokens.dtype == np.uint16
        for ids in documents_in([read(folder, split)]):
            assert (token(ids[0]), token(ids[-1])) == ("[CLS]", "[SEP]")
    texts = texts_in(folder, "train") + texts_in(folder, "val")
    assert sorted(texts) == sorted(documents(path for _, path in few_files))
    counts = json.loads((folder / "stats.json").read_text())
    assert counts["train"]["documents"] + counts["val"]["documents"] == 200
    assert counts["val"]["documents"] > 0
    size, pad, mask, special = tokenizer.vocabulary
    assert [token(number) for number in (pad, mask)] == ["[PAD]", "[MASK]"]
    assert list(special) == [0, 1, 2, 3, 4]
    assert size == tokenizer._backend.get_vocab_size()


def test_long_docstrings_come_in_pieces_and_no_token_is_lost(few_files: Any, tmp_path: Path) -> None:
    whole, pieces = (prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, max_seq_len) for max_seq_len in (256, 8))
    for split in SPLITS:
        documents = documents_in([read(whole, split)])
        expected = [ids[at : at + 8] for ids in documents for at in range(0, len(ids), 8)]
        assert documents_in([read(pieces, split)]) == expected
        assert len(expected) > 2 * len(documents)
    data = open_source(run_of(tmp_path, max_seq_len=8))
    long = sum(len(ids) > 8 for ids in documents_in([read(whole, "train")]))
    found = read(pieces, "train")
    given = len(documents_in([read(whole, "train")]))
    assert data.train.summary == (
        f"{given} documents, {len(found.tokens):,} tokens; {long} longer than 8 come in pieces"
    )
    assert (data.train.per_epoch, data.train.num_tokens) == (len(found.lengths), len(found.tokens))


def test_docstrings_of_spaces_are_documents_too(few_files: list[tuple[str, Path]], tmp_path: Path) -> None:
    few_files[3][1].write_text('def f():\n    """\n    """\n')
    folder = prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256)
    assert sum(not text.strip() for split in SPLITS for text in texts_in(folder, split)) == 1


@pytest.fixture
def few_functions(few_files: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The files with a documented function each, and a method without documentation."""
    for number, (_, path) in enumerate(few_files):
        with path.open("a") as file:
            file.write(
                f"\n\n@property\ndef given_{number}(one: int, *others) -> str:\n    'Gives {number} to others.'\n"
            )
            file.write("\n\nclass Bare:\n    def given(self): pass\n")
    return few_files


def test_examples_are_signatures_with_their_documentation_and_only_that_is_learned(
    few_functions: Any, tmp_path: Path
) -> None:
    folder = prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256, has_examples=True)
    docs = prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256)
    tokenizer = tokenizer_of(folder)
    assert tokenizer.fingerprint == tokenizer_of(docs).fingerprint
    found, decode = set(), tokenizer._backend.decode
    for split in SPLITS:
        batch = read(folder, split, loss_masked=True)
        assert batch.loss_mask is not None
        held_in_docs = set(texts_in(docs, split))
        for start, end in itertools.pairwise([0, *np.cumsum(batch.lengths)]):
            ids, learned = batch.tokens[start:end], batch.loss_mask[start:end] == 1
            assert tokenizer._backend.id_to_token(ids[-1]) == "[SEP]"
            assert learned[-1], "or it would not learn to stop"
            response = decode(ids[learned].tolist())
            assert response in held_in_docs, "a docstring that is held out is held out as a response too"
            found.add((decode(ids[~learned].tolist()), response))
    numbers = range(len(few_functions))
    assert found == {(f"def given_{n}(one: int, *others) -> str:\n", f"Gives {n} to others.") for n in numbers}


def test_long_examples_are_cut_and_examples_without_a_response_are_dropped(
    few_functions: list[tuple[str, Path]], tmp_path: Path
) -> None:
    few_functions[0][1].write_text(f"def {'long_' * 99}():\n    'Is never reached.'\n")
    whole, cut = (
        prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, length, has_examples=True) for length in (2000, 40)
    )
    dropped = 0
    for split in SPLITS:
        batch = read(whole, split, loss_masked=True)
        assert batch.loss_mask is not None
        ends = np.cumsum(batch.lengths)[:-1]
        examples = list(zip(np.split(batch.tokens, ends), np.split(batch.loss_mask, ends), strict=True))
        kept = [(ids[:40], mask[:40]) for ids, mask in examples if mask[1:40].any()]
        found = read(cut, split, loss_masked=True)
        assert found.loss_mask is not None
        assert found.tokens.tolist() == [token for ids, _ in kept for token in ids.tolist()]
        assert found.loss_mask.tolist() == [value for _, mask in kept for value in mask.tolist()]
        assert found.lengths.tolist() == [len(ids) for ids, _ in kept]
        dropped += len(examples) - len(kept)
        if split == "train":
            long = sum(len(ids) > 40 for ids, _ in examples)
            summary = (
                f"{len(kept)} of {len(examples)} examples, {len(found.tokens):,} tokens; {long} longer than 40 cut"
            )
            summary += f", {len(examples) - len(kept)} dropped as nothing of their response was left"
    assert dropped == 1
    assert open_source(run_of(tmp_path, max_seq_len=40, objective="sft")).train.summary == summary


def test_examples_that_leave_nothing_to_learn_are_an_error_that_names_the_length(
    few_functions: Any, tmp_path: Path
) -> None:
    assert len(read(prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 64, has_examples=True), "train").lengths) > 0
    message = r"max_seq_len=8: so many tokens hold nothing of a response in any of \d+ examples of train; raise it"
    with pytest.raises(ConfigError, match=message):
        prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 8, has_examples=True)


def test_a_document_stays_in_its_split_whatever_else_there_is(few_files: list[Any], tmp_path: Path) -> None:
    before = set(texts_in(prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256), "val"))
    del few_files[:50]
    after = set(texts_in(prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256), "val"))
    assert after <= before


def test_a_finished_corpus_is_opened_and_other_settings_or_files_build_another(few_files: Any, tmp_path: Path) -> None:
    first = prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256)
    stamp = (first / "stats.json").stat().st_mtime_ns
    assert prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256) == first
    assert (first / "stats.json").stat().st_mtime_ns == stamp
    assert prepare_docstrings(tmp_path / "cache", VOCAB_SIZE + 1, 256) != first
    assert prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 255) != first
    text = few_files[0][1].read_text()
    few_files[0][1].write_text(text.replace("Document", "document"))
    assert prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256) != first


@pytest.mark.parametrize("step", ["train_tokenizer", "write_shards"])
def test_an_interrupted_build_is_never_taken_for_a_finished_one(
    few_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    cache = tmp_path / "cache"

    def folders() -> list[Path]:
        return sorted(path for path in cache.iterdir() if path.is_dir())

    with monkeypatch.context() as patch:

        def interrupted(*arguments: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(corpus, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_docstrings(cache, VOCAB_SIZE, 256)
    before = folders()
    assert len(before) == (step == "write_shards"), "what was read is whole, and the shards are not there"
    folder = prepare_docstrings(cache, VOCAB_SIZE, 256)
    assert len(read(folder, "train").lengths) > 1
    assert folders() == sorted({*before, folder, folder.with_name(folder.name.removesuffix("-256"))})


@pytest.mark.parametrize("name", ["index.json", "shard.00000.mds"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "exchanged"])
def test_a_damaged_corpus_is_named_with_the_way_out(few_functions: Any, tmp_path: Path, name: str, damage: str) -> None:
    config = run_of(tmp_path, objective="sft" if name == "index.json" else "mlm", max_seq_len=256)
    open_source(config)
    folder = prepare_docstrings(tmp_path / "cache", VOCAB_SIZE, 256, config.objective == "sft")
    path = folder / "train" / name
    if damage == "removed":
        path.unlink()
    elif damage == "exchanged":
        path.write_bytes((folder / "val" / name).read_bytes())
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "emptied" else -10])
    with pytest.raises(ConfigError, match=r"(docs|examples)-\w+-256.*; or delete \S+-256, and the next run builds it"):
        open_source(config)


def test_a_cache_folder_that_cannot_be_is_an_os_error(few_files: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        prepare_docstrings(tmp_path / "file", VOCAB_SIZE, 256)


@pytest.mark.slow
def test_the_real_corpus_has_the_same_bytes_in_two_processes_one_of_them_killed_and_rerun(
    cache: Path, tmp_path: Path
) -> None:
    script = "import sys, pathlib; from composer_packing.data.docstrings import corpus; "
    script += "corpus.prepare_docstrings(pathlib.Path(sys.argv[1]), 4096, 256)"

    def start(folder: Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    one, killed = start(cache), start(tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".*.building")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(60)
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.suffix != ".building"]
    other = start(tmp_path)
    assert one.wait(300) == other.wait(300) == 0

    (built,) = tmp_path.glob("docs-*-256")
    folders = [cache / built.name, built]
    names = sorted(path.relative_to(built) for path in built.rglob("*"))
    assert names == sorted(path.relative_to(folders[0]) for path in folders[0].rglob("*"))
    for name in names:
        assert (built / name).is_dir() or (folders[0] / name).read_bytes() == (built / name).read_bytes(), name
    documents = read(built, "train")
    assert len(documents.lengths) > 10_000
    assert len(documents.tokens) > 1_000_000
