import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_packing.checkpoints import FREE, RunIdentity, check_checkpoint, check_save_folder, check_tokenizer
from composer_packing.composer_model import PackedLanguageModel
from composer_packing.config import ConfigError
from composer_packing.dataspec import train_batches
from composer_packing.model import ModernBertConfig
from tests.test_dataspec import VOCABULARY, config_of, documents_of, trainer_of
from tests.test_model import small


def saved(path: Path, tokenizer: str, config: ModernBertConfig) -> str:
    """A checkpoint of a model of this shape."""
    state = {
        "model": PackedLanguageModel(config).state_dict(),
        "callbacks": {"RunIdentity": RunIdentity(tokenizer, config).state_dict()},
    }
    torch.save({"state": state}, path)
    return str(path)


def check(load_path: str, tokenizer: str, config: ModernBertConfig) -> None:
    trained_with = check_checkpoint(load_path, config)
    assert trained_with is not None
    check_tokenizer(load_path, trained_with, tokenizer)


def test_a_checkpoint_holds_tokenizer_and_shape_and_another_run_starts_from_its_weights(tmp_path: Path) -> None:
    config, folder = config_of(max_duration="1ba"), tmp_path / "runs" / "first"
    model = PackedLanguageModel(config.model)
    batches = train_batches(documents_of(60), config, VOCABULARY)
    identity = RunIdentity("one", config.model)
    trainer = trainer_of(config, batches, model, callbacks=[identity], save_folder=str(folder), run_name="first")
    trainer.fit()
    trainer.close()
    batches.close()
    for load_path in (folder / "latest-rank0.pt", folder / "latest-rank{rank}.pt"):
        check(str(load_path), "one", config.model)
    kept = torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["callbacks"]["RunIdentity"]
    assert kept == {"tokenizer": "one", "model": vars(config.model)}

    fresh = PackedLanguageModel(config.model)
    again = train_batches(documents_of(60), config, VOCABULARY)
    trainer = trainer_of(
        config,
        again,
        fresh,
        load_path=str(folder / "latest-rank{rank}.pt"),
        load_weights_only=True,
        callbacks=[identity],
    )
    again.close()
    trainer.close()
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), fresh.parameters(), strict=True))
    assert int(trainer.state.timestamp.token) == 0, "the clock starts anew"


def test_a_checkpoint_that_is_not_there_or_is_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_path=nowhere.pt: there is no such file; train it first, or give"):
        check("nowhere.pt", "one", small())
    with pytest.raises(ConfigError, match="is a folder; give a file in it, or give another checkpoint"):
        check(str(tmp_path), "one", small())


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    half = Path(saved(path, "one", small())).read_bytes()[:5000]
    for content in (b"", b"text", b"\x80\x04K\x01.", half):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a.pt: is no whole checkpoint of a run \(\w+\)$") as caught:
            check(str(path), "one", small())
        assert "\n" not in str(caught.value)


def test_another_tokenizer_is_an_error(tmp_path: Path) -> None:
    load_path = saved(tmp_path / "a.pt", "one", small())
    check(load_path, "one", small())
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        check(load_path, "another", small())


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(ModernBertConfig)])
def test_every_key_of_the_model_must_agree_that_means_something_to_the_weights(tmp_path: Path, key: str) -> None:
    """Heads, windows and rotary bases leave shapes as they are."""
    load_path = saved(tmp_path / "a.pt", "one", small())
    before = getattr(small(), key)
    config: Any = small(**{key: not before if key == "causal" else before / 2 if before < 1 else 2 * before})
    if key in FREE:
        check(load_path, "one", config)
    else:
        now = getattr(config, key)
        with pytest.raises(ConfigError, match=rf"was trained with model.{key}={before}, not {now}; give the same"):
            check(load_path, "one", config)


@pytest.mark.parametrize("folder", ["{file}/runs", "{file}", "/proc/nowhere/{{run_name}}"])
def test_a_folder_that_cannot_be_made_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save_folder = folder.format(file=tmp_path / "file")
    with pytest.raises(
        ConfigError, match=r"^save_folder=.*: (Not a directory|File exists|No such file .*): .*; give an"
    ):
        check_save_folder(save_folder)


def test_a_folder_that_can_be_made_is_made_as_far_as_its_name_is_known(tmp_path: Path) -> None:
    check_save_folder(f"{tmp_path}/runs/of-{{run_name}}/more")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == []
    check_save_folder("s3://bucket/runs")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read-only to the superuser, as whom tests may run."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written; give another"):
        check_save_folder(str(tmp_path))
