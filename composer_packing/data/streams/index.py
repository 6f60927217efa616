"""Opening streams: their index, the shards it lists, and the column with the documents."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.storage.download import CloudDownloader
from streaming.base.world import World

from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError, one_line
from composer_packing.common.folders import locked
from composer_packing.config.sources import StreamConfig, StreamingConfig
from composer_packing.data.mds.documents import COLUMNS
from composer_packing.data.mds.shards import INDEX
from composer_packing.data.streams.shard import StreamedShard, connect

NOT_FOUND = re.compile(r"not ?found|404|no ?such|does ?not ?exist", re.IGNORECASE)
"""What storages say of a file that is not there."""


@dataclass(frozen=True)
class OpenStreams:
    """One split of all streams.

    Attributes:
        shards: of the first stream, then of the second, and so on.
        shards_per_stream: how many each has.
        choose_per_stream: documents that an epoch takes from each.
    """

    shards: Sequence[StreamedShard]
    shards_per_stream: Sequence[int]
    choose_per_stream: Sequence[int]


def open_streams(settings: StreamingConfig, split: str, cache_folder: Path, seed: int) -> OpenStreams:
    """Read the index of every stream, downloaded first where it must be.

    Args:
        settings: the streams and their columns.
        split: `"train"`, weighted as the streams say, or `"val"`, all of it.
        cache_folder: where shards are downloaded to, unless their stream says otherwise.
        seed: of how fractions of a document are rounded.

    Raises:
        ConfigError: a stream cannot be reached or read, or has no column that will do.
    """
    named = {name: one for name, one in settings.streams.items() if getattr(one, split) is not None}
    if not named:
        raise ConfigError(f"data.streaming.streams: none of them has a {split} split; give one")
    streams, found = [], []
    names: dict[str, str] = {}
    for name, one in named.items():
        stream = _stream(name, one, split, cache_folder)
        for place in {_place(stream.local), _place(stream.remote or stream.local)}:
            other = names.setdefault(f"{place}/{stream.split}", name)
            if other != name:
                raise ConfigError(
                    f"data.streaming.streams.{name}: {place}/{stream.split} is a folder of stream {other} too; "
                    f"leave one out, or give it another local"
                )
        streams.append(stream)
        found.append(_shards(name, stream, settings))
    per_stream = np.array([sum(shard.reader.samples for shard in shards) for shards in found], np.int64)
    try:
        Stream.apply_weights(streams, per_stream, None, seed)
    except ValueError as error:
        raise ConfigError(f"data.streaming.streams: {error}") from error
    chosen = [int(stream.choose) for stream in streams]
    if not sum(chosen):
        raise ConfigError("data.streaming.streams: an epoch has no documents; raise choose, repeat or proportion")
    return OpenStreams([shard for shards in found for shard in shards], list(map(len, found)), chosen)


def fetched_beside(stream: StreamConfig, name: str, cache_folder: Path) -> Path | None:
    """A file that lies beside the splits of a stream, downloaded anew where it must be; None where there is none.

    Raises:
        ConfigError: it cannot be said whether there is one.
    """
    path = local_folder(stream, cache_folder) / name
    if stream.remote is not None:
        try:
            with locked(path):
                os.replace(_fetched_anew(CloudDownloader.get(stream.remote), f"{stream.remote}/{name}", path), path)
        except Exception as error:  # each kind of storage has its own
            if not NOT_FOUND.search(f"{type(error).__name__} {error}"):
                raise ConfigError(f"{stream.remote}/{name}: cannot be read ({one_line(error, 200)})") from error
            return None
    return path if path.exists() else None


def _fetched_anew(downloader: Any, remote: str, path: Path) -> Path:
    """A file that may have changed, downloaded beside the one that is here."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    downloader.download(remote, str(new), 60.0)
    return new


def local_folder(stream: StreamConfig, cache_folder: Path) -> Path:
    """Where a stream's splits are downloaded to, or lie."""
    if stream.local is not None:
        return Path(stream.local)
    digest = blake2s(_place(str(stream.remote)).encode(), digest_size=6).hexdigest()
    return cache_folder / f"stream-{digest}"


def _place(folder: str) -> str:
    """One name for a folder, however it is written."""
    return folder.rstrip("/") if is_address(folder) else os.path.realpath(folder)


def _stream(name: str, config: StreamConfig, split: str, cache_folder: Path) -> Stream:
    weights = {weight: getattr(config, weight) for weight in ("proportion", "repeat", "choose")}
    try:
        stream = Stream(
            remote=config.remote,
            local=str(local_folder(config, cache_folder)),
            split=getattr(config, split),
            download_retry=2,
            download_timeout=60.0,
            keep_zip=False,
            **(weights if split == "train" else {}),
        )
    except ValueError as error:
        raise ConfigError(f"data.streaming.streams.{name}: {error}") from error
    connect(stream)
    return stream


def _shards(name: str, stream: Stream, settings: StreamingConfig) -> list[StreamedShard]:
    """The shards of a stream by its index, which is downloaded anew where it must be."""
    folder = Path(stream.local) / stream.split
    where = f"data.streaming.streams.{name}: {stream.remote or stream.local}/{stream.split}"
    if stream.remote is None and not (folder / INDEX).is_file():
        raise ConfigError(f"{where}: there is no {INDEX}; give the folder of a split of MDS shards")
    if stream.remote is not None:
        _fetch_index(where, stream, folder / INDEX)
    try:
        readers = stream.get_shards(World(1, 1, 1, 0), allow_unsafe_types=False)
    except Exception as error:  # whatever it makes of a damaged one
        raise ConfigError(f"{where}: the index will not do ({one_line(error, 200)}); write the shards again") from error
    shards = [_shard(stream, reader, settings) for reader in readers if reader.samples]
    if not shards:
        raise ConfigError(f"{where}: {INDEX} lists no samples; write the shards again")
    for shard in shards:
        shard.check_size()
        if stream.remote is None and not shard.is_here():
            raise ConfigError(f"{shard.path}: is missing, though {INDEX} names it; copy the folder anew")
    return shards


def _fetch_index(where: str, stream: Stream, index: Path) -> None:
    """Download the index anew; ConfigError where shards are here that are those of another."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(index))
        except OSError as error:
            raise ConfigError(f"{index.parent}: cannot be used ({error.strerror}); give another folder") from error
        try:
            new = _fetched_anew(stream._downloader, f"{stream.remote}/{stream.split}/{INDEX}", index)
        except Exception as error:  # each kind of storage has its own
            raise ConfigError(
                f"{where}: no index can be read ({one_line(error, 200)}); see that it is there"
            ) from error
        if index.exists() and index.read_bytes() != new.read_bytes():
            raise ConfigError(
                f"{where}: has been written anew since shards of it were downloaded to {index.parent}; delete those"
            )
        os.replace(new, index)


def _shard(stream: Stream, reader: Any, settings: StreamingConfig) -> StreamedShard:
    path = Path(reader.dirname, reader.split, reader.file_pairs[0][0].basename)
    encodings = dict(zip(reader.column_names, reader.column_encodings, strict=True))
    wanted = COLUMNS if settings.column is None else (settings.column,)
    for name in wanted:
        encoding, _, dtype = encodings.get(name, "").partition(":")
        if encoding in ("str", "bytes") or (encoding == "ndarray" and "float" not in dtype):
            return StreamedShard(stream, reader, path, name, encoding)
    raise ConfigError(
        f"{path}: has no column {' or '.join(wanted)} of ids or text, but {encodings}; set data.streaming.column"
    )
