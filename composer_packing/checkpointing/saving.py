"""Writing checkpoints: what Composer is told, what its errors mean, and where the last checkpoint is.

On disk, Composer writes a checkpoint in place and links to the last one. A checkpoint that was cut off is overwritten
when a run comes to the same batch again. To an object store, Composer uploads checkpoints while the training continues,
and nothing is overwritten.
"""

import contextlib
import errno
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from composer import Event, State
from composer.utils import format_name_with_dist

from composer_packing.checkpointing.find import find_latest_batch
from composer_packing.checkpointing.object_store import list_folder
from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig

DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that takes no more bytes."""


def checkpoint_arguments(config: TrainConfig, is_to_save: Callable[[State, Event], bool]) -> dict[str, Any]:
    """Return the arguments about checkpoints of Composer's `Trainer`.

    Args:
        config: the run, as `RunFolder` gives it.
        is_to_save: whether to write a checkpoint now. Composer asks on every rank.
    """
    arguments: dict[str, Any] = {
        "save_folder": config.save_folder,
        "save_interval": is_to_save,
        # A run that resumes comes again to batches whose checkpoint was cut off or passed over.
        "save_overwrite": config.save_overwrite or config.resumes,
        "save_num_checkpoints_to_keep": config.save_num_checkpoints_to_keep,
        "load_path": config.load_path,
        "load_weights_only": config.load_weights_only,
    }
    if is_address(config.save_folder):
        arguments |= {
            "save_num_checkpoints_to_keep": 1,  # local copies; the store keeps all
            "save_overwrite": False,
            "save_latest_filename": None,  # Composer takes half a minute for a link, too long after SIGTERM
        }
    return arguments


def find_last_saved(config: TrainConfig, saved: Sequence[str], run_name: str) -> str | None:
    """Return where the last checkpoint of a run is, or None if there is none.

    Call this after `trainer.engine.close()`, which waits for uploads. The local copy of an uploaded checkpoint is
    removed.

    Args:
        config: the run.
        saved: paths of the checkpoints that this process has written, oldest first. The first rank writes for all.
        run_name: name of the run, as the trainer has it.

    Raises:
        ConfigError: the last checkpoint is not in the object store.
    """
    if not saved:
        return config.load_path
    if not is_address(config.save_folder):
        return saved[-1]
    file = Path(saved[-1])
    addresses = list_folder(format_name_with_dist(config.save_folder, run_name))
    if file.name not in addresses:
        raise ConfigError(
            f"save_folder={config.save_folder}: {file.name} could not be uploaded, see the error above; its copy is "
            f"{file}, and the last checkpoint in the store is {find_latest_batch(addresses) or 'none'}"
        )
    file.unlink()  # Composer leaves its copy in a temporary folder
    return addresses[file.name]


@contextlib.contextmanager
def shorten_save_errors(config: TrainConfig) -> Iterator[None]:
    """Turn errors of writing checkpoints that the user can fix into ConfigErrors of one line.

    Composer raises bare FileExistsErrors; they are told apart by their texts.
    """
    is_stored, where = is_address(config.save_folder), f"save_folder={config.save_folder}"
    try:
        yield
    except FileExistsError as error:
        if is_stored and "overwrite was set to False" in str(error):
            raise ConfigError(
                f"{where}: another run has written there under the same name; give another run_name"
            ) from error
        later, is_conflict, _ = str(error).partition(" may conflict")
        if not is_conflict:
            raise
        raise ConfigError(
            f"{where}: {later} is from a later batch; leave out autoresume=false to resume from there, or give "
            f"another run_name or save_overwrite=true"
        ) from error
    except (OSError, RuntimeError) as error:  # torch.save turns an OSError into a RuntimeError
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.errno in DISK_IS_FULL:
            disk = f"TMPDIR={tempfile.gettempdir()}" if is_stored else where
            raise ConfigError(
                f"{disk}: {cause.strerror}: make room and run the same command, which resumes from the last "
                f"checkpoint, if there is one"
            ) from error
        raise
