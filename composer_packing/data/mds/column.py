"""One column of a folder of MDS shards: the shards are memory-mapped, and one call reads many values.

mosaicml-streaming writes such folders. A folder holds `index.json` and shard files. The picture shows a shard with two
samples and the columns `id` (int), `ids` (ndarray) and `text` (str). Counts, offsets and sizes are uint32::

    shard      2 | begin begin end | {"column_names": ...} | sample | sample
                   |                                         ^
                   +---- the offset of each sample, and of the last one's end

    sample     size of ids | size of text | id | ids | text     (an int always has 8 bytes, so it needs no size)

    ids        dtype mark | shape mark | shape | items

The encoding of the column says how much precedes the items:

| encoding           | before the items  |
|--------------------|-------------------|
| `ndarray`          | dtype mark, shape |
| `ndarray:uint16`   | shape             |
| `ndarray:uint16:5` | nothing           |
| `bytes`, `str`     | nothing           |

Opening a folder reads only the head of each shard, so it costs the same for any number of samples.

`streaming.MDSReader` reads the same files. It opens the file for each sample and decodes all columns in Python. The
source `streaming` uses that reader and gets 13 million tokens a second where this module gets 402 million
(`benchmarks/README.md`, no workers).
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from composer_packing.common.errors import ConfigError
from composer_packing.common.jit import compiled
from composer_packing.config.sources import BYTES_DTYPES
from composer_packing.data.mds.shards import INDEX, expect_random_reads, map_shard, read_index

DTYPES = {8 * np.dtype(name).itemsize + (np.dtype(name).kind == "i"): name for name in BYTES_DTYPES}
"""The integer types by dtype mark: the byte that stands for the type at the start of an `ndarray`."""

NDARRAY = re.compile(rf"ndarray(?::({'|'.join(DTYPES.values())})(?::([1-9]\d*(?:,[1-9]\d*)*))?)?")
"""Encodings of integer arrays. The groups are the dtype and the shape, each None where the encoding leaves it out."""

SOUND, WRONG_SIZES, OTHER_DTYPE, WRONG_SHAPE = range(4)
"""What the compiled code finds about a value. It cannot raise an error with a text, so it returns a number."""

PROBLEMS = {
    WRONG_SIZES: "has column sizes that do not add up to the bytes of the sample in the file",
    OTHER_DTYPE: "has a dtype that differs from that of the first sample",
    WRONG_SHAPE: "does not have the bytes of whole items, or not those of its shape",
}
"""What errors say about a value that is not sound."""

# The next two are plain tuples. A NamedTuple would be stored in numba's cache by the name of its class, and the cache
# could not be loaded any more after the class is renamed.

ShardMaps = tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]
"""For each shard the number of its first sample, the address of its bytes, and its size in bytes.

