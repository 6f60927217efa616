"""Which checkpoint in a folder is the last one that is whole.

Composer writes a checkpoint in place. If the process is killed or the disk is full, the file is cut off.
"""

import errno
import logging
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"ep\d+-ba(\d+)-rank0\.pt")
"""Composer's default name of a checkpoint. The group is the number of batches."""

LINK_NAME = "latest-rank0.pt"
"""Composer's default name of the link to the checkpoint that it wrote last."""


def find_last_whole(folder: Path) -> Path | None:
    """Return the last whole checkpoint of a folder on disk, or None if there is none.

    Checkpoints are tried in this order, and damaged ones are passed over with a warning:

    1. Checkpoints of a later batch than the linked one that were also written later. Their run ended before it could
       change the link.
    2. The checkpoint to which Composer's link points.
    3. All others, the latest batch first. Later batches than the linked one among them come from an older run that was
       overwritten.

    Without a link, the latest batch comes first.
    """
    batches = {
        file: batch for file in folder.iterdir() if (batch := _batch_in_name(file.name)) is not None and file.is_file()
    }
    in_order = sorted(batches, key=batches.__getitem__, reverse=True)
    link = folder / LINK_NAME
    linked = folder / os.readlink(link) if link.is_symlink() else None
    if linked in batches:
        written = linked.stat().st_mtime_ns
        newer = [file for file in in_order if batches[file] > batches[linked] and file.stat().st_mtime_ns > written]
        in_order = [*newer, linked, *(file for file in in_order if file not in (*newer, linked))]
    for file in in_order:
        if is_whole(file):
            return file
        log.warning("%s is passed over: it is cut off or damaged (a run was killed, or the disk was full)", file)
    if batches:
        log.warning("%s: has no whole checkpoint; the run starts from the beginning", folder)
    return None


def find_latest_batch(addresses: Mapping[str, str]) -> str | None:
    """Return the address of the checkpoint of the latest batch in an object store, or None if there is none.

    Args:
        addresses: address of each object in the folder, by its name. An object in a store is always whole.
    """
    batches = {address: batch for name, address in addresses.items() if (batch := _batch_in_name(name)) is not None}
    return max(batches, key=batches.__getitem__, default=None)


def is_whole(file: Path) -> bool:
    """Return whether a checkpoint is complete and undamaged.

    PyTorch writes a zip file: its end lists all parts, each with a checksum.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open("rb") as content:
        try:
            return zipfile.ZipFile(content).testzip() is None
        except OSError as error:
            if error.errno != errno.EINVAL:  # a damaged list of parts can lead to this error, as to any other
                raise OSError(error.errno, error.strerror, str(file)) from error
            return False
        except Exception:
            return False


def _batch_in_name(name: str) -> int | None:
    """Return the batch of a checkpoint, or None for the name of any other file."""
    match = CHECKPOINT_NAME.fullmatch(name)
    return None if match is None else int(match[1])
