"""What a checkpoint says about its run, and what must match before another run starts from the checkpoint.

Weights are of no use without the tokenizer that they were trained with. In a model with other windows they have the
same shapes and mean something else. So the checkpoint itself holds both the tokenizer and the settings of the model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Callback

from composer_packing.common.durations import UNITS, parse_duration
from composer_packing.common.errors import ConfigError
from composer_packing.common.resume import Resume, keys_that_are
from composer_packing.common.snapshots import differences
from composer_packing.config.schema import OptimizerConfig, TrainConfig
from composer_packing.model.config import ModernBertConfig


class RunIdentity(Callback):
    """Puts the tokenizer and the settings of model and optimizer into every checkpoint.

    A checkpoint holds three values at `["state"]["callbacks"]["RunIdentity"]`:

    =============  =====================================================
    key            value
    =============  =====================================================
    `"tokenizer"`  text of the tokenizer, as `TextTokenizer` has it
    `"model"`      the keys of `ModernBertConfig`
    `"optimizer"`  the keys of `OptimizerConfig`, as `optimizer.lr`
    =============  =====================================================

    Args:
        tokenizer: text of the tokenizer.
        config: the run.
    """

    def __init__(self, tokenizer: str, config: TrainConfig) -> None:
        self._state = {
            "tokenizer": tokenizer,
            "model": dict(vars(config.model)),
            "optimizer": _optimizer_settings(config),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint is to hold."""
        return self._state


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says about its run.

    Attributes:
        path: path or address of the checkpoint, as `load_path` gives it.
        run_name: name of the run that wrote the checkpoint.
        tokenizer: text of the tokenizer that the run was trained with.
        clock: number of tokens, documents and batches that the run was trained on, by unit.
        owes_evaluation: the evaluation after the last batch was broken off.
    """

    path: str
    run_name: str
    tokenizer: str
    clock: dict[str, int]
    owes_evaluation: bool = False

    def check_tokenizer(self, tokenizer: str) -> None:
        """Raise ConfigError if the run was trained with another tokenizer than the one with this text."""
        if self.tokenizer != tokenizer:
            raise ConfigError(
                f"checkpoint {self.path}: was trained with another tokenizer; give that tokenizer (for data.docs the "
                f"same packages and vocab_size) or another checkpoint"
            )

    def is_end_of(self, config: TrainConfig) -> bool:
        """Return whether a run that resumes from the checkpoint has nothing left to do."""
        end = parse_duration("max_duration", config.max_duration)
        return not config.load_weights_only and self.clock[end.unit] >= end.count and not self.owes_evaluation


def read_checkpoint(config: TrainConfig, path: Path) -> Checkpoint:
    """Return what a checkpoint says about its run, after a check that this run may start from the checkpoint.

    The file is a pickle: reading it runs the code that it holds. Composer reads checkpoints in the same way.

    Args:
        config: the run. Its `load_path` is the name of the checkpoint in errors.
        path: the file at `load_path`, or a copy of it.

    Raises:
        ConfigError: the file is missing or damaged; the checkpoint comes from a model with other settings; or the run
            resumes, and the checkpoint comes from an optimizer with other settings.
    """
    load_path, resumes = config.load_path, not config.load_weights_only
    assert load_path is not None
    if not path.is_file():
        wrong = "is a folder; give a file in it" if path.is_dir() else "there is no such file; train it first"
        raise ConfigError(f"load_path={load_path}: {wrong}, or give another checkpoint")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["state"]
        saved, timestamp = state["callbacks"].get("RunIdentity"), state["timestamp"]["Timestamp"]
        clock = {unit: int(timestamp[names.timestamp_name]) for unit, names in UNITS.items()}
        run_name = str(state["run_name"])
        stop_at_sigterm = state["callbacks"].get("StopAtSigterm", {})
    except Exception as error:  # a damaged pickle can raise any error
        raise ConfigError(
            f"load_path={load_path}: is not a whole checkpoint of a run ({type(error).__name__})"
        ) from error
    if saved is None:
        raise ConfigError(f"load_path={load_path}: has no RunIdentity; give a checkpoint that train.py has written")
    for key in keys_that_are(ModernBertConfig, Resume.WEIGHTS, *([Resume.TRAINING] if resumes else [])):
        was, value = saved["model"].get(key), getattr(config.model, key)
        if was != value:
            raise ConfigError(f"checkpoint {load_path}: was trained with model.{key}={was}, not {value}; give the same")
    if resumes:
        found = differences(saved.get("optimizer", {}), _optimizer_settings(config))
        if "optimizers" not in state:
            found = ["the checkpoint has none"]
        if found:
            raise ConfigError(
                f"checkpoint {load_path}: the optimizer must stay as it was: {'; '.join(found)}; give the same, or "
                f"start another run_name from these weights, with load_weights_only=true"
            )
    return Checkpoint(load_path, run_name, saved["tokenizer"], clock, bool(stop_at_sigterm.get("owes_evaluation")))


def _optimizer_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the settings from which the optimizer's moments and steps follow."""
    settings = {key: getattr(config.optimizer, key) for key in keys_that_are(OptimizerConfig, Resume.TRAINING)}
    settings["betas"] = list(settings["betas"])  # as checkpoints hold them
    return {f"optimizer.{key}": value for key, value in settings.items()}
