"""Downloading the files of a stream: a file is on this machine whole, or not at all."""

import os
import re
from hashlib import blake2s
from pathlib import Path
from typing import Protocol

from streaming import Stream
from streaming.base.storage.download import CloudDownloader

from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError, one_line
from composer_packing.common.folders import locked
from composer_packing.config.sources import StreamConfig

NOT_FOUND = re.compile(r"not ?found|404|no ?such|does ?not ?exist", re.IGNORECASE)
"""What the storages' errors say about a file that does not exist."""

TIMEOUT_SECONDS = 60.0
"""How long a storage may take for a file."""


class Downloader(Protocol):
    """What a stream of mosaicml-streaming downloads with."""

    def download(self, remote: str | None, local: str, timeout: float) -> None:
        """Download a file; `timeout` is in seconds."""

    def clean_up(self) -> None:
        """Close the connections to the storage."""


class _WholeFiles:
    """Downloads to another name and renames the file when it is complete.

    Some of the library's downloaders write to the name that is read, so that a killed run leaves half a file.
    """

    def __init__(self, downloader: Downloader) -> None:
        self._downloader = downloader

    def download(self, remote: str | None, local: str, timeout: float) -> None:
        """Download a file, unless it is on this machine."""
        if not os.path.exists(local):
            part = f"{local}.part"
            Path(part).unlink(missing_ok=True)
            self._downloader.download(remote, part, timeout)
            os.replace(part, local)

    def clean_up(self) -> None:
        """Close the connections to the storage."""
        self._downloader.clean_up()


# `Stream` has no public way to set, or to use, what it downloads with. These functions are the only ones that use its
# private `_downloader`. `CloudDownloader` is not in the library's documented interface either. What to check when
# mosaicml-streaming is upgraded: `Stream._download_file` calls `self._downloader.download(remote, local, seconds)` and
# `clean_up()`, and `CloudDownloader.get(remote)` gives an object with these two methods.


def connect(stream: Stream) -> None:
    """Give a stream a new connection to its storage, which belongs to this process."""
    stream._downloader = _WholeFiles(CloudDownloader.get(stream.remote))


def downloader_of(stream: Stream) -> Downloader:
    """What a stream downloads with."""
    downloader: Downloader = stream._downloader
    return downloader


def download_again(downloader: Downloader, remote: str, path: Path) -> Path:
    """Download a file that may have changed, next to the copy at `path`.

    Returns:
        The path of the new copy.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    downloader.download(remote, str(new), TIMEOUT_SECONDS)
    return new


def fetch_stream_file(stream: StreamConfig, name: str, cache_folder: Path) -> Path | None:
    """Get a file that lies next to the splits of a stream. If the stream is remote, the file is downloaded each time.

    Args:
        stream: the stream.
        name: of the file, relative to the folder that holds the splits.
        cache_folder: see `local_folder`.

    Returns:
        The path of the file on this machine; None if the stream has no such file.

    Raises:
        ConfigError: the storage does not say whether the file exists.
    """
    path = local_folder(stream, cache_folder) / name
    if stream.remote is not None:
        try:
            with locked(path):
                downloader = CloudDownloader.get(stream.remote)
                os.replace(download_again(downloader, f"{stream.remote}/{name}", path), path)
        except Exception as error:  # each kind of storage raises errors of its own
            if not NOT_FOUND.search(f"{type(error).__name__} {error}"):
                raise ConfigError(f"{stream.remote}/{name}: cannot be read ({one_line(error, 200)})") from error
            return None
    return path if path.exists() else None


def local_folder(stream: StreamConfig, cache_folder: Path) -> Path:
    """The folder on this machine that holds a stream's splits, or to which they are downloaded.

    A stream without a `local` gets a folder in `cache_folder`, whose name is a fingerprint of the remote. With another
    fingerprint, all shards would be downloaded again.
    """
    if stream.local is not None:
        return Path(stream.local)
    fingerprint = blake2s(unique_name(str(stream.remote)).encode(), digest_size=6).hexdigest()
    return cache_folder / f"stream-{fingerprint}"


def unique_name(folder: str) -> str:
    """One name for a folder or remote, however a user writes it."""
    return folder.rstrip("/") if is_address(folder) else os.path.realpath(folder)
