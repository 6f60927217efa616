"""Folders that are built once and appear whole or not at all, and locks between processes."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that belongs to a path, whether or not a file exists there.

    The lock is on the file `{file}.lock`. The system releases the lock of a process that dies.

    Raises:
        OSError: the folder of `file` cannot be made, or the disk has no file locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # The library's fallback lock is a file that outlives its process: after a kill every other process would wait.
    lock = FileLock(f"{file}.lock", fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise OSError(error.errno, "the disk has no file locks", lock.lock_file) from error
    try:
        yield
    finally:
        lock.release()


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Make sure that a folder exists. If it does not, exactly one of the processes that ask builds it.

    Processes that ask at the same time wait for the process that builds. A build that was killed leaves a hidden
    folder whose name ends in `.building`; the next build removes this folder.

    Args:
        folder: the folder that must exist.
        build: fills the empty folder that it is given.

    Raises:
        OSError: the folder cannot be made or written. Errors of `build` pass through.
    """
    if folder.exists():
        return
    with locked(folder.with_name(f".{folder.name}")):
        if not folder.exists():
            building = folder.with_name(f".{folder.name}.building")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                build(building)
                os.rename(building, folder)
            except BaseException:
                shutil.rmtree(building, ignore_errors=True)
                raise
