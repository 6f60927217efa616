"""Folders that are built once, and appear whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
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
