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
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from composer_packing.common.errors import ConfigError
from composer_packing.data.array_documents import DocumentDataset
from composer_packing.data.docstrings import corpus as corpus_module
from composer_packing.data.docstrings.corpus import Corpus, open_or_build
from composer_packing.data.docstrings.extract import docstrings, documents, source_files

VOCAB_SIZE = 600


def tokenizer_of(corpus: Corpus) -> Tokenizer:
    return Tokenizer.from_file(str(corpus.tokenizer_file))


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
    """Two hundred documented files in the place of the installed packages."""
    folder = tmp_path / "sources"
    folder.mkdir()
    files = []
    for number in range(200):
        path = folder / f"{number:03}.py"
        path.write_text(f'"""Document {number} of the set. ' + "Words and more words. " * (number % 7) + '"""')
        files.append((path.name, path))
    monkeypatch.setattr(corpus_module, "source_files", lambda: files)
    return files


def test_a_corpus_holds_every_document_once_with_cls_and_sep(few_files: Any, tmp_path: Path) -> None:
    corpus = open_or_build(tmp_path / "cache", VOCAB_SIZE)
    texts = []
    for split in ("train", "val"):
        tokens, offsets, _ = corpus.split(split)
        assert tokens.dtype == np.uint16
        for start, end in itertools.pairwise(offsets):
            ids = tokens[start:end].tolist()
            assert tokenizer_of(corpus).id_to_token(ids[0]) == "[CLS]"
            assert tokenizer_of(corpus).id_to_token(ids[-1]) == "[SEP]"
            texts.append(tokenizer_of(corpus).decode(ids))
    assert sorted(texts) == sorted(documents(path for _, path in few_files))
    counts = json.loads((corpus.folder / "corpus.json").read_text())
    assert counts["train"]["documents"] + counts["val"]["documents"] == 200
    assert counts["val"]["documents"] > 0
    size, pad, mask, special = corpus.tokenizer.vocabulary
    assert [tokenizer_of(corpus).id_to_token(number) for number in (pad, mask)] == ["[PAD]", "[MASK]"]
    assert list(special) == [0, 1, 2, 3, 4]
    assert size == tokenizer_of(corpus).get_vocab_size()


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
    corpus = open_or_build(tmp_path / "cache", VOCAB_SIZE, has_examples=True)
    docs = open_or_build(tmp_path / "cache", VOCAB_SIZE)
    assert corpus.tokenizer_file.read_bytes() == docs.tokenizer_file.read_bytes()
    read, decode = set(), tokenizer_of(corpus).decode
    for split in ("train", "val"):
        tokens, offsets, loss_mask = corpus.split(split)
        assert loss_mask is not None
        held_in_docs = {decode(ids.tolist()) for ids in np.split(docs.split(split)[0], docs.split(split)[1][1:-1])}
        for start, end in itertools.pairwise(offsets):
            ids, learned = tokens[start:end], loss_mask[start:end] == 1
            assert tokenizer_of(corpus).id_to_token(ids[-1]) == "[SEP]"
            assert learned[-1], "or it would not learn to stop"
            response = decode(ids[learned].tolist())
            assert response in held_in_docs, "what one corpus holds out is held out by the other"
            read.add((decode(ids[~learned].tolist()), response))
    numbers = range(len(few_functions))
    assert read == {(f"def given_{n}(one: int, *others) -> str:\n", f"Gives {n} to others.") for n in numbers}


def test_examples_that_leave_nothing_to_learn_are_an_error_that_names_the_length(
    few_functions: Any, tmp_path: Path
) -> None:
    corpus = open_or_build(tmp_path / "cache", VOCAB_SIZE, has_examples=True)
    assert len(corpus.documents("train", 64)) > 0
    with pytest.raises(ConfigError, match=r"max_seq_len=8: the first so many tokens of none of \d+ examples of train"):
        corpus.documents("train", 8)


def test_a_document_stays_in_its_split_whatever_else_there_is(few_files: list[Any], tmp_path: Path) -> None:
    def held_out(corpus: Corpus) -> set[str]:
        tokens, offsets, _ = corpus.split("val")
        return {tokenizer_of(corpus).decode(ids.tolist()) for ids in np.split(tokens, offsets[1:-1])}

    before = held_out(open_or_build(tmp_path / "cache", VOCAB_SIZE))
    del few_files[:50]
    after = held_out(open_or_build(tmp_path / "cache", VOCAB_SIZE))
    assert after <= before


def test_a_finished_corpus_is_opened_and_other_settings_or_files_build_another(few_files: Any, tmp_path: Path) -> None:
    first = open_or_build(tmp_path / "cache", VOCAB_SIZE)
    stamp = (first.folder / "corpus.json").stat().st_mtime_ns
    assert open_or_build(tmp_path / "cache", VOCAB_SIZE) == first
    assert (first.folder / "corpus.json").stat().st_mtime_ns == stamp
    assert open_or_build(tmp_path / "cache", VOCAB_SIZE + 1) != first
    text = few_files[0][1].read_text()
    few_files[0][1].write_text(text.replace("Document", "document"))
    assert open_or_build(tmp_path / "cache", VOCAB_SIZE) != first


