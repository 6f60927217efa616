import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Timestamp

from composer_packing.checkpointing.identity import Checkpoint, RunIdentity, read_checkpoint
from composer_packing.checkpointing.run_folder import RunFolder, check_save_folder
from composer_packing.common.errors import ConfigError
from composer_packing.common.resume import Resume, declared_keys
from composer_packing.config.schema import OptimizerConfig
from composer_packing.model.config import ModernBertConfig
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from tests.tools.models import small
from tests.tools.runs import VOCABULARY, config_of, documents_of, trainer_of


def saved(path: Path, tokenizer: str, model: ModernBertConfig) -> str:
    """Write a checkpoint of a model of this shape, and return its path."""
    state = {
        "model": PackedLanguageModel(model).state_dict(),
        "callbacks": {"RunIdentity": RunIdentity(tokenizer, config_of(model=model)).state_dict()},
        "timestamp": {"Timestamp": Timestamp().state_dict()},
        "optimizers": {},
        "run_name": "first",
    }
    torch.save({"state": state}, path)
    return str(path)


def check(load_path: str, tokenizer: str, model: ModernBertConfig, **more: Any) -> None:
    config = config_of(model=model, load_path=load_path, **more)
    checkpoint = read_checkpoint(config, Path(load_path.replace("{rank}", "0")))
    checkpoint.check_tokenizer(tokenizer)


def test_a_checkpoint_holds_tokenizer_and_model_and_another_run_starts_from_its_weights(
    tmp_path: Path,
) -> None:
    config, folder = config_of(max_duration="1ba"), tmp_path / "runs" / "first"
    model = PackedLanguageModel(config.model)
    batches = train_batches(documents_of(60), config, VOCABULARY)
    identity = RunIdentity("one", config)
    trainer = trainer_of(config, batches, model, callbacks=[identity], save_folder=str(folder), run_name="first")
    trainer.fit()
    trainer.close()
    batches.close()
    for load_path in (folder / "latest-rank0.pt", folder / "latest-rank{rank}.pt"):
        check(str(load_path), "one", config.model)
    kept = torch.load(folder / "latest-rank0.pt", weights_only=False)["state"]["callbacks"]["RunIdentity"]
    assert (kept["tokenizer"], kept["model"]) == ("one", vars(config.model))

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
    assert int(trainer.state.timestamp.token) == 0, "the clock starts at zero"


def test_a_missing_checkpoint_or_a_folder_instead_of_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_path=nowhere.pt: there is no such file; train it first, or give"):
        check("nowhere.pt", "one", small())
    with pytest.raises(ConfigError, match="is a folder; give a file in it, or give another checkpoint"):
        check(str(tmp_path), "one", small())


def test_a_run_does_not_resume_from_the_checkpoint_of_a_run_with_another_name(tmp_path: Path) -> None:
    saved(tmp_path / "ep0-ba9-rank0.pt", "one", small())
    for run_name in ("first", "other"):
        folder = RunFolder(config_of(model=small(), save_folder=str(tmp_path), run_name=run_name))
        if run_name == "first":
            assert folder.read_checkpoint() is not None
        else:
            with pytest.raises(
                ConfigError, match=r"ba9-rank0\.pt, was written by run_name=first; put {run_name} into save_folder"
            ):
                folder.read_checkpoint()
        del folder  # releases its lock


def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    half = Path(saved(path, "one", small())).read_bytes()[:5000]
    for content in (b"", b"text", b"\x80\x04K\x01.", half):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a.pt: is not a whole checkpoint of a run \(\w+\)$") as caught:
            check(str(path), "one", small())
        assert "\n" not in str(caught.value)


def test_another_tokenizer_is_an_error(tmp_path: Path) -> None:
    load_path = saved(tmp_path / "a.pt", "one", small())
    check(load_path, "one", small())
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        check(load_path, "another", small())


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(ModernBertConfig)])
def test_a_key_of_the_model_must_match_as_it_declares(tmp_path: Path, key: str) -> None:
    """The shapes of the weights alone do not tell: heads, windows and rotary bases leave them as they are."""
    load_path = saved(tmp_path / "a.pt", "one", small())
    before = getattr(small(), key)
    config: Any = small(**{key: not before if key == "causal" else before / 2 if before < 1 else 2 * before})
    now, declared = getattr(config, key), declared_keys(ModernBertConfig)[key]
    for weights_only in (True, False):
        if declared is Resume.FREE or (declared is Resume.TRAINING and weights_only):
            check(load_path, "one", config, load_weights_only=weights_only)
        else:
            with pytest.raises(ConfigError, match=rf"was trained with model.{key}={before}, not {now}; give the same"):
                check(load_path, "one", config, load_weights_only=weights_only)


@pytest.mark.parametrize("folder", ["{file}/runs", "{file}", "/proc/nowhere/{{run_name}}"])
def test_a_folder_that_cannot_be_made_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save_folder = folder.format(file=tmp_path / "file")
    with pytest.raises(
        ConfigError, match=r"^save_folder=.*: (Not a directory|File exists|No such file .*): .*; give an"
    ):
        check_save_folder(save_folder)


def test_a_folder_is_made_up_to_the_first_part_whose_name_is_not_known_yet(tmp_path: Path) -> None:
    check_save_folder(f"{tmp_path}/runs/of-{{run_name}}/more")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as the superuser, who can write everywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be written; give another"):
        check_save_folder(str(tmp_path))


def test_a_checkpoint_without_an_optimizer_or_from_another_program_is_named(tmp_path: Path) -> None:
    load_path = saved(tmp_path / "a.pt", "one", small())
    there = torch.load(load_path, weights_only=False)
    del there["state"]["optimizers"]
    torch.save(there, load_path)
    check(load_path, "one", small(), load_weights_only=True)
    with pytest.raises(ConfigError, match="the optimizer must stay as it was: the checkpoint has none; give"):
        check(load_path, "one", small())
    del there["state"]["callbacks"]["RunIdentity"]
    torch.save(there, load_path)
    with pytest.raises(ConfigError, match=r"a\.pt: has no RunIdentity; give a checkpoint that train\.py has written"):
        check(load_path, "one", small(), load_weights_only=True)


def test_the_settings_of_the_optimizer_must_match_if_a_run_resumes(tmp_path: Path) -> None:
    """Composer would load the old settings and not say so."""
    load_path = saved(tmp_path / "a.pt", "one", small())
    changed = OptimizerConfig(lr=1e-3, betas=(0.9, 0.95))
    check(load_path, "one", small(), optimizer=changed, load_weights_only=True)
    with pytest.raises(ConfigError, match=r"lr was 0.0008, is 0.001; give the same, or start another") as caught:
        check(load_path, "one", small(), optimizer=changed)
    assert "optimizer.betas was [0.9, 0.98], is [0.9, 0.95]" in str(caught.value)


@pytest.mark.parametrize(
    ("max_duration", "is_over"),
    [("999tok", True), ("1000tok", True), ("1001tok", False), ("7ba", True), ("8ba", False)],
)
def test_a_checkpoint_tells_whether_a_training_is_over(max_duration: str, is_over: bool) -> None:
    checkpoint = Checkpoint("a.pt", "first", "one", {"tok": 1000, "sp": 40, "ba": 7})
    assert checkpoint.is_end_of(config_of(max_duration=max_duration)) is is_over
    assert not checkpoint.is_end_of(config_of(max_duration=max_duration, load_weights_only=True))
    owing = dataclasses.replace(checkpoint, owes_evaluation=True)
    assert not owing.is_end_of(config_of(max_duration=max_duration))
