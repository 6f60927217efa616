"""One column of a folder of MDS shards, as mosaicml-streaming writes them: memory-mapped, many samples at once.

A folder holds `index.json` and its shards. This one has two samples and the columns `id` (int), `ids` (ndarray) and
`text` (str); `<ids>` is how many bytes a value of `ids` has, and all numbers up to the values are uint32::

    2  begin begin end  {"column_names": ...}  sample sample
                                               |
                                               <ids> <text>  id  ids  text       an int always has 8 bytes
                                                                 |
                                                                 dtype  dimensions  shape  items

`ndarray:uint16` has no dtype there, `ndarray:uint16:5` no shape either, and `bytes` are items only. At opening nothing
is read but the head of each shard, however many samples it has.
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
from composer_packing.data.mds.shards import INDEX, expect_random_reads, map_shard, shards_in

DTYPES = {8 * np.dtype(name).itemsize + (np.dtype(name).kind == "i"): name for name in BYTES_DTYPES}
"""The integer types, each by the byte that stands for it in an `ndarray`."""

NDARRAY = re.compile(rf"ndarray(?::({'|'.join(DTYPES.values())})(?::([1-9]\d*(?:,[1-9]\d*)*))?)?")
"""Encodings of integer arrays: perhaps the dtype, and then perhaps the shape."""

WRONG = (
    "",
    "has not the bytes of its columns in the file",
    "has another dtype than the first sample",
    "has not the bytes of whole items, or not those of its shape",
)
"""What `_value` may find wrong with a sample; 0 is nothing."""

Maps = tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]
"""Of each shard the place of its first sample (behind them the number of all), its address, and its bytes."""

Kind = tuple[int, int, int, int]
"""Place of the column that is read, dtype mark of its values (0 for none), 1 where they have a shape, bytes of an item.

No class, as numba's cache would look for it by its name, and fail once it has another."""


