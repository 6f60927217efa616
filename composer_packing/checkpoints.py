"""What a checkpoint says of the run it is of, and what must agree before another starts from it.

Weights are of no use without the tokenizer they were trained with, and mean something else in a model that has the same
shapes and another window. Both are kept in the checkpoint itself, so that they cannot be exchanged.
"""

from pathlib import Path
from typing import Any

import torch
from composer import Callback
from composer.models import ComposerModel

from composer_packing.config import ConfigError
from composer_packing.model import ModernBertConfig

FREE = ("causal", "attn_out_dropout", "initializer_range")
"""Keys of a model in which the run that goes on may differ from the one that was."""


class RunIdentity(Callback):
    """Puts the tokenizer and the shape of the model into every checkpoint.

    They are at `["state"]["callbacks"]["RunIdentity"]`: `"tokenizer"`, the text of its file, and `"model"`, the keys of
    `ModernBertConfig`.

    Args:
        tokenizer: its file.
        model: the shape.
    """

    def __init__(self, tokenizer: Path, model: ModernBertConfig) -> None:
        self._state = {"tokenizer": tokenizer.read_text(encoding="utf-8"), "model": dict(vars(model))}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint gets."""
        return self._state


def check_checkpoint(load_path: str, identity: RunIdentity, model: ComposerModel) -> None:
    """Raise ConfigError where a checkpoint is not there, or comes from another tokenizer or model.

    Args:
        load_path: local file; of one in an object store nothing is checked.
        identity: the tokenizer and the model's keys of the run that is to start.
        model: what is to get the weights.
    """
    if "://" in load_path:
        return
    path, here = Path(load_path.replace("{rank}", "0")), identity.state_dict()
    if not path.is_file():
        wrong = "is a folder; give a file in it" if path.is_dir() else "there is no such file; train it first"
        raise ConfigError(f"load_path={load_path}: {wrong}, or give another checkpoint")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["state"]
        there, weights = state["callbacks"]["RunIdentity"], state["model"]
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    except Exception as error:  # unpickling raises what it likes
        raise ConfigError(f"load_path={load_path}: is no checkpoint of a run of ours ({error!r:.200})") from error
    for key, value in here["model"].items():
        if key not in FREE and there["model"].get(key) != value:
            raise ConfigError(
                f"load_path={load_path}: was trained with model.{key}={there['model'].get(key)}, not {value}; "
                f"give the same"
            )
    if there["tokenizer"] != here["tokenizer"]:
        raise ConfigError(
            f"load_path={load_path}: was trained with another tokenizer; packages or data.vocab_size differ: train it "
            f"again, or give another checkpoint"
        )
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise ConfigError(
                f"load_path={load_path}: {name} has shape {shapes.get(name)} there and {expected.get(name)} here"
            )
