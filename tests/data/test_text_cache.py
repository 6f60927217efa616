import json
import os
from pathlib import Path

import pytest

from composer_packing.common.errors import ConfigError
from composer_packing.config.sources import DataConfig, PlainTextConfig, RecordsConfig
from composer_packing.data.open_source import open_source
from composer_packing.data.prepare import text_cache
from composer_packing.data.prepare.text_cache import copy_texts_once
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, train_tokenizer
from tests.tools.written_sources import TEXTS, VOCAB_SIZE, run_over


@pytest.fixture
def source(tmp_path: Path) -> RecordsConfig:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    TextTokenizer(fast_tokenizer(train_tokenizer(TEXTS, VOCAB_SIZE))).save(tmp_path / "tokenizer")
    return RecordsConfig(train=[str(path)], val_share=0.1, tokenizer=str(tmp_path / "tokenizer"))


def test_texts_are_copied_once_and_anew_when_a_file_or_a_setting_changes(source: RecordsConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = copy_texts_once("jsonl", source, cache)
    made = (first / "stats.json").stat().st_mtime_ns
    assert copy_texts_once("jsonl", source, cache) == first
    assert (first / "stats.json").stat().st_mtime_ns == made
    source.tokenizer = "another"  # which has no part in it
    assert copy_texts_once("jsonl", source, cache) == first
    source.val_share = 0.2
    other = copy_texts_once("jsonl", source, cache)
    path = Path(source.train[0])
    path.write_text(path.read_text().replace("Document 7 ", "Document 8 "))
    os.utime(path, ns=(1, 1))
    assert len({first, other, copy_texts_once("jsonl", source, cache)}) == 3


def test_a_copy_that_was_interrupted_is_made_anew(
    source: RecordsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **more: object) -> None:
        (given[0] / "half").touch()  # type: ignore[operator]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(text_cache, "write_shards", interrupted)
        with pytest.raises(KeyboardInterrupt):
            copy_texts_once("jsonl", source, tmp_path / "cache")
    folder = copy_texts_once("jsonl", source, tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["stats.json", "train", "val"]


def test_what_is_skipped_is_said_in_every_run(source: RecordsConfig, tmp_path: Path) -> None:
    with open(source.train[0], "a") as file:
        file.write("no json\n{}\n{}\n")
    data = DataConfig(str(tmp_path / "cache"), jsonl=source)
    with pytest.raises(ConfigError, match=r"texts\.jsonl:91: not JSON"):
        open_source(run_over(data))
    source.on_error = "skip"
    for _ in range(2):
        assert open_source(run_over(data)).train.summary.endswith("; skipped 1 (not JSON), 2 (missing field)")


def test_what_cannot_be_read_or_written_is_named(source: RecordsConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_folder=.*file/x: Not a directory: .*; give a folder that"):
        open_source(run_over(DataConfig(str(tmp_path / "file" / "x"), jsonl=source)))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "lost.txt").symlink_to(tmp_path / "nowhere")
    text = PlainTextConfig(train=[str(tmp_path / "in")], tokenizer=source.tokenizer)
    with pytest.raises(ConfigError, match=r"in/lost\.txt: No such file or directory; make it readable, or"):
        open_source(run_over(DataConfig(str(tmp_path / "cache"), text=text)))
