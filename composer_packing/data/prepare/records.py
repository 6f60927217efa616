"""Records of files as raw bytes, in order: lines, documents, and rows of Parquet and of Hugging Face data sets.

Memory holds one block of a file, or one record if that is longer. The length of a record is limited.
"""

import codecs
import gzip
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from composer_packing.common.errors import one_line

MAX_RECORD = 1 << 24
"""Bytes of the longest line, document or text that is taken: 16 MiB."""

BLOCK = 1 << 20
"""Bytes that are read at once."""

EXAMPLE_FIELDS = ("prompt", "response", "messages", "tools")
"""Fields or columns of an example for fine-tuning: a prompt and a response, or messages and perhaps tools."""


class Raw(NamedTuple):
    """A record as it was read.

    Attributes:
        path: file of the record.
        line: line on which the record begins, or its row in Parquet and data sets; counted from 1.
        form: `file` or `blank_line` for a document of `.txt`, `jsonl` for a line of JSON, or `row`.
        data: the bytes, which should be UTF-8; for an example in a row, its fields as JSON.
    """

    path: str
    line: int
    form: str
    data: bytes


class Problem(NamedTuple):
    """Why a record or a file was not read.

    Attributes:
        reason: a few words, the same for all problems of a kind.
        message: one line: where the problem is, the reason, the value and what would help.
    """

    reason: str
    message: str

    @classmethod
    def at(cls, where: str, reason: str, value: str, cure: str) -> "Problem":
        """The problem whose message is made of these four."""
        return cls(reason, f"{where}: {reason} ({value}); {cure}")

    @classmethod
    def not_a_string(cls, where: str, field: str, value: Any) -> "Problem":
        """The problem of a text that is a number, a list, null or the like."""
        return cls.at(where, "field not a string", f"{field!r} is {value!r:.60}", "make it a string, or set text_field")