class MdsColumn:
    """One column of all shards of a folder.

    Forked processes may use it too. The files must stay as they are while it is in use.

    Args:
        folder: holds `index.json` and the shards, not compressed.
        names: columns that will do; the first that is there is taken.
        bytes_dtype: integer type of the items where the column is `bytes`.

    Attributes:
        name: the column taken.
        encoding: what it holds: str, bytes, ndarray, ndarray:uint16 and so on.
        dtype: integer type of its items; None where it is `str`.

    Raises:
        ConfigError: something is missing or damaged, or will not do.
    """

    def __init__(self, folder: Path, names: Sequence[str], bytes_dtype: str = "int64") -> None:
        if bytes_dtype not in DTYPES.values():
            raise ConfigError(f"bytes_dtype={bytes_dtype}: must be one of {', '.join(DTYPES.values())}")
        shards = shards_in(folder)
        columns = shards[0].columns
        column = next((i for name in names for i in range(len(columns)) if columns[i][0] == name), None)
        if column is None:
            there = ", ".join(f"{name} ({encoding})" for name, encoding, _ in columns)
            raise ConfigError(f"{folder}: has no column {' or '.join(names)}; give one of {there}")
        self.name, encoding, fixed_size = columns[column]
        self.encoding = encoding
        array = NDARRAY.fullmatch(encoding)
        if not array and encoding not in ("str", "bytes"):
            raise ConfigError(f"{folder}: {self.name} is {encoding}; it must be str, bytes or ndarray of integers")
        self._files = [shard.file for shard in shards]
        self._mapped = [map_shard(shard) for shard in shards]  # the addresses hold as long as these live
        expect_random_reads(self._mapped)
        self._maps: Maps = (
            np.cumsum([0, *(shard.samples for shard in shards)], dtype=np.int64),
            np.array([mapping.data_ptr() for mapping in self._mapped], np.uint64),
            np.array([shard.size for shard in shards], np.int64),
        )
        self._column_sizes = np.array([size for _, _, size in columns], np.int64)
        self._kind: Kind = (column, 0, 0, 1)
        self.dtype: np.dtype[Any] | None = None
        if encoding != "str":
            dtype, shape = array.groups() if array else (bytes_dtype, None)
            mark = 0 if dtype else int(self.gather(np.zeros(1, np.int64))[0][:1].sum())  # read as if it were bytes
            if mark not in DTYPES and not dtype:
                raise ConfigError(f"{self._files[0]}: {self.name} of sample 0 has dtype {mark}, no integer type")
            self.dtype = np.dtype(dtype or DTYPES[mark])
            if shape and math.prod(map(int, shape.split(","))) * self.dtype.itemsize != fixed_size:
                raise ConfigError(f"{folder / INDEX}: {encoding} cannot have {fixed_size} bytes; write it anew")
            self._kind = (column, mark, int(array is not None and not shape), self.dtype.itemsize)

    def __len__(self) -> int:
        return int(self._maps[0][-1])

    def gather(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Values of some samples, read without the interpreter's lock.

        Args:
            numbers: int64 `(values,)`, places of the samples in the folder, in any order.

        Returns:
            uint8 `(bytes,)`, their items or their text end to end, and int64 `(values,)`, how many bytes each has.

        Raises:
            IndexError: there is no such sample.
            ConfigError: a sample is damaged, or has another dtype than the first.
        """
        numbers = np.ascontiguousarray(numbers, np.int64)
        for number in numbers[(numbers < 0) | (numbers >= len(self))][:1]:
            raise IndexError(f"sample {number} of {self._files[0].parent} must lie between 0 and {len(self) - 1}")
        values, lengths, wrong, shard, number = _gathered(numbers, self._maps, self._column_sizes, self._kind)
        if wrong:
            raise ConfigError(f"{self._files[shard]}: {self.name} of sample {number} {WRONG[wrong]}; write it anew")
        return values, lengths


@intrinsic  # type: ignore[untyped-decorator,unused-ignore]
def _at(context: Any, address: Any) -> Any:
    """The pointer to the bytes at an address."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint8)(types.uint64), build


@compiled
def _gathered(
    numbers: NDArray[np.int64], maps: Maps, column_sizes: NDArray[np.int64], kind: Kind
) -> tuple[NDArray[np.uint8], NDArray[np.int64], int, int, int]:
    """What `gather` gives for these numbers, and the first thing that is wrong, with its shard and sample."""
    first_samples, addresses, sizes = maps
    starts = np.empty(len(numbers), np.uint64)
    lengths = np.empty(len(numbers), np.int64)
    for i, number in enumerate(numbers):
        shard = np.searchsorted(first_samples, number, side="right") - 1
        file = carray(_at(addresses[shard]), sizes[shard])
        wrong, start, stop = _value(file, number - first_samples[shard], column_sizes, kind)
        if wrong:
            return np.empty(0, np.uint8), lengths, wrong, shard, number
        starts[i] = addresses[shard] + np.uint64(start)
        lengths[i] = stop - start
    values = np.empty(lengths.sum(), np.uint8)
    at = 0
    for address, length in zip(starts, lengths):  # noqa: B905 (not in compiled code)
        values[at : at + length] = carray(_at(address), length)
        at += length
    return values, lengths, 0, 0, 0


@compiled
def _value(file: NDArray[np.uint8], place: int, column_sizes: NDArray[np.int64], kind: Kind) -> tuple[int, int, int]:
    """What is wrong with a value of a shard, 0 for nothing, and from where to where its items or text go."""
    taken_column, dtype_mark, has_shape, item_size = kind
    head, end = _number(file, 4 * (place + 1), 4), _number(file, 4 * (place + 2), 4)
    start = length = taken = 0
    for column, fixed_size in enumerate(column_sizes):
        size = fixed_size
        if fixed_size == 0:
            if head + 4 > min(end, len(file)):
                return 1, 0, 0
            size = _number(file, head, 4)
            head += 4
        if column == taken_column:
            start, length = taken, size
        taken += size
    if head + taken != end or end > len(file):
        return 1, 0, 0
    start += head
    stop = start + length
    if dtype_mark:
        if start == stop or file[start] != dtype_mark:
            return 2, 0, 0
        start += 1
    if has_shape:
        mark = file[start] if start < stop else 0
        dimensions, extent_size = mark >> 2, 1 << (mark & 3)
        shape, start = start + 1, start + 1 + dimensions * extent_size
        if start > stop:
            return 3, 0, 0
        left = (stop - start) // item_size
        for i in range(dimensions):
            extent = _number(file, shape + i * extent_size, extent_size)
            left = left // extent if extent > 0 and left % extent == 0 else 0
        if left != 1:
            return 3, 0, 0
    return 3 if (stop - start) % item_size else 0, start, stop


@compiled
def _number(file: NDArray[np.uint8], at: int, size: int) -> int:
    """The unsigned number of so many bytes at a place that need not be aligned."""
    number = 0
    for i in range(size):
        number |= int(file[at + i]) << (8 * i)
    return number
