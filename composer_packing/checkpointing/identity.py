"""What a checkpoint says of the run it is of, and what must agree before another starts from it.

Weights are of no use without the tokenizer they were trained with, and mean something else in a model that has the same
shapes and another window. Both are kept in the checkpoint itself, so that they cannot be exchanged.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Callback

from composer_packing.common.durations import UNITS, parse_duration
from composer_packing.common.errors import ConfigError
from composer_packing.common.snapshots import differences
from composer_packing.config.schema import TrainConfig

FREE = ("initializer_range",)
"""Keys of a model in which the run that goes on may differ from the one that was."""

FREE_WEIGHTS = ("causal", "attn_out_dropout", *FREE)
"""Keys in which one that takes only the weights may."""


class RunIdentity(Callback):
    """Puts the tokenizer, the shape of the model and the settings of the optimizer into every checkpoint.

    They are at `["state"]["callbacks"]["RunIdentity"]`: `"tokenizer"`, the text of it, `"model"`, the keys of
    `ModernBertConfig`, and `"optimizer"`, those of `OptimizerConfig`.

    Args:
        tokenizer: its text, as `TextTokenizer` has it.
        config: the run.
    """

    def __init__(self, tokenizer: str, config: TrainConfig) -> None:
        self._state = {"tokenizer": tokenizer, "model": dict(vars(config.model)), "optimizer": _optimizer_of(config)}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint gets."""
        return self._state


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint says of its run.

    Attributes:
        path: as it was given.
        run_name: of the run that wrote it.
        tokenizer: text of the tokenizer that it was trained with.
        clock: tokens, documents and batches that it was trained on, by unit.
        owes_evaluation: the evaluation behind its last batch was broken off.
    """

    path: str
    run_name: str
    tokenizer: str
    clock: dict[str, int]
    owes_evaluation: bool = False

    def check_tokenizer(self, tokenizer: str) -> None:
        """Raise ConfigError unless it was trained with the tokenizer of this text."""
        if self.tokenizer != tokenizer:
            raise ConfigError(
                f"checkpoint {self.path}: was trained with another tokenizer; give that one, or for data.docs the same "
                f"packages and vocab_size, or another checkpoint"
            )

    def is_end_of(self, config: TrainConfig) -> bool:
        """Whether a run that goes on from it has nothing left to do."""
        end = parse_duration("max_duration", config.max_duration)
        return not config.load_weights_only and self.clock[end.unit] >= end.count and not self.owes_evaluation


def read_checkpoint(config: TrainConfig, path: Path) -> Checkpoint:
    """What the checkpoint that a run loads says of its own.

    Args:
        config: the run.
        path: the file that its `load_path` names, or a copy of it.

    Raises:
        ConfigError: the checkpoint is not there or damaged, or comes from another model, or another optimizer where
            that goes on.
    """
    load_path = config.load_path
    assert load_path is not None
    if not path.is_file():
        wrong = "is a folder; give a file in it" if path.is_dir() else "there is no such file; train it first"
        raise ConfigError(f"load_path={load_path}: {wrong}, or give another checkpoint")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["state"]
        there, timestamp = state["callbacks"].get("RunIdentity"), state["timestamp"]["Timestamp"]
        clock = {unit: int(timestamp[names.timestamp_name]) for unit, names in UNITS.items()}
        run_name = str(state["run_name"])
        stopped = state["callbacks"].get("StopAtSigterm", {})
    except Exception as error:  # unpickling raises what it likes
        raise ConfigError(f"load_path={load_path}: is no whole checkpoint of a run ({type(error).__name__})") from error
    if there is None:
        raise ConfigError(f"load_path={load_path}: holds no RunIdentity, as those of train.py do; give one that does")
    goes_on = not config.load_weights_only
    for key, value in vars(config.model).items():
        if key not in (FREE if goes_on else FREE_WEIGHTS) and there["model"].get(key) != value:
            raise ConfigError(
                f"checkpoint {load_path}: was trained with model.{key}={there['model'].get(key)}, not {value}; "
                f"give the same"
            )
    found = differences(there.get("optimizer", {}), _optimizer_of(config))
    if goes_on and (found or "optimizers" not in state):
        raise ConfigError(
            f"checkpoint {load_path}: its optimizer must go on as it is: {'; '.join(found) or 'there is none'}; give "
            f"the same, or begin another run_name from its weights, with load_weights_only=true"
        )
    return Checkpoint(load_path, run_name, there["tokenizer"], clock, bool(stopped.get("owes_evaluation")))


def _optimizer_of(config: TrainConfig) -> dict[str, Any]:
    settings = vars(config.optimizer) | {"betas": list(config.optimizer.betas)}
    return {f"optimizer.{key}": value for key, value in settings.items()}