The first array has one entry more: the number of all samples.
"""

ColumnFormat = tuple[int, int, int, int]
"""Index of the column in the shard, dtype mark or 0, 1 if a shape precedes the items or 0, and bytes of an item."""


class MdsColumn:
    """One column of all shards of a folder.

    Forked processes may use the same object. The files must not change while it is in use.

    Args:
        folder: holds `index.json` and the shards, which are not compressed.
        names: columns to choose from; the first one that the shards have is taken.
        bytes_dtype: integer type of the items if the column is `bytes`.

    Attributes:
        name: name of the column that was taken.
        encoding: its encoding: str, bytes, ndarray, ndarray:uint16 and so on.
        dtype: integer type of its items; None if it is `str`.

    Raises:
        ConfigError: something is missing or damaged, or the column holds neither text nor integers.
    """

    def __init__(self, folder: Path, names: Sequence[str], bytes_dtype: str = "int64") -> None:
        if bytes_dtype not in DTYPES.values():
            raise ConfigError(f"bytes_dtype={bytes_dtype}: must be one of {', '.join(DTYPES.values())}")
        shards = read_index(folder)
        columns = shards[0].columns
        column = next((i for name in names for i in range(len(columns)) if columns[i][0] == name), None)
        if column is None:
            existing = ", ".join(f"{name} ({encoding})" for name, encoding, _ in columns)
            raise ConfigError(f"{folder}: has no column {' or '.join(names)}; give one of {existing}")
        self.name, encoding, fixed_size = columns[column]
        self.encoding = encoding
        array = NDARRAY.fullmatch(encoding)
        if not array and encoding not in ("str", "bytes"):
            raise ConfigError(f"{folder}: {self.name} is {encoding}; it must be str, bytes or ndarray of integers")
        self._files = [shard.file for shard in shards]
        self._mapped = [map_shard(shard) for shard in shards]  # keeps the addresses in `_maps` valid
        expect_random_reads(self._mapped)
        self._maps: ShardMaps = (
            np.cumsum([0, *(shard.samples for shard in shards)], dtype=np.int64),
            np.array([mapping.data_ptr() for mapping in self._mapped], np.uint64),
            np.array([shard.size for shard in shards], np.int64),
        )
        self._column_sizes = np.array([size for _, _, size in columns], np.int64)
        self._format: ColumnFormat = (column, 0, 0, 1)
        self.dtype: np.dtype[Any] | None = None
        if encoding != "str":
            dtype, shape = array.groups() if array else (bytes_dtype, None)
            # The format is still that of plain bytes, so the first byte of the first value is its dtype mark.
            mark = 0 if dtype else int(self.gather(np.zeros(1, np.int64))[0][:1].sum())
            if mark not in DTYPES and not dtype:
                raise ConfigError(
                    f"{self._files[0]}: {self.name} of sample 0 has dtype mark {mark}; it must hold integers"
                )
            self.dtype = np.dtype(dtype or DTYPES[mark])
            if shape and math.prod(map(int, shape.split(","))) * self.dtype.itemsize != fixed_size:
                raise ConfigError(
                    f"{folder / INDEX}: {encoding} cannot have {fixed_size} bytes; write the shards again"
                )
            self._format = (column, mark, int(array is not None and not shape), self.dtype.itemsize)

    def __len__(self) -> int:
        return int(self._maps[0][-1])

    def gather(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read the values of some samples. Other threads can run meanwhile, as the interpreter's lock is released.

        Args:
            numbers: int64 `(values,)`, numbers of the samples in the folder, in any order.

        Returns:
            uint8 `(bytes,)`, the items or texts end to end, and int64 `(values,)`, the size of each in bytes.

        Raises:
            IndexError: a number is negative, or the folder has no more than so many samples.
            ConfigError: a sample is damaged, or its dtype differs from that of the first.
        """
        numbers = np.ascontiguousarray(numbers, np.int64)
        for number in numbers[(numbers < 0) | (numbers >= len(self))][:1]:
            raise IndexError(f"sample {number} of {self._files[0].parent} must lie between 0 and {len(self) - 1}")
        values, sizes, found, shard, number = _gather(numbers, self._maps, self._column_sizes, self._format)
        if found != SOUND:
            raise ConfigError(
                f"{self._files[shard]}: {self.name} of sample {number} {PROBLEMS[found]}; write the shards again"
            )
        return values, sizes


