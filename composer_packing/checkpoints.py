"""What belongs to the checkpoints of a run besides Composer's own files: the tokenizer, and the check before starting
from one.
"""

import logging
import shutil
from pathlib import Path

import torch
from composer import Callback, Logger, State
from composer.models import ComposerModel
from composer.utils import dist, format_name_with_dist

from composer_packing.config import ConfigError

log = logging.getLogger(__name__)

TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file, in a corpus and beside checkpoints."""


class TokenizerSaver(Callback):
    """Copies the tokenizer to where the checkpoints go: without it they are of no use. Local folders only.

    Args:
        tokenizer: file to copy.
        save_folder: as Composer takes it, with `{run_name}` and the like.
    """

    def __init__(self, tokenizer: Path, save_folder: str) -> None:
        self._tokenizer = tokenizer
        self._save_folder = save_folder

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Copy; not before, as the folder may turn out to be another run's."""
        if dist.get_global_rank() == 0 and "://" not in self._save_folder:
            folder = Path(format_name_with_dist(self._save_folder, state.run_name))
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._tokenizer, folder / TOKENIZER)


def check_checkpoint(load_path: str, tokenizer: Path, model: ComposerModel) -> None:
    """Raise ConfigError where a checkpoint is not there, or comes from another tokenizer or model.

    Args:
        load_path: local file; of one in an object store nothing is checked.
        tokenizer: file of the tokenizer in use.
        model: what is to get the weights.
    """
    if "://" in load_path:
        return
    path = Path(load_path)
    if not path.is_file():
        raise ConfigError(f"load_path={load_path}: there is no such file; train it first, or give another checkpoint")
    beside = path.parent / TOKENIZER
    if not beside.is_file():
        log.warning("%s is missing: whether %s was trained with this tokenizer cannot be checked", beside, load_path)
    elif beside.read_bytes() != tokenizer.read_bytes():
        raise ConfigError(
            f"load_path={load_path}: was trained with another tokenizer, {beside}, than {tokenizer}; packages or "
            f"data.vocab_size differ: train it again, or give another checkpoint"
        )
    try:
        weights = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["state"]["model"]
        there = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    except Exception as error:  # unpickling raises what it likes
        raise ConfigError(f"load_path={load_path}: is no checkpoint of a run ({error!r:.200})") from error
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise ConfigError(
                f"load_path={load_path}: {name} has shape {there.get(name)} there and {here.get(name)} here; "
                f"give the model keys it was trained with"
            )
