import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming import LocalDataset, MDSWriter
from streaming.base.compression import decompress
from torch.utils.data import DataLoader, Dataset

from composer_packing.common.errors import ConfigError
from composer_packing.data.mds.column import PROBLEMS, MdsColumn
from tests.tools import ROOT

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def write_column(folder: Path, encoding: str, values: Sequence[Any], size_limit: int = 400, **others: Any) -> Path:
    """A folder with the column `ids` between columns of other encodings, in shards of at most 400 bytes."""
    columns = {"a": "str", "b": "int", "c": "bytes", "ids": encoding, "x": "json", "y": "uint16", "z": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=size_limit, **others) as writer:
        for i, value in enumerate(values):
            around = {"a": "ä" * (i % 3), "b": -i, "c": bytes(i % 5), "x": {"i": i}, "y": i % 9, "z": "z" * (i % 4)}
            writer.write(around | {"ids": value})
    return folder


def as_bytes(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    return value.encode() if isinstance(value, str) else bytes(value)


def arrays(dtype: str, shape: tuple[int, ...] | None = None) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3) if shape is None else st.just(shape)
    long = st.just((300,)) if shape is None else shapes  # this extent needs two bytes

    def make(shape: Sequence[int], seed: int) -> Any:
        return np.random.default_rng(seed).integers(0, 127, tuple(shape), np.uint8).astype(dtype)

    return st.builds(make, shapes | long, st.integers(0, 99))


@st.composite
def columns(draw: st.DrawFn) -> tuple[str, str | None, list[Any]]:
    """An encoding, the dtype that must be found, and the values."""
    kind = draw(st.sampled_from(["str", "bytes", "ndarray", "ndarray:", "ndarray::"]))
    dtype = draw(st.sampled_from(INTEGERS))
    encoding, value = kind, arrays(dtype)
    if kind == "str":
        return kind, None, draw(st.lists(st.text(max_size=9), min_size=1, max_size=30))
    if kind == "bytes":
        value = arrays(dtype).map(np.ndarray.tobytes) | st.just(b"")
    if kind == "ndarray:":
        encoding = f"ndarray:{dtype}"
    if kind == "ndarray::":
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
        encoding, value = f"ndarray:{dtype}:{','.join(map(str, shape))}", arrays(dtype, shape)
    return encoding, dtype, draw(st.lists(value, min_size=1, max_size=30))


@pytest.mark.slow
@settings(max_examples=40)
@given(columns(), st.data())
def test_any_samples_in_any_order_are_what_streaming_reads(column: Any, data: st.DataObject) -> None:
    encoding, dtype, values = column
    with tempfile.TemporaryDirectory() as folder:
        write_column(Path(folder) / "mds", encoding, values)
        theirs = LocalDataset(f"{folder}/mds")
        ours = MdsColumn(Path(folder) / "mds", ["none", "ids", "a"], bytes_dtype=dtype or "int64")
        assert (ours.name, ours.encoding, len(ours)) == ("ids", encoding, len(values))
        assert ours.dtype == (None if dtype is None else np.dtype(dtype))
        numbers = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=60))
        for some in (numbers, range(len(values))):
            expected = [as_bytes(theirs[i]["ids"]) for i in some]
            gathered, lengths = ours.gather(np.array(some, np.int64))
            assert (gathered.dtype.name, lengths.dtype.name) == ("uint8", "int64")
            assert gathered.tobytes() == b"".join(expected)
            assert lengths.tolist() == [len(value) for value in expected]


def test_the_first_name_that_the_shards_have_is_taken(tmp_path: Path) -> None:
    write_column(tmp_path / "mds", "str", ["one"])
    assert MdsColumn(tmp_path / "mds", ["z", "a"]).name == "z"
    assert MdsColumn(tmp_path / "mds", ["nothing", "a", "z"]).name == "a"