class Records:
    """The records of a file, or of a folder that `save_to_disk` wrote.

    Args:
        path: the file; `files.SUFFIXES` lists the kinds.
        text_field: column with the text, where the file has columns; None for the columns of `EXAMPLE_FIELDS`.
        document_per: what a document of `.txt` is: `file` or `blank_line`.

    Attributes:
        size: bytes on disk.
    """

    def __init__(self, path: Path, text_field: str | None, document_per: str) -> None:
        self.size = size_of(path)
        self._path, self._text_field, self._document_per = path, text_field, document_per
        self._position: Callable[[], int] = lambda: 0

    @property
    def position(self) -> int:
        """Bytes of the file that have been read, approximately."""
        return self._position()

    def __iter__(self) -> Iterator[Raw | Problem]:
        """Records in order. If the file is empty, or cannot be read to its end, the last item is a problem."""
        line = 0
        try:
            for record in self._records():
                line = record.line if isinstance(record, Raw) else line
                yield record
        except Exception as error:  # pyarrow and datasets let errors of any kind through
            reason = getattr(error, "strerror", None) or one_line(error, None)
            where = f"{self._path}:{line + 1}" if line else str(self._path)
            cure = "copy or write the file again, or make it readable"
            yield Problem.at(where, "unreadable file", f"{reason:.160}", cure)

    def _records(self) -> Iterator[Raw | Problem]:
        name = self._path.name.lower()
        if self._path.is_dir():
            records = self._rows_of_dataset()
        elif name.endswith(".parquet"):
            records = self._rows_of_parquet()
        else:
            records = self._records_of_lines(name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")))
        first = next(records, None)
        if first is None:
            yield Problem.at(str(self._path), "empty file", "0 documents", "leave it out")
        else:
            yield first
            yield from records

    def _records_of_lines(self, is_jsonl: bool) -> Iterator[Raw | Problem]:
        with open(self._path, "rb", buffering=0) as raw:
            self._position = raw.tell
            file = self._decompressed(raw)
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                value, cure = "UTF-16, by its first two bytes", "convert it by iconv -f UTF-16 -t UTF-8"
                yield Problem.at(f"{self._path}:1", "wrong encoding", value, cure)
            elif is_jsonl:
                for number, line in _lines(file):
                    yield self._record(number, "jsonl", line)
            elif self._document_per == "blank_line":
                yield from self._paragraphs(file)
            elif document := file.read(MAX_RECORD + 1):
                yield self._record(1, "file", document)

    def _decompressed(self, raw: io.FileIO) -> Any:
        """The file's contents without compression."""
        suffix = self._path.suffix.lower()
        if suffix == ".gz":
            return gzip.GzipFile(fileobj=raw)  # another buffer around this one would lose what comes before damage
        if suffix == ".zst":
            import pyarrow

            return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), BLOCK)
        return io.BufferedReader(raw, BLOCK)

    def _record(self, line: int, form: str, data: bytes) -> Raw | Problem:
        if len(data) > MAX_RECORD:
            value = f"more than {MAX_RECORD:,} bytes, {data[:20]!r}..."
            return Problem.at(f"{self._path}:{line}", "too long record", value, "split it")
        return Raw(str(self._path), line, form, data)

    def _paragraphs(self, file: IO[bytes]) -> Iterator[Raw | Problem]:
        """Runs of lines that are not blank. Of a run that is too long, only enough is kept to see that."""
        lines: list[bytes] = []
        size = first = number = 0
        for number, line in _lines(file):
            if not (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip():
                if lines:
                    yield self._record(first, "blank_line", b"\n".join(lines))
                lines, size = [], 0
            elif size <= MAX_RECORD + 1:  # the last line that is kept has no \n
                first = first if lines else number
                lines.append(line)
                size += len(line) + 1
        if lines:
            yield self._record(first, "blank_line", b"\n".join(lines))

    def _rows_of_parquet(self) -> Iterator[Raw | Problem]:
        from pyarrow import parquet

        with parquet.ParquetFile(self._path, buffer_size=BLOCK) as file:
            columns = self._columns(file.schema_arrow.names)
            if isinstance(columns, Problem):
                yield columns
                return
            row = 1
            for group in range(file.num_row_groups):
                described = file.metadata.row_group(group)
                size = _batch_size(described.total_byte_size, described.num_rows)
                for batch in file.iter_batches(size, row_groups=[group], columns=columns):
                    yield from self._rows(batch, row)
                    row += len(batch)
                    self._position = lambda row=row: self.size * (row - 1) // file.metadata.num_rows  # type: ignore[misc]

    def _rows_of_dataset(self) -> Iterator[Raw | Problem]:
        import datasets

        rows = datasets.load_from_disk(str(self._path))
        columns = self._columns(rows.column_names)
        if isinstance(columns, Problem):
            yield columns
            return
        row, size = 1, _batch_size(rows.data.nbytes, len(rows))
        for table in rows.select_columns(columns).with_format("arrow").iter(size):
            yield from self._rows(table, row)
            row += len(table)
            self._position = lambda row=row: self.size * (row - 1) // len(rows)  # type: ignore[misc]

    def _columns(self, names: Sequence[str]) -> list[str] | Problem:
        """The columns to read of those that a table has."""
        if self._text_field is not None:
            found, wanted = [name for name in names if name == self._text_field], repr(self._text_field)
            is_complete, cure = len(found) == 1, "set text_field"
        else:
            found, wanted = (
                [name for name in EXAMPLE_FIELDS if name in names],
                "'prompt' with 'response', or 'messages'",
            )
            is_complete, cure = "messages" in found or {"prompt", "response"} <= set(found), "rename the columns"
        if is_complete:
            return found
        there = f"there is no single {wanted} among {', '.join(map(repr, names)):.80}"
        return Problem.at(str(self._path), "missing field", there, cure)

    def _rows(self, table: Any, first: int) -> Iterator[Raw | Problem]:
        """The rows of an Arrow table; the first of them has this number."""
        return self._texts(table.column(0), first) if self._text_field is not None else self._examples(table, first)

    def _texts(self, column: Any, first: int) -> Iterator[Raw | Problem]:
        """The strings of a column. Nothing has checked that they are UTF-8."""
        from pyarrow import large_binary, large_string, types

        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        is_text = str(column.type) in ("string", "large_string", "string_view")
        values = column.cast(large_string()).cast(large_binary()) if is_text else column
        for row, value in enumerate(values.to_pylist(), first):
            if is_text and value is not None:
                yield self._record(row, "row", value)
            else:
                yield Problem.not_a_string(f"{self._path}:{row}", str(self._text_field), value)

    def _examples(self, table: Any, first: int) -> Iterator[Raw | Problem]:
        """Each row as JSON."""
        for index in range(len(table)):
            row = first + index
            try:
                (example,) = table.slice(index, 1).to_pylist()
            except UnicodeDecodeError as error:
                yield Problem.at(f"{self._path}:{row}", "wrong encoding", f"{error.reason}", "write the row again")
            else:
                yield self._record(row, "row", json.dumps(example, default=str).encode())


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 if the system does not tell."""
    try:
        return sum(size_of(inner) for inner in path.iterdir()) if path.is_dir() else path.stat().st_size
    except OSError:
        return 0


def _batch_size(size: int, rows: int) -> int:
    """How many rows of a table of `size` bytes are read at once."""
    return min(max(BLOCK * rows // max(size, 1), 1), 1000)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""Lines without their `\n`, numbered from 1. Of a line that is too long, only the first `MAX_RECORD + 1` bytes."""
    number = 0
    while line := file.readline(MAX_RECORD + 1):
        number += 1
        if line.endswith(b"\n"):
            yield number, line[:-1]
        else:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(BLOCK)
            yield number, line
