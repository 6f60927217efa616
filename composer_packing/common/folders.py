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
    """Hold a lock for a file, be it there or not; the system takes it back from a dead process.

    Raises:
        OSError: its folder cannot be made, or the disk has no such locks.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    # The library's other kind is a file that outlives its process: all would wait for one that was killed elsewhere.
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
    """See to it that a folder is there, filled by one of those that want it.

    Those that ask at the same time wait for the one that builds. A build that was killed leaves a hidden folder
    ending in `.building`, which the next build removes.

    Args:
        folder: what is to be there.
        build: fills an empty folder that is given to it.

    Raises:
        OSError: the folder cannot be made or written; and whatever `build` raises.
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
