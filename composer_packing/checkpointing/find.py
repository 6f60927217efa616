"""Which checkpoint in a folder is the last whole one."""

import errno
import logging
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)


NAME = re.compile(r"ep\d+-ba(\d+)-rank0\.pt")
"""A checkpoint, by Composer's default."""


LATEST = "latest-rank0.pt"
"""Composer's link to the last one."""


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint.

    It is the one that Composer's link points to, or one of a later batch that was written after that, if a run ended
    before it could change the link. Others of later batches are of a run that this one has written over. Without a
    link it is that of the latest batch.
    """
    named = {
        file: int(match[1]) for file in folder.iterdir() if (match := NAME.fullmatch(file.name)) and file.is_file()
    }
    in_order = sorted(named, key=named.__getitem__, reverse=True)
    link = folder / LATEST
    target = folder / os.readlink(link) if link.is_symlink() else None
    if target in named:
        written = target.stat().st_mtime_ns
        newer = [file for file in in_order if named[file] > named[target] and file.stat().st_mtime_ns > written]
        in_order = [*newer, target, *(file for file in in_order if file not in (*newer, target))]
    for file in in_order:
        if is_whole(file):
            return file
        log.warning("%s is cut off or damaged, as a run was killed or a disk full: it is passed over", file)
    if named:
        log.warning("%s: holds no whole checkpoint; the run starts anew", folder)
    return None


def latest_of(addresses: Mapping[str, str]) -> str | None:
    """The address of the checkpoint of the latest batch, of what is in a folder of an object store."""
    named = {address: int(match[1]) for name, address in addresses.items() if (match := NAME.fullmatch(name))}
    return max(named, key=named.__getitem__, default=None)


def is_whole(file: Path) -> bool:
    """Whether all of a checkpoint is there, by the directory at its end and the checksums in that."""
    with file.open("rb") as content:
        try:
            return zipfile.ZipFile(content).testzip() is None
        except OSError as error:
            if error.errno != errno.EINVAL:  # which a damaged directory leads to, as to any other exception
                raise OSError(error.errno, error.strerror, str(file)) from error
            return False
        except Exception:
            return False
