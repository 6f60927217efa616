"""Shards of MDS as their index describes them, checked against the head of each, and mapped into memory."""

import ctypes
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from composer_packing.common.errors import ConfigError, one_line

INDEX = "index.json"
"""Name of the file that describes the shards of a folder."""

MADV_RANDOM = 1
"""What the system is told of memory that is read here and there."""

Column = tuple[str, str, int]
"""Name, encoding, and the bytes of each value, 0 where they differ."""


class Shard(NamedTuple):
    """A shard as the index describes it; `packed` is its file when compressed, `size` is in bytes."""

    file: Path
    packed: Path | None
    samples: int
    size: int
    columns: list[Column]


def shards_in(folder: Path) -> list[Shard]:
    """What the index of a folder says.

    Raises:
        ConfigError: it is missing or damaged, there are no samples, or shards have different columns.
    """
    index = folder / INDEX
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give one of MDS shards")
    if not index.is_file():
        inside = ", ".join(sorted(file.parent.name for file in folder.glob(f"*/{INDEX}")))
        raise ConfigError(f"{folder}: holds no {INDEX}; give {f'one of {inside}' if inside else 'a folder of shards'}")
    try:
        contents = json.loads(index.read_bytes())
        for kind in [("mds", contents["version"]), *((one["format"], one["version"]) for one in contents["shards"])]:
            if kind != ("mds", 2):
                raise ValueError(f"format {kind[0]}, version {kind[1]}; only mds, version 2, will do")
        shards = [_shard(folder, one) for one in contents["shards"]]
        if len({shard.file for shard in shards}) < len(shards):
            raise ValueError("a shard is listed twice")
        if not any(shard.samples for shard in shards):
            raise ValueError("no samples")
        for shard in shards:
            if shard.columns != shards[0].columns:
                raise ValueError(f"{shard.file.name} has other columns than {shards[0].file.name}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index}: will not do ({one_line(error)}); give what streaming.MDSWriter wrote") from error
    return shards


def _shard(folder: Path, described: Mapping[str, Any]) -> Shard:
    raw, packed = described["raw_data"], described.get("zip_data")
    packed_file = folder / packed["basename"] if packed else None
    size, samples = _uint32(raw["bytes"]), _uint32(described["samples"])
    return Shard(folder / raw["basename"], packed_file, samples, size, _columns(described))


def _columns(described: Mapping[str, Any]) -> list[Column]:
    names, encodings, sizes = (described[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    together = zip(names, encodings, sizes, strict=True)
    return [(str(name), str(encoding), _uint32(size or 0)) for name, encoding, size in together]


def _uint32(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise ValueError(f"{value!r} is no uint32")
    return value


def map_shard(shard: Shard) -> torch.Tensor:
    """All bytes of a shard, uint8 `(size,)`.

    Raises:
        ConfigError: the file is missing, or its head is not as the index says.
    """
    file, end_of_offsets = shard.file, 4 * (shard.samples + 2)
    if not file.is_file():
        what = f"is missing, though {INDEX} names it; copy the folder anew"
        if shard.packed and shard.packed.is_file():
            what = f"memory mapping needs {shard.packed.name} unpacked; the source `streaming` reads it as it is"
        raise ConfigError(f"{file}: {what}")
    try:
        if (size := file.stat().st_size) != shard.size or size < end_of_offsets:
            raise ValueError(f"{size} bytes, not {shard.size} with {shard.samples} samples")
        # A numpy memory map would keep a file descriptor for each shard, and there may be no more than 1024.
        data = torch.from_file(str(file), size=size, dtype=torch.uint8)
        head = data.numpy()
        samples, begin = head[:8].view(np.uint32).tolist()
        end = int(head[end_of_offsets - 4 : end_of_offsets].view(np.uint32)[0])
        if samples != shard.samples or not end_of_offsets <= begin <= end <= size:
            raise ValueError(f"{samples} samples from byte {begin} to {end}, not {shard.samples} in {size} bytes")
        if _columns(json.loads(head[end_of_offsets:begin].tobytes())) != shard.columns:
            raise ValueError("other columns")
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: is not what {INDEX} says ({one_line(error)}); copy it anew") from error
    return data


def expect_random_reads(mappings: Sequence[torch.Tensor]) -> None:
    """Tell the system, where they are larger than the memory, not to read what lies around each page that is wanted.

    Reading ahead is worth it for as long as all of it stays in memory: then every page is wanted in the end.
    """
    if sum(map(len, mappings)) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        madvise = ctypes.CDLL(None).madvise
        for mapping in mappings:
            madvise(ctypes.c_void_p(mapping.data_ptr()), ctypes.c_size_t(len(mapping)), MADV_RANDOM)
