"""The shards that the index of a folder lists: each is checked against its own head and mapped into memory."""

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
"""Name of the file that lists and describes the shards of a folder."""

MADV_RANDOM = 1
"""The advice to the system that pages of a mapping are read in random order."""

Column = tuple[str, str, int]
"""Name, encoding, and the bytes of every value; 0 if values differ in size."""


class Shard(NamedTuple):
    """A shard as the index describes it.

    Attributes:
        file: the shard, not compressed.
        packed: the compressed shard; None if the shard was written without compression.
        samples: number of samples.
        size: bytes of `file`.
        columns: in the order of the values in a sample.
    """

    file: Path
    packed: Path | None
    samples: int
    size: int
    columns: list[Column]


def read_index(folder: Path) -> list[Shard]:
    """The shards that the index of a folder lists. No shard is opened.

    Raises:
        ConfigError: the index is missing or damaged, lists no samples, or lists shards with different columns.
    """
    index = folder / INDEX
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; give a folder of MDS shards")
    if not index.is_file():
        inside = ", ".join(sorted(file.parent.name for file in folder.glob(f"*/{INDEX}")))
        raise ConfigError(f"{folder}: holds no {INDEX}; give {f'one of {inside}' if inside else 'a folder of shards'}")
    try:
        contents = json.loads(index.read_bytes())
        for kind in [("mds", contents["version"]), *((one["format"], one["version"]) for one in contents["shards"])]:
            if kind != ("mds", 2):
                raise ValueError(f"format {kind[0]}, version {kind[1]}; only mds, version 2, can be read")
        shards = [_shard(folder, one) for one in contents["shards"]]
        if len({shard.file for shard in shards}) < len(shards):
            raise ValueError("a shard is listed twice")
        if not any(shard.samples for shard in shards):
            raise ValueError("no samples")
        for shard in shards:
            if shard.columns != shards[0].columns:
                raise ValueError(f"{shard.file.name} has other columns than {shards[0].file.name}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{index}: cannot be used ({one_line(error)}); give an index that streaming.MDSWriter wrote"
        ) from error
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
        raise ValueError(f"{value!r} is not a uint32")
    return value


def map_shard(shard: Shard) -> torch.Tensor:
    """Map a shard into memory.

    Returns:
        All bytes of the file, uint8 `(size,)`. The system reads a page of them when it is first used.

    Raises:
        ConfigError: the file is missing, or its size or head differs from what the index says.
    """
    file, end_of_offsets = shard.file, 4 * (shard.samples + 2)
    if not file.is_file():
        what = f"is missing, though {INDEX} lists it; copy the folder again"
        if shard.packed and shard.packed.is_file():
            what = f"must be unpacked from {shard.packed.name}; or use the source `streaming`, which unpacks by itself"
        raise ConfigError(f"{file}: {what}")
    try:
        if (size := file.stat().st_size) != shard.size or size < end_of_offsets:
            raise ValueError(f"{size} bytes, not {shard.size} with {shard.samples} samples")
        # Not `numpy.memmap`, nor `mmap.mmap`: both keep a file descriptor open for each shard, and a process may often
        # have no more than 1024. (`mmap.mmap` can do without from Python 3.13 on, by `trackfd=False`.)
        data = torch.from_file(str(file), size=size, dtype=torch.uint8)
        head = data.numpy()
        samples, begin = head[:8].view(np.uint32).tolist()
        end = int(head[end_of_offsets - 4 : end_of_offsets].view(np.uint32)[0])
        if samples != shard.samples or not end_of_offsets <= begin <= end <= size:
            raise ValueError(f"{samples} samples from byte {begin} to {end}, not {shard.samples} in {size} bytes")
        if _columns(json.loads(head[end_of_offsets:begin].tobytes())) != shard.columns:
            raise ValueError("other columns")
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: differs from what {INDEX} says ({one_line(error)}); copy the file again") from error
    return data


def expect_random_reads(mappings: Sequence[torch.Tensor]) -> None:
    """Tell the system not to read ahead, if the shards are larger than the memory of the machine.

    The system reads the pages around each page that is used. If all shards fit into memory, every page is used in the
    end, and reading ahead saves time. If they do not fit, most of those pages are dropped before they are used.

    The C function is called by `ctypes`, as Python offers `madvise` only for an `mmap.mmap`, and `map_shard` says why
    shards are not mapped by that.
    """
    if sum(map(len, mappings)) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        madvise = ctypes.CDLL(None).madvise
        for mapping in mappings:
            madvise(ctypes.c_void_p(mapping.data_ptr()), ctypes.c_size_t(len(mapping)), MADV_RANDOM)