def test_an_interrupted_build_is_never_taken_for_a_finished_one(
    few_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:

        def interrupted(*arguments: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(corpus_module, "train_tokenizer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            open_or_build(cache, VOCAB_SIZE)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    corpus = open_or_build(cache, VOCAB_SIZE)
    assert len(corpus.split("train")[1]) > 1
    assert [path for path in cache.iterdir() if path.is_dir()] == [corpus.folder]


@pytest.mark.parametrize("name", ["train.tokens.npy", "train.offsets.npy", "train.loss_mask.npy"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "exchanged"])
def test_a_damaged_corpus_is_named_with_the_way_out(few_functions: Any, tmp_path: Path, name: str, damage: str) -> None:
    corpus = open_or_build(tmp_path / "cache", VOCAB_SIZE, has_examples="loss_mask" in name)
    path = corpus.folder / name
    if damage == "removed":
        path.unlink()
    elif damage == "exchanged":
        path.write_bytes((corpus.folder / name.replace("train", "val")).read_bytes())
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "emptied" else -10])
    with pytest.raises(ConfigError, match=r"(docs|examples)-\w+: is damaged \(.*\); delete it and it is built again"):
        corpus.split("train")


def test_a_cache_folder_that_cannot_be_is_an_os_error(few_files: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        open_or_build(tmp_path / "file", VOCAB_SIZE)


@pytest.mark.slow
def test_the_real_corpus_is_large(cache: Path) -> None:
    tokens, offsets, _ = open_or_build(cache, 4096).split("train")
    assert len(offsets) > 10_000
    assert len(tokens) > 1_000_000


@pytest.mark.slow
def test_the_real_corpus_has_the_same_bytes_in_two_processes_one_of_them_killed_and_rerun(tmp_path: Path) -> None:
    """A tenth of the files: reading all of them takes half a minute each time."""
    script = "import sys, pathlib; from composer_packing.data.docstrings import corpus; "
    script += "files = corpus.source_files()[::10]; corpus.source_files = lambda: files; "
    script += "corpus.open_or_build(pathlib.Path(sys.argv[1]), 4096)"
    cache, tmp_path = tmp_path / "undisturbed", tmp_path / "killed"

    def start(folder: Path) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    one, killed = start(cache), start(tmp_path)
    deadline = time.monotonic() + 200
    while not list(tmp_path.glob("*.building")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait(200)
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.suffix != ".building"]
    other = start(tmp_path)
    assert one.wait(600) == other.wait(600) == 0

    (built,) = (path for path in tmp_path.iterdir() if path.is_dir())
    folders = [cache / built.name, built]
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    tokens, offsets, _ = Corpus(folders[0]).split("train")
    assert len(offsets) > 1_000
    assert len(tokens) > 100_000


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 12))
def test_long_documents_come_in_pieces_and_no_token_is_lost(lengths: list[int], max_seq_len: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    dataset = DocumentDataset(tokens, offsets, max_seq_len)
    flat = dataset.__getitems__(list(range(len(dataset))))
    assert flat.numbers is not None
    assert flat.numbers.tolist() == list(range(len(dataset)))
    assert flat.tokens.dtype == np.uint16, "as it is stored"
    pieces = np.split(flat.tokens, np.cumsum(flat.lengths)[:-1])[: len(dataset)]
    assert all((dataset[index]["input_ids"] == piece).all() for index, piece in enumerate(pieces))
    assert all(1 <= len(piece) <= max_seq_len for piece in pieces)
    assert [token for piece in pieces for token in piece] == tokens.tolist()
    starts = {int(piece[0]) for piece in pieces}
    assert set(offsets[:-1][np.array(lengths, int) > 0].tolist()) <= starts, "no piece crosses documents"
    assert dataset.num_documents == len(lengths)
    assert dataset.num_tokens == sum(lengths)
    assert dataset.num_long == sum(length > max_seq_len for length in lengths)


@given(st.lists(st.lists(st.integers(0, 1), max_size=30), max_size=12), st.integers(1, 12))
def test_long_examples_are_cut_and_those_without_a_response_dropped(masks: list[list[int]], max_seq_len: int) -> None:
    offsets = np.cumsum([0, *map(len, masks)], dtype=np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint16)
    dataset = DocumentDataset(tokens, offsets, max_seq_len, np.array(list(itertools.chain(*masks)), np.uint8))
    cut = [(start, mask[:max_seq_len]) for start, mask in zip(offsets.tolist(), masks, strict=False)]
    left = [(list(range(start, start + len(mask))), mask) for start, mask in cut if any(mask[1:])]
    assert len(dataset) == len(left)
    flat = dataset.__getitems__(list(range(len(dataset))))
    assert flat.tokens.tolist() == [token for ids, _ in left for token in ids]
    assert flat.lengths.tolist() == [len(ids) for ids, _ in left]
    assert flat.loss_mask is not None
    assert flat.loss_mask.tolist() == [value for _, mask in left for value in mask]
    for index, (ids, mask) in enumerate(left):
        assert dataset[index]["input_ids"].tolist() == ids
        assert dataset[index]["loss_mask"].tolist() == mask
    assert dataset.num_documents == len(masks)
    assert dataset.num_dropped == len(masks) - len(left)
    assert dataset.num_long == sum(len(mask) > max_seq_len for mask in masks)
    assert dataset.num_tokens == len(flat.tokens)
