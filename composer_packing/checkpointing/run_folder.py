"""The folder with the checkpoints of a run: one writes there at a time, and the next goes on from the last whole one.

Composer writes a checkpoint in place, so that a process that was killed, or a disk that was full, leaves one that is
cut off; it is written over when a run comes to it again. Nothing is removed to go on. In an object store, to which
Composer uploads while training goes on, nothing is written over either: the one of the latest batch is the last.
"""

import contextlib
import errno
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from composer.utils import dist, format_name_with_dist
from filelock import FileLock, Timeout

from composer_packing.checkpointing.find import is_whole, last_checkpoint, latest_of
from composer_packing.checkpointing.identity import Checkpoint, read_checkpoint
from composer_packing.checkpointing.object_store import addresses_in, check_store, local_copy
from composer_packing.checkpointing.sigterm import StopAtSigterm
from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig

log = logging.getLogger(__name__)

Found = TypeVar("Found")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that takes no more."""

WAIT_SECONDS = 60
"""How long to wait for a run that ends: longer than one may take to write its last checkpoint."""


def check_save_folder(save_folder: str) -> None:
    """Make the folder of checkpoints, as far as its name is known; ConfigError where that cannot be.

    Args:
        save_folder: as Composer takes it, with `{run_name}` and the like; in an object store a small object is written.
    """
    if is_address(save_folder):
        _on_first_rank(lambda: check_store(save_folder))
    else:
        _make(Path(*itertools.takewhile(lambda part: "{" not in part, Path(save_folder).parts)), save_folder)


def _make(folder: Path, save_folder: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"save_folder={save_folder}: {error.strerror}: {error.filename}; give another") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"save_folder={save_folder}: {folder} cannot be written; give another")


class RunFolder:
    """The folder of a run; every rank makes one, and the first acts for all.

    One that has no name yet is left to Composer.

    Args:
        config: the run.

    Attributes:
        config: the same, or, where the run is to go on and there is a whole checkpoint, from the last of those.
        goes_on: it is the latter.

    Raises:
        ConfigError: another run writes there, or has written what must not be written over; a store cannot be asked.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._is_in_store = is_address(config.save_folder)
        self._lock: FileLock | None = None
        last = _on_first_rank(self._last)
        self.goes_on = last is not None
        if last is not None:
            self.config = replace(config, load_path=last, load_weights_only=False)

    def read_checkpoint(self) -> Checkpoint | None:
        """What the checkpoint that the run starts from says of its own, if there is one.

        Raises:
            ConfigError: it is none, cannot be had, is of another model, or of another run that this one would go on.
        """
        return _on_first_rank(self._read)

    def _read(self) -> Checkpoint | None:
        load_path = self.config.load_path
        if load_path is None:
            return None
        with local_copy(load_path) as file:
            is_known_whole = self.goes_on and not self._is_in_store
            if not is_known_whole and file.is_file() and not is_whole(file):
                raise ConfigError(
                    f"load_path={load_path}: is cut off or damaged; remove it, or give another checkpoint"
                )
            found = read_checkpoint(self.config, file)
        if self.goes_on and found.run_name != self.config.run_name:
            raise ConfigError(
                f"save_folder={self.config.save_folder}: its last checkpoint, {load_path}, is of "
                f"run_name={found.run_name}; put {{run_name}} into save_folder, or give another"
            )
        return found

    def _last(self) -> str | None:
        """The checkpoint to go on from, if there is one."""
        config = self.config
        if config.run_name is None:
            return None
        folder = format_name_with_dist(config.save_folder, config.run_name)
        if self._is_in_store:
            last = latest_of(addresses_in(folder))
            if last is not None and not config.resumes:
                raise ConfigError(
                    f"save_folder={config.save_folder}: there is {last}, and nothing is written over in an object "
                    f"store; leave autoresume=false and save_overwrite=true out to go on from there, or give another "
                    f"run_name"
                )
            return last
        _make(Path(folder), config.save_folder)
        self._hold(Path(folder))
        whole = last_checkpoint(Path(folder)) if config.resumes else None
        return None if whole is None else str(whole)

    def trainer_settings(self, stopping: StopAtSigterm) -> dict[str, Any]:
        """What Composer's trainer is told of checkpoints.

        Args:
            stopping: says when one is to be written.
        """
        config = self.config
        in_store = {
            "save_num_checkpoints_to_keep": 1,  # of those from which it uploads
            "save_overwrite": False,
            "save_latest_filename": None,  # Composer takes half a minute for a link, too long at SIGTERM
        }
        return {
            "save_folder": config.save_folder,
            "save_interval": stopping.is_to_save,
            # A run that goes on comes again to checkpoints that are cut off, or that it has passed over.
            "save_overwrite": config.save_overwrite or config.resumes,
            "save_num_checkpoints_to_keep": config.save_num_checkpoints_to_keep,
            "load_path": config.load_path,
            "load_weights_only": config.load_weights_only,
            **(in_store if self._is_in_store else {}),
        }

    def last_written(self, written: Sequence[str], run_name: str) -> str | None:
        """Where the last checkpoint is; to be asked for behind `trainer.engine.close()`, which waits for uploads.

        Args:
            written: those of this process, oldest first; the first rank writes for all.
            run_name: that of the trainer.

        Raises:
            ConfigError: it has not come to the store.
        """
        if not written or not self._is_in_store:
            return written[-1] if written else self.config.load_path
        file = Path(written[-1])
        addresses = addresses_in(format_name_with_dist(self.config.save_folder, run_name))
        if file.name not in addresses:
            raise ConfigError(
                f"save_folder={self.config.save_folder}: {file.name} could not be uploaded, as is said above; it is at "
                f"{file}, and the last one there is {latest_of(addresses) or 'none'}"
            )
        file.unlink()  # Composer leaves it in a folder for temporary files
        return addresses[file.name]

    @contextlib.contextmanager
    def errors_in_a_line(self) -> Iterator[None]:
        """Make of what goes wrong with the files of checkpoints a ConfigError."""
        where = f"save_folder={self.config.save_folder}"
        try:
            yield
        except FileExistsError as error:
            if self._is_in_store and "overwrite was set to False" in str(error):
                raise ConfigError(f"{where}: another run of this name has written there; give another") from error
            later, words, _ = str(error).partition(" may conflict")
            if not words:
                raise
            raise ConfigError(
                f"{where}: {later} is of a later batch; leave autoresume=false out to go on from there, or give "
                f"another run_name or save_overwrite=true"
            ) from error
        except (OSError, RuntimeError) as error:  # the latter is what torch.save makes of the former
            cause = error if isinstance(error, OSError) else error.__context__
            if isinstance(cause, OSError) and cause.errno in FULL:
                disk = f"TMPDIR={tempfile.gettempdir()}" if self._is_in_store else where
                what = f"{disk}: {cause.strerror}: make room and run the same command, which goes on from the last"
                raise ConfigError(f"{what} checkpoint, if there is one") from error
            raise

    def _hold(self, folder: Path) -> None:
        """Keep others out as long as this process lives; the system gives the lock back, however it ends."""
        self._lock = FileLock(folder / ".lock", fallback_to_soft=False)
        try:
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                log.warning("%s: another run writes there; waiting %d seconds for its end", folder, WAIT_SECONDS)
                self._lock.acquire(timeout=WAIT_SECONDS)
        except Timeout as error:
            raise ConfigError(f"{folder}: another run writes there; end it, or give another run_name") from error
        except OSError as error:
            log.warning("%s: cannot be locked (%s); see that one run at a time writes there", folder, error)


def _on_first_rank(function: Callable[[], Found]) -> Found:
    """What a function gives on the first rank; an error that a user can mend is raised on all."""
    found: list[Any] = [None]
    if dist.get_global_rank() == 0:
        try:
            found = [function()]
        except OSError as error:
            found = [
                ConfigError(f"{error.filename}: {error.strerror}; make it readable" if error.filename else str(error))
            ]
        except ConfigError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], ConfigError):
        raise found[0]
    result: Found = found[0]
    return result
