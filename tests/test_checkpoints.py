from pathlib import Path
from typing import Any

import pytest
import torch

from composer_packing.checkpoints import TokenizerSaver, check_checkpoint
from composer_packing.composer_model import PackedLanguageModel
from composer_packing.config import ConfigError
from composer_packing.dataspec import train_batches
from tests.test_dataspec import VOCAB_SIZE, config_of, documents_of, trainer_of
from tests.test_model import small


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "corpus" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text("one")
    return path


def checkpoint(folder: Path, model: PackedLanguageModel) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "latest-rank0.pt"
    torch.save({"state": {"model": model.state_dict()}}, path)
    return path


def test_a_run_leaves_its_tokenizer_beside_its_checkpoints_and_the_next_starts_from_both(
    tokenizer: Path, tmp_path: Path
) -> None:
    config, folder = config_of(max_duration="1ba"), tmp_path / "runs" / "first"
    model = PackedLanguageModel(config.model)
    batches = train_batches(documents_of(60), config, VOCAB_SIZE)
    saver = TokenizerSaver(tokenizer, f"{tmp_path}/runs/{{run_name}}")
    trainer = trainer_of(config, batches, model, callbacks=[saver], save_folder=str(folder), run_name="first")
    trainer.fit()
    trainer.close()
    batches.close()
    assert (folder / "tokenizer.json").read_text() == "one"
    load_path = folder / "latest-rank0.pt"
    check_checkpoint(str(load_path), tokenizer, model)

    fresh = PackedLanguageModel(config.model)
    again = train_batches(documents_of(60), config, VOCAB_SIZE)
    trainer = trainer_of(config, again, fresh, load_path=str(load_path), load_weights_only=True)
    again.close()
    trainer.close()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))
    assert int(trainer.state.timestamp.token) == 0, "the clock starts anew"


def test_a_checkpoint_that_is_not_there_is_named(tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_path=nowhere.pt: there is no such file"):
        check_checkpoint("nowhere.pt", tokenizer, PackedLanguageModel(small()))


def test_what_is_no_checkpoint_is_named(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for content in (b"", b"text", b"\x80\x04K\x01."):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a.pt: is no checkpoint of a run") as caught:
            check_checkpoint(str(path), tokenizer, PackedLanguageModel(small()))
        assert "\n" not in str(caught.value)


def test_another_tokenizer_is_an_error_and_a_missing_one_a_warning(
    tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = PackedLanguageModel(small())
    path = checkpoint(tmp_path / "run", model)
    check_checkpoint(str(path), tokenizer, model)
    assert "cannot be checked" in caplog.text
    (path.parent / "tokenizer.json").write_text("another")
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        check_checkpoint(str(path), tokenizer, model)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"vocab_size": 51}, r"decoder.bias has shape \(50,\) there and \(51,\) here"),
        ({"num_hidden_layers": 3}, r"layers.3.attn.Wo.weight has shape \(16, 16\) there and None here"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tokenizer: Path, tmp_path: Path, changed: dict[str, Any], words: str
) -> None:
    path = checkpoint(tmp_path / "run", PackedLanguageModel(small()))
    with pytest.raises(ConfigError, match=words):
        check_checkpoint(str(path), tokenizer, PackedLanguageModel(small(**changed)))
