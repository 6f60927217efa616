"""The folder with the checkpoints of a run: one run at a time writes there, and the next one resumes from the last
whole checkpoint.

Nothing is removed or overwritten to resume.
"""

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from composer.utils import dist, format_name_with_dist
from filelock import FileLock, Timeout

from composer_packing.checkpointing.find import find_last_whole, find_latest_batch, is_whole
from composer_packing.checkpointing.identity import Checkpoint, read_checkpoint
from composer_packing.checkpointing.object_store import check_store, list_folder, local_copy
from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WAIT_SECONDS = 60
"""How long to wait until another run has ended: longer than a run takes to write its last checkpoint after SIGTERM."""


def check_save_folder(save_folder: str) -> None:
    """Make the folder of checkpoints, or write a small object to the object store.

    Args:
        save_folder: path or address as Composer takes it. Folders from the first `{run_name}` or the like on are not
            made, as their names are not known yet.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    if is_address(save_folder):
        _on_first_rank(lambda: check_store(save_folder))
    else:
        _make_folder(Path(*itertools.takewhile(lambda part: "{" not in part, Path(save_folder).parts)), save_folder)


class RunFolder:
    """The folder of a run: holds its lock, and says from which checkpoint the run starts.

    Every rank makes one; the first rank looks and locks for all. The lock is held as long as the object lives. A run
    without a name has no folder of its own yet: nothing is locked, and Composer makes the folder.

    Args:
        config: the run.

    Attributes:
        config: the run as it starts: `load_path` is the last whole checkpoint of the folder, if the run resumes and
            there is one. Otherwise the same as given.
        resumes_own_run: whether `load_path` is that checkpoint.

    Raises:
        ConfigError: another run writes there; or the run may not overwrite the objects in a store; or the folder or
            store cannot be read.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._lock: FileLock | None = None
        own_checkpoint = _on_first_rank(self._lock_and_find_own_checkpoint)
        self.resumes_own_run = own_checkpoint is not None
        if own_checkpoint is not None:
            self.config = replace(config, load_path=own_checkpoint, load_weights_only=False)

    def read_checkpoint(self) -> Checkpoint | None:
        """Return what the checkpoint says from which the run starts, or None if the run starts from the beginning.

        Raises:
            ConfigError: the checkpoint is missing or damaged, does not fit this run, or lies in this run's folder
                although a run with another name has written it.
        """
        return _on_first_rank(self._read_checkpoint)

    def _read_checkpoint(self) -> Checkpoint | None:
        config = self.config
        if config.load_path is None:
            return None
        with local_copy(config.load_path) as file:
            was_checked = self.resumes_own_run and not is_address(config.load_path)
            if not was_checked and file.is_file() and not is_whole(file):
                raise ConfigError(
                    f"load_path={config.load_path}: is cut off or damaged; remove it, or give another checkpoint"
                )
            checkpoint = read_checkpoint(config, file)
        if self.resumes_own_run and checkpoint.run_name != config.run_name:
            raise ConfigError(
                f"save_folder={config.save_folder}: its last checkpoint, {config.load_path}, was written by "
                f"run_name={checkpoint.run_name}; put {{run_name}} into save_folder, or give another save_folder"
            )
        return checkpoint

    def _lock_and_find_own_checkpoint(self) -> str | None:
        """Return the checkpoint of this run to resume from, or None if there is none or the run is not to resume."""
        config = self.config
        if config.run_name is None:
            return None
        folder = format_name_with_dist(config.save_folder, config.run_name)
        if is_address(folder):
            return self._find_in_store(folder)
        _make_folder(Path(folder), config.save_folder)
        self._lock_folder(Path(folder))
        whole = find_last_whole(Path(folder)) if config.resumes else None
        return None if whole is None else str(whole)

    def _find_in_store(self, folder: str) -> str | None:
        latest = find_latest_batch(list_folder(folder))
        if latest is not None and not self.config.resumes:
            raise ConfigError(
                f"save_folder={self.config.save_folder}: there is {latest}, and nothing is overwritten in an object "
                f"store; leave out autoresume=false and save_overwrite=true to resume from there, or give another "
                f"run_name"
            )
        return latest

    def _lock_folder(self, folder: Path) -> None:
        """Keep other runs out. The system releases the lock when this process ends, also after SIGKILL."""
        self._lock = FileLock(folder / ".lock", fallback_to_soft=False)
        try:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                log.warning("%s: another run writes there; waiting up to %d seconds for its end", folder, WAIT_SECONDS)
                self._lock.acquire(timeout=WAIT_SECONDS)
        except Timeout as error:
            raise ConfigError(f"{folder}: another run writes there; end it, or give another run_name") from error
        except OSError as error:
            log.warning("%s: cannot be locked (%s); make sure that only one run writes there", folder, error)


def _make_folder(folder: Path, save_folder: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_folder={save_folder}: {error.strerror}: {error.filename}; give another") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"save_folder={save_folder}: {folder} cannot be written; give another")


def _on_first_rank(function: Callable[[], Result]) -> Result:
    """Call a function on the first rank, and return its result on all ranks. A ConfigError is raised on all ranks."""
    outcome: list[Any] = [None]
    if dist.get_global_rank() == 0:
        try:
            outcome = [function()]
        except OSError as error:
            what = f"{error.filename}: {error.strerror}; make it readable" if error.filename else str(error)
            outcome = [ConfigError(what)]
        except ConfigError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ConfigError):
        raise outcome[0]
    result: Result = outcome[0]
    return result