def test_a_shard_in_a_subfolder_and_a_shard_unpacked_by_hand_are_read(tmp_path: Path) -> None:
    folder = write_column(tmp_path / "mds", "bytes", [bytes(8)] * 9, compression="zstd")
    LocalDataset(str(folder))
    index = json.loads((folder / "index.json").read_text())
    (folder / "0").mkdir()
    for shard in index["shards"]:
        unpacked = decompress("zstd", (folder / shard["zip_data"]["basename"]).read_bytes())
        shard["raw_data"]["basename"] = f"0/{shard['raw_data']['basename']}"
        (folder / shard["raw_data"]["basename"]).write_bytes(unpacked)
    (folder / "index.json").write_text(json.dumps(index))
    assert MdsColumn(folder, ["ids"]).gather(np.arange(9))[1].tolist() == [8] * 9


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of ten arrays."""
    values = [np.arange(1 + i, dtype=np.uint16) for i in range(10)]
    return write_column(tmp_path_factory.mktemp("sound") / "mds", "ndarray", values)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy of the sound folder, for a test to damage."""
    return Path(shutil.copytree(sound, tmp_path / "mds"))


def error_of(call: Callable[[], Any], folder: Path, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "FOLDER")


@pytest.mark.parametrize("number", [-1, 10, 2**62, -(2**63)])
def test_a_number_without_a_sample_is_an_index_error(sound: Path, number: int) -> None:
    column = MdsColumn(sound, ["ids"])
    error = error_of(lambda: column.gather(np.array([3, number, 4])), sound, IndexError)
    assert error == f"sample {number} of FOLDER must lie between 0 and 9"


def test_a_folder_without_an_index_is_an_error_that_names_subfolders_with_one(
    tmp_path: Path,
) -> None:
    missing = error_of(lambda: MdsColumn(tmp_path / "no", ["ids"]), tmp_path)
    assert missing == "FOLDER/no: there is no such folder; give a folder of MDS shards"
    empty = error_of(lambda: MdsColumn(tmp_path, ["ids"]), tmp_path)
    assert empty == "FOLDER: holds no index.json; give a folder of shards"
    for split in ("val", "train"):
        write_column(tmp_path / split, "str", ["text"])
    assert (
        error_of(lambda: MdsColumn(tmp_path, ["ids"]), tmp_path)
        == "FOLDER: holds no index.json; give one of train, val"
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda index: index.update(version=3), "ValueError: format mds, version 3; only mds, version 2, can be read"),
        (
            lambda index: index["shards"][1].update(format="json"),
            "ValueError: format json, version 2; only mds, version 2, can be read",
        ),
        (lambda index: index.update(shards=[]), "ValueError: no samples"),
        (lambda index: index.pop("shards"), "KeyError: 'shards'"),
        (lambda index: index["shards"][0].update(samples=-1), "ValueError: -1 is not a uint32"),
        (lambda index: index["shards"][0].update(samples="9"), "ValueError: '9' is not a uint32"),
        (lambda index: index["shards"][0].pop("raw_data"), "KeyError: 'raw_data'"),
        (
            lambda index: index["shards"][2].update(column_encodings=["str"] * 7),
            "ValueError: shard.00002.mds has other columns than shard.00000.mds",
        ),
        (
            lambda index: index["shards"][0].update(column_sizes=[1]),
            "ValueError: zip() argument 3 is shorter than arguments 1-2",
        ),
    ],
)
def test_an_index_that_cannot_be_used_is_an_error_that_says_why(
    folder: Path, change: Callable[[Any], Any], what: str
) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    error = error_of(lambda: MdsColumn(folder, ["ids"]), folder)
    assert error == f"FOLDER/index.json: cannot be used ({what}); give an index that streaming.MDSWriter wrote"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"version": 2, "shards": [7]}'])
def test_an_index_file_that_holds_something_else_is_an_error(folder: Path, text: bytes) -> None:
    (folder / "index.json").write_bytes(text)
    assert error_of(lambda: MdsColumn(folder, ["ids"]), folder).startswith("FOLDER/index.json: cannot be used (")


def test_a_missing_column_is_an_error_that_lists_the_existing_columns(sound: Path) -> None:
    assert error_of(lambda: MdsColumn(sound, ["text", "tokens"]), sound) == (
        "FOLDER: has no column text or tokens; give one of a (str), b (int), c (bytes), ids (ndarray), x (json), "
        "y (uint16), z (str)"
    )