# Why addresses: one compiled call reads from any of thousands of shards, and numba copies a Python list of arrays at
# every call. A `numba.typed.List` of arrays needs no addresses. It made `gather` a tenth slower, and the start of each
# process at least 0.3 seconds longer, as its `append` is compiled again in each.
#
# Why this is safe: an address is used only here and in `_gather`. `_find_value` reads through an array over exactly
# the bytes of the file, and returns a range inside this array or a problem. The tests damage shards in thousands of
# ways.
#
# What to check when numba is upgraded: `intrinsic` is for extending numba, and its typing rules may change. The tests
# of this module fail then, as the function no longer compiles.
@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _pointer_to(context: Any, address: Any) -> Any:
    """The pointer to the byte at an address, a uint64. For `carray`, which makes an array from a pointer and a size."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.uint64), build


@compiled
def _gather(
    numbers: NDArray[np.int64], maps: ShardMaps, column_sizes: NDArray[np.int64], column_format: ColumnFormat
) -> tuple[NDArray[np.uint8], NDArray[np.int64], int, int, int]:
    """What `MdsColumn.gather` returns; then SOUND, or the first problem with the index of its shard and its sample.

    The first loop finds where each value lies. Then the size of the result is known, and the second loop copies.
    """
    first_samples, addresses, file_sizes = maps
    starts = np.empty(len(numbers), np.uint64)  # addresses
    sizes = np.empty(len(numbers), np.int64)
    for i, number in enumerate(numbers):
        shard = np.searchsorted(first_samples, number, side="right") - 1
        file = carray(_pointer_to(addresses[shard]), file_sizes[shard])
        found, start, stop = _find_value(file, number - first_samples[shard], column_sizes, column_format)
        if found != SOUND:
            return np.empty(0, np.uint8), sizes, found, shard, number
        starts[i] = addresses[shard] + np.uint64(start)
        sizes[i] = stop - start
    values = np.empty(sizes.sum(), np.uint8)
    end = 0
    for start, size in zip(starts, sizes):  # noqa: B905 (not in compiled code)
        values[end : end + size] = carray(_pointer_to(start), size)
        end += size
    return values, sizes, SOUND, 0, 0


@compiled
def _find_value(
    file: NDArray[np.uint8], index: int, column_sizes: NDArray[np.int64], column_format: ColumnFormat
) -> tuple[int, int, int]:
    """Find the items, or the text, of one value in a shard.

    Args:
        file: uint8 `(bytes,)`, the whole shard. Its size and the number of its samples have been checked.
        index: of the sample in the shard.
        column_sizes: int64 `(columns,)`, bytes of every value of a column; 0 where values differ in size.
        column_format: of the column that is read.

    Returns:
        SOUND or a problem, and the offsets in `file` where the items begin and end.
    """
    wanted_column, dtype_mark, has_shape, item_size = column_format

    # 1. The head of the shard says where the sample begins and ends.
    head = _read_uint(file, 4 * (index + 1), 4)
    end = _read_uint(file, 4 * (index + 2), 4)

    # 2. The sample begins with the sizes of the columns that have no fixed size. Add up the sizes of all columns; on
    #    the way, note what precedes the wanted column. Afterwards `head` is where the sizes end and values begin.
    before_wanted = wanted_size = total = 0
    for column, fixed_size in enumerate(column_sizes):
        size = fixed_size
        if fixed_size == 0:
            if head + 4 > min(end, len(file)):
                return WRONG_SIZES, 0, 0
            size = _read_uint(file, head, 4)
            head += 4
        if column == wanted_column:
            before_wanted, wanted_size = total, size
        total += size

    # 3. The values must end where the sample ends, inside the file. Then the wanted value lies inside the file too.
    if head + total != end or end > len(file):
        return WRONG_SIZES, 0, 0
    start = head + before_wanted
    stop = start + wanted_size

    # 4. Step over the dtype mark, if there is one.
    if dtype_mark:
        if start == stop or file[start] != dtype_mark:
            return OTHER_DTYPE, 0, 0
        start += 1

    # 5. Step over the shape, if there is one. The upper six bits of its mark are the number of dimensions. The lower
    #    two say in how many bytes each extent is written: 1, 2, 4 or 8. All extents must divide the number of items
    #    down to 1. Multiplying them instead could overflow.
    if has_shape:
        shape_mark = file[start] if start < stop else 0
        dimensions, extent_size = shape_mark >> 2, 1 << (shape_mark & 3)
        shape, start = start + 1, start + 1 + dimensions * extent_size
        if start > stop:
            return WRONG_SHAPE, 0, 0
        items = (stop - start) // item_size
        for i in range(dimensions):
            extent = _read_uint(file, shape + i * extent_size, extent_size)
            items = items // extent if extent > 0 and items % extent == 0 else 0
        if items != 1:
            return WRONG_SHAPE, 0, 0

    # 6. What is left must be whole items.
    return WRONG_SHAPE if (stop - start) % item_size else SOUND, start, stop


@compiled
def _read_uint(file: NDArray[np.uint8], offset: int, size: int) -> int:
    """The unsigned number in `size` bytes, the lowest first, at an offset that need not be a multiple of the size."""
    number = 0
    for i in range(size):
        number |= int(file[offset + i]) << (8 * i)
    return number
