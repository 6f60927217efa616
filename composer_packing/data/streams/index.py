"""Opening streams: reads the index of each, and finds the shards it lists and the column with the documents."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.world import World

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.common.folders import locked
from composer_packing.config.sources import StreamConfig, StreamingConfig
from composer_packing.data.mds.documents import COLUMNS
from composer_packing.data.mds.shards import INDEX
from composer_packing.data.streams.download import (
    TIMEOUT_SECONDS,
    connect,
    download_again,
    downloader_of,
    local_folder,
    unique_name,
)
from composer_packing.data.streams.shard import StreamedShard


@dataclass(frozen=True)
class OpenStreams:
    """One split of all streams.

    Attributes:
        shards: the shards of the first stream, then those of the second, and so on.
        shards_per_stream: number of shards of each stream.
        choose_per_stream: number of documents that an epoch takes from each stream.
    """

    shards: Sequence[StreamedShard]
    shards_per_stream: Sequence[int]
    choose_per_stream: Sequence[int]


def open_streams(settings: StreamingConfig, split: str, cache_folder: Path, seed: int) -> OpenStreams:
    """Read the index of every stream. The index of a remote stream is downloaded each time.

    Args:
        settings: the streams and their columns.
        split: `"train"`, of which an epoch takes as much as the streams' weights say, or `"val"`, of which it takes
            everything.
        cache_folder: where shards are downloaded to, if their stream names no local folder.
        seed: decides whether a fraction of a document is rounded up or down.

    Raises:
        ConfigError: a stream cannot be reached or read, or has no column with documents.
    """
    configs = {name: config for name, config in settings.streams.items() if getattr(config, split) is not None}
    if not configs:
        raise ConfigError(f"data.streaming.streams: no stream has a {split} split; give at least one")
    streams, shards_of_streams = [], []
    stream_in_folder: dict[str, str] = {}
    for name, config in configs.items():
        stream = _open_stream(name, config, split, cache_folder)
        for folder in {unique_name(stream.local), unique_name(stream.remote or stream.local)}:
            other = stream_in_folder.setdefault(f"{folder}/{stream.split}", name)
            if other != name:
                raise ConfigError(
                    f"data.streaming.streams.{name}: {folder}/{stream.split} is a folder of stream {other} too; "
                    f"leave one out, or give one of them another local"
                )
        streams.append(stream)
        shards_of_streams.append(_read_index(name, stream, settings))
    samples = [sum(shard.reader.samples for shard in shards) for shards in shards_of_streams]
    try:
        Stream.apply_weights(streams, np.array(samples, np.int64), None, seed)
    except ValueError as error:
        raise ConfigError(f"data.streaming.streams: {error}") from error
    chosen = [int(stream.choose) for stream in streams]
    if not sum(chosen):
        raise ConfigError("data.streaming.streams: an epoch has no documents; raise choose, repeat or proportion")
    all_shards = [shard for shards in shards_of_streams for shard in shards]
    return OpenStreams(all_shards, list(map(len, shards_of_streams)), chosen)


def _open_stream(name: str, config: StreamConfig, split: str, cache_folder: Path) -> Stream:
    weights = {weight: getattr(config, weight) for weight in ("proportion", "repeat", "choose")}
    try:
        stream = Stream(
            remote=config.remote,
            local=str(local_folder(config, cache_folder)),
            split=getattr(config, split),
            download_retry=2,
            download_timeout=TIMEOUT_SECONDS,
            keep_zip=False,
            **(weights if split == "train" else {}),
        )
    except ValueError as error:
        raise ConfigError(f"data.streaming.streams.{name}: {error}") from error
    connect(stream)
    return stream


def _read_index(name: str, stream: Stream, settings: StreamingConfig) -> list[StreamedShard]:
    """The shards that the index of a stream lists."""
    folder = Path(stream.local) / stream.split
    where = f"data.streaming.streams.{name}: {stream.remote or stream.local}/{stream.split}"
    if stream.remote is None and not (folder / INDEX).is_file():
        raise ConfigError(f"{where}: holds no {INDEX}; give the folder of a split of MDS shards")
    if stream.remote is not None:
        _download_index(where, stream, folder / INDEX)
    try:
        readers = stream.get_shards(World(1, 1, 1, 0), allow_unsafe_types=False)
    except Exception as error:  # the library raises many kinds of errors for a damaged index
        raise ConfigError(
            f"{where}: the index cannot be used ({one_line(error, 200)}); write the shards again"
        ) from error
    shards = [_streamed_shard(stream, reader, settings) for reader in readers if reader.samples]
    if not shards:
        raise ConfigError(f"{where}: {INDEX} lists no samples; write the shards again")
    for shard in shards:
        shard.check_size()
        if stream.remote is None and not shard.is_on_this_machine():
            raise ConfigError(f"{shard.path}: is missing, though {INDEX} lists it; copy the folder again")
    return shards


def _download_index(where: str, stream: Stream, index: Path) -> None:
    """Download the index, and raise ConfigError if it differs from the index of the shards on this machine."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(index))
        except OSError as error:
            raise ConfigError(f"{index.parent}: cannot be used ({error.strerror}); give another folder") from error
        try:
            new = download_again(downloader_of(stream), f"{stream.remote}/{stream.split}/{INDEX}", index)
        except Exception as error:  # each kind of storage raises errors of its own
            raise ConfigError(
                f"{where}: its index cannot be read ({one_line(error, 200)}); check that it exists"
            ) from error
        if index.exists() and index.read_bytes() != new.read_bytes():
            raise ConfigError(
                f"{where}: was written again after shards of it were downloaded to {index.parent}; delete this folder"
            )
        os.replace(new, index)


def _streamed_shard(stream: Stream, reader: Any, settings: StreamingConfig) -> StreamedShard:
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