@pytest.mark.parametrize(("name", "encoding"), [("b", "int"), ("x", "json"), ("y", "uint16")])
def test_an_encoding_of_neither_text_nor_integers_is_an_error(sound: Path, name: str, encoding: str) -> None:
    error = error_of(lambda: MdsColumn(sound, [name]), sound)
    assert error == f"FOLDER: {name} is {encoding}; it must be str, bytes or ndarray of integers"


def test_floats_are_an_error_and_so_is_a_bytes_dtype_that_is_not_an_integer(sound: Path, tmp_path: Path) -> None:
    floats = np.ones(3, np.float32)
    known, unknown = (write_column(tmp_path / name, name, [floats]) for name in ("ndarray:float32", "ndarray"))
    assert error_of(lambda: MdsColumn(known, ["ids"]), known) == (
        "FOLDER: ids is ndarray:float32; it must be str, bytes or ndarray of integers"
    )
    assert error_of(lambda: MdsColumn(unknown, ["ids"]), unknown) == (
        "FOLDER/shard.00000.mds: ids of sample 0 has dtype mark 34; it must hold integers"
    )
    assert error_of(lambda: MdsColumn(sound, ["c"], bytes_dtype="float32"), sound) == (
        f"bytes_dtype=float32: must be one of {', '.join([*INTEGERS[::2], *INTEGERS[1::2]])}"
    )


def test_a_shard_that_is_missing_or_exists_only_compressed_is_an_error(folder: Path, tmp_path: Path) -> None:
    (folder / "shard.00001.mds").unlink()
    assert error_of(lambda: MdsColumn(folder, ["ids"]), folder) == (
        "FOLDER/shard.00001.mds: is missing, though index.json lists it; copy the folder again"
    )
    packed = write_column(tmp_path / "packed", "str", ["text"], compression="zstd")
    assert error_of(lambda: MdsColumn(packed, ["ids"]), packed) == (
        "FOLDER/shard.00000.mds: must be unpacked from shard.00000.mds.zstd; or use the source `streaming`, which "
        "unpacks by itself"
    )


def put(file: Path, at: int, number: int) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + 4] = number.to_bytes(4, "little")
    file.write_bytes(content)


def damage_head(file: Path, damage: str, samples: int) -> None:
    size = file.stat().st_size
    if damage == "truncated":
        os.truncate(file, size - 1)
    elif damage == "empty":
        os.truncate(file, 0)
    elif damage == "samples":
        put(file, 0, samples + 1)
    elif damage == "first offset":
        put(file, 4, 7)
    elif damage == "last offset":
        put(file, 4 * (samples + 1), size + 1)
    elif damage == "columns":
        file.write_bytes(file.read_bytes().replace(b'"ids"', b'"idx"'))
    else:
        file.write_bytes(file.read_bytes().replace(b"column_names", b"column_nanes"))


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ("truncated", "ValueError: {less} bytes, not {size} with {samples} samples"),
        ("empty", "ValueError: 0 bytes, not {size} with {samples} samples"),
        ("samples", "ValueError: {more} samples from byte {begin} to {size}, not {samples} in {size} bytes"),
        ("first offset", "ValueError: {samples} samples from byte 7 to {size}, not {samples} in {size} bytes"),
        ("last offset", "ValueError: {samples} samples from byte {begin} to {over}, not {samples} in {size} bytes"),
        ("columns", "ValueError: other columns"),
        ("no columns", "KeyError: 'column_names'"),
    ],
)
def test_a_head_that_differs_from_the_index_is_an_error(folder: Path, damage: str, what: str) -> None:
    file = folder / "shard.00001.mds"
    samples, begin = np.frombuffer(file.read_bytes()[:8], np.uint32).tolist()
    size = file.stat().st_size
    damage_head(file, damage, samples)
    values = {"samples": samples, "more": samples + 1, "begin": begin, "size": size, "less": size - 1, "over": size + 1}
    error = error_of(lambda: MdsColumn(folder, ["ids"]), folder)
    kind, shown = what.format(**values).split(": ", 1)
    assert (
        error
        == f"FOLDER/shard.00001.mds: differs from what index.json says ({kind}: {shown[:80]}); copy the file again"
    )


