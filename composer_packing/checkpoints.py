"""What a checkpoint says of the run it is of, and what must agree before another starts from it.

Weights are of no use without the tokenizer they were trained with, and mean something else in a model that has the same
shapes and another window. Both are kept in the checkpoint itself, so that they cannot be exchanged.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from composer import Callback

from composer_packing.config import ConfigError
from composer_packing.model import ModernBertConfig

FREE = ("causal", "attn_out_dropout", "initializer_range")
"""Keys of a model in which the run that goes on may differ from the one that was."""


class RunIdentity(Callback):
    """Puts the tokenizer and the shape of the model into every checkpoint.

    They are at `["state"]["callbacks"]["RunIdentity"]`: `"tokenizer"`, the text of it, and `"model"`, the keys of
    `ModernBertConfig`.

    Args:
        tokenizer: its text, as `TextTokenizer` has it.
        model: the shape.
    """

    def __init__(self, tokenizer: str, model: ModernBertConfig) -> None:
        self._state = {"tokenizer": tokenizer, "model": dict(vars(model))}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint gets."""
        return self._state


def check_save_folder(save_folder: str) -> None:
    """Make the folder of checkpoints, as far as its name is known; ConfigError where that cannot be.

    Args:
        save_folder: as Composer takes it, with `{run_name}` and the like; in an object store nothing is checked.
    """
    if "://" in save_folder:
        return
    folder = Path(*itertools.takewhile(lambda part: "{" not in part, Path(save_folder).parts))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_folder={save_folder}: {error.strerror}: {error.filename}; give another") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"save_folder={save_folder}: {folder} cannot be written; give another")


def check_checkpoint(load_path: str, model: ModernBertConfig) -> str | None:
    """The text of the tokenizer a checkpoint was trained with; None for one in an object store, which is not looked at.

    Args:
        load_path: the checkpoint.
        model: shape of the model that is to get its weights.

    Raises:
        ConfigError: the checkpoint is not there, or comes from another model.
    """
    if "://" in load_path:
        return None
    path = Path(load_path.replace("{rank}", "0"))
    if not path.is_file():
        wrong = "is a folder; give a file in it" if path.is_dir() else "there is no such file; train it first"
        raise ConfigError(f"load_path={load_path}: {wrong}, or give another checkpoint")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["state"]
        there = state["callbacks"]["RunIdentity"]
    except Exception as error:  # unpickling raises what it likes
        raise ConfigError(f"load_path={load_path}: is no whole checkpoint of a run ({type(error).__name__})") from error
    for key, value in vars(model).items():
        if key not in FREE and there["model"].get(key) != value:
            raise ConfigError(
                f"load_path={load_path}: was trained with model.{key}={there['model'].get(key)}, not {value}; "
                f"give the same"
            )
    trained_with: str = there["tokenizer"]
    return trained_with


def check_tokenizer(load_path: str, trained_with: str, tokenizer: str) -> None:
    """Raise ConfigError where a checkpoint was trained with another tokenizer.

    Args:
        load_path: the checkpoint.
        trained_with: what `check_checkpoint` gave.
        tokenizer: text of the one in use.
    """
    if trained_with != tokenizer:
        raise ConfigError(
            f"load_path={load_path}: was trained with another tokenizer; give that one, or for data.docs the same "
            f"packages and vocab_size, or another checkpoint"
        )