def test_a_size_that_does_not_go_with_the_shape_is_an_error(tmp_path: Path) -> None:
    folder = write_column(tmp_path / "mds", "ndarray:uint16:3", [np.arange(3, dtype=np.uint16)])
    for file in folder.iterdir():  # the length stays, so that nothing else is wrong
        file.write_bytes(file.read_bytes().replace(b"ndarray:uint16:3", b"ndarray:uint16:4"))
    assert error_of(lambda: MdsColumn(folder, ["ids"]), folder) == (
        "FOLDER/index.json: ndarray:uint16:4 cannot have 6 bytes; write the shards again"
    )


def test_a_sample_whose_dtype_differs_from_the_first_is_an_error_that_names_the_sample(tmp_path: Path) -> None:
    values = [np.arange(3, dtype=dtype) for dtype in ("uint16", "uint16", "int32")]
    column = MdsColumn(write_column(tmp_path / "mds", "ndarray", values, size_limit=1 << 16), ["ids"])
    assert column.gather(np.array([1, 0]))[1].tolist() == [6, 6]
    assert error_of(lambda: column.gather(np.array([1, 2, 0])), tmp_path / "mds") == (
        "FOLDER/shard.00000.mds: ids of sample 2 has a dtype that differs from that of the first sample; write the "
        "shards again"
    )


def test_bytes_that_are_not_whole_items_are_an_error_that_names_the_sample(tmp_path: Path) -> None:
    column = MdsColumn(write_column(tmp_path / "mds", "bytes", [bytes(8), bytes(9)]), ["ids"])
    assert error_of(lambda: column.gather(np.arange(2)), tmp_path / "mds") == (
        "FOLDER/shard.00000.mds: ids of sample 1 does not have the bytes of whole items, or not those of its "
        "shape; write the shards again"
    )


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x10",  # the dtype mark of uint16, and nothing else
        b"\x10\x04",  # one dimension, without its extent
        b"\x10\x04\x02ab",
        b"\x10\x04\x02abcde",
        b"\x10\x04\x00",
        b"\x10\xff" + bytes(40),  # 63 dimensions of 8 bytes each
        b"\x10\x07" + (2**63 + 2).to_bytes(8, "little") + b"abcd",
        b"\x10\x0b" + (2**32).to_bytes(8, "little") * 2,  # their product overflows to 0
        b"\x10\x00abcd",  # no dimension, two items
    ],
)
def test_a_shape_that_does_not_go_with_the_items_is_an_error(tmp_path: Path, value: bytes) -> None:
    column = MdsColumn(write_column(tmp_path / "mds", "ndarray", [np.ones(1, np.uint16), value]), ["ids"])
    error = error_of(lambda: column.gather(np.arange(2)), tmp_path)
    assert any(f"ids of sample 1 {problem}" in error for problem in PROBLEMS.values())


def flip_bytes(content: bytes, rng: np.random.Generator, up_to: int) -> bytes:
    """Change one to three of the first `up_to` bytes at random; half the time also overwrite four bytes with a size."""
    damaged = bytearray(content)
    for at in rng.integers(0, up_to, rng.integers(1, 4)):
        damaged[at : at + 1] = rng.bytes(1)
    if rng.integers(2):
        at = rng.integers(0, up_to - 4)
        damaged[at : at + 4] = int(rng.choice([0, 2**31, 2**32 - 1, len(content), len(content) - 1])).to_bytes(
            4, "little"
        )
    return bytes(damaged)


@pytest.mark.parametrize("encoding", ["str", "bytes", "ndarray", "ndarray:uint16", "ndarray:uint16:4"])
def test_damage_anywhere_gives_an_error_or_nothing_worse_than_wrong_values(tmp_path: Path, encoding: str) -> None:
    array = np.arange(4, dtype=np.uint16)
    value = {"str": "text", "bytes": bytes(8)}.get(encoding, array)
    folder = write_column(tmp_path / "mds", encoding, [value] * 6, size_limit=1 << 16)
    file = folder / "shard.00000.mds"
    content, rng = file.read_bytes(), np.random.default_rng(len(encoding))
    errors = 0
    for _ in range(1000):
        file.unlink()
        file.write_bytes(flip_bytes(content, rng, len(content)))
        try:
            values, lengths = MdsColumn(folder, ["ids"]).gather(np.arange(6))
            assert lengths.sum() == len(values) <= 6 * len(content)
            assert (lengths >= 0).all()
        except ConfigError as error:
            errors += str(file) in str(error)
    assert errors > 100


def test_damage_after_opening_is_found_in_every_sample(folder: Path) -> None:
    column = MdsColumn(folder, ["ids"])
    file = folder / "shard.00000.mds"
    content, rng = file.read_bytes(), np.random.default_rng(0)
    samples = int(np.frombuffer(content[:4], np.uint32)[0])
    errors = 0
    for _ in range(3000):
        with open(file, "r+b") as opened:  # not a new file: this one is mapped
            opened.write(flip_bytes(content, rng, len(content)))
        try:
            column.gather(np.arange(samples))
        except ConfigError as error:
            errors += f"{file}: ids of sample " in str(error)
    assert errors > 1000


@pytest.mark.slow
def test_reading_a_damaged_shard_of_whole_pages_does_not_crash_the_process(tmp_path: Path) -> None:
    def size_with(last: int) -> int:
        shutil.rmtree(tmp_path / "mds", ignore_errors=True)
        write_column(tmp_path / "mds", "bytes", [b"x" * 9] * 3 + [b"y" * last], size_limit=1 << 16)
        return (tmp_path / "mds" / "shard.00000.mds").stat().st_size

    assert size_with(4096 - size_with(0) % 4096) % 4096 == 0  # a read after the end would be outside the mapping
    code = """
        import sys
        from pathlib import Path
        import numpy as np
        from tests.data.test_mds import ConfigError, MdsColumn, flip_bytes

        file = Path(sys.argv[1]) / "shard.00000.mds"
        content, rng = file.read_bytes(), np.random.default_rng(0)
        for i in range(2000):
            file.unlink()
            file.write_bytes(flip_bytes(content, rng, 24 if i % 2 else len(content)))
            try:
                MdsColumn(file.parent, ["ids"], bytes_dtype="int8").gather(np.arange(4))
            except ConfigError:
                pass
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "mds")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)


class Gathered(Dataset[Any]):
    def __init__(self, column: MdsColumn) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitems__(self, numbers: Sequence[int]) -> bytes:
        return self.column.gather(np.array(numbers))[0].tobytes()


def test_forked_workers_read_the_same_values(sound: Path) -> None:
    dataset = Gathered(MdsColumn(sound, ["ids"]))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=3, num_workers=2, multiprocessing_context="fork", collate_fn=lambda batch: batch
    )
    theirs = LocalDataset(str(sound))
    assert b"".join(loader) == b"".join(theirs[i]["ids"].tobytes() for i in range(10))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 2000 shards with one sample each."""
    values = [bytes([i % 251]) * 8 for i in range(2000)]
    return write_column(tmp_path_factory.mktemp("many") / "mds", "bytes", values, size_limit=1)


def test_thousands_of_shards_keep_no_file_open(many: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    column = MdsColumn(many, ["ids"])
    assert len(os.listdir("/proc/self/fd")) == before
    numbers = np.random.default_rng(0).permutation(2000)
    values, lengths = column.gather(numbers)
    assert lengths.tolist() == [8] * 2000
    assert values[::8].tolist() == (numbers % 251).tolist()


def test_shards_that_are_larger_than_the_memory_are_read_too(sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = MdsColumn(sound, ["ids"]).gather(np.arange(10))[0]
    monkeypatch.setattr(os, "sysconf", lambda name: 4)
    np.testing.assert_array_equal(MdsColumn(sound, ["ids"]).gather(np.arange(10))[0], before)


def test_an_open_column_does_not_take_more_memory_for_more_samples(tmp_path: Path) -> None:
    few, more = (
        MdsColumn(write_column(tmp_path / str(count), "str", [""] * count, size_limit=1 << 20), ["ids"])
        for count in (10, 1000)
    )
    sizes = [
        [part.nbytes for part in (*column._maps, column._column_sizes) if isinstance(part, np.ndarray)]
        for column in (few, more)
    ]
    assert sizes[0] == sizes[1]
