"""Records of files as raw bytes, read in order: lines, documents and rows of Parquet and Hugging Face datasets.

Memory holds a block of a file, or one record where that is longer, and a record has a bound.
"""

import codecs
import gzip
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from composer_packing.common.errors import one_line

MAX_RECORD = 1 << 24
"""Bytes of the longest line, document or text that is taken: 16 MiB."""

BLOCK = 1 << 20
"""Bytes that are read at once."""


class Raw(NamedTuple):
    """A record as it was read.

    Attributes:
        path: where from.
        line: of its beginning; for Parquet and datasets the row; counted from 1.
        form: `file` or `blank_line` for documents of `.txt`, `jsonl`, or `row`.
        data: UTF-8, if all is well.
    """

    path: str
    line: int
    form: str
    data: bytes


class Problem(NamedTuple):
    """Why something was not read.

    Attributes:
        reason: a few words that are the same for all of the kind.
        message: one line: where, the reason, the value and what would do.
    """

    reason: str
    message: str


def problem(where: str, reason: str, value: str, cure: str) -> Problem:
    """A problem whose message says it all in one line."""
    return Problem(reason, f"{where}: {reason} ({value}); {cure}")


def _too_long(path: Path, line: int, start: bytes) -> Problem:
    value = f"more than {MAX_RECORD:,} bytes, {start[:20]!r}..."
    return problem(f"{path}:{line}", "too long record", value, "split it")


class Records:
    """The records of a file, or of a folder that `save_to_disk` wrote.

    Args:
        path: the file, of one of the kinds in `texts.SUFFIXES`.
        text_field: column with the text, where there are columns.
        document_per: `file` or `blank_line`.

    Attributes:
        size: bytes on disk.
    """

    def __init__(self, path: Path, text_field: str, document_per: str) -> None:
        self.size = size_of(path)
        self._path, self._text_field, self._document_per = path, text_field, document_per
        self._position: Callable[[], int] = lambda: 0

    @property
    def position(self) -> int:
        """Bytes of the file that have been read, or about as many."""
        return self._position()

    def __iter__(self) -> Iterator[Raw | Problem]:
        """Records in order; a file that is empty, or cannot be read any further, ends in a problem."""
        line = 0
        try:
            for record in self._records():
                line = record.line if isinstance(record, Raw) else line
                yield record
        except Exception as error:  # pyarrow and datasets raise what their parts raise
            reason = getattr(error, "strerror", None) or one_line(error, None)
            where = f"{self._path}:{line + 1}" if line else str(self._path)
            yield problem(where, "unreadable file", f"{reason:.160}", "copy or write it anew, or make it readable")

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
            yield problem(str(self._path), "empty file", "0 documents", "leave it out")
        else:
            yield first
            yield from records

    def _records_of_lines(self, is_jsonl: bool) -> Iterator[Raw | Problem]:
        with open(self._path, "rb", buffering=0) as raw:
            self._position = raw.tell
            file = self._decompressed(raw)
            if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                value, cure = "UTF-16, by its first two bytes", "convert it by iconv -f UTF-16 -t UTF-8"
                yield problem(f"{self._path}:1", "wrong encoding", value, cure)
            elif is_jsonl:
                for number, line in _lines(file):
                    yield self._record(number, "jsonl", line)
            elif self._document_per == "blank_line":
                yield from self._paragraphs(file)
            elif document := file.read(MAX_RECORD + 1):
                yield self._record(1, "file", document)

    def _decompressed(self, raw: io.FileIO) -> Any:
        """What a file holds, unpacked."""
        suffix = self._path.suffix.lower()
        if suffix == ".gz":
            return gzip.GzipFile(fileobj=raw)  # no further buffer, in which what comes before damage would be lost
        if suffix == ".zst":
            import pyarrow

            return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), BLOCK)
        return io.BufferedReader(raw, BLOCK)

    def _record(self, line: int, form: str, data: bytes) -> Raw | Problem:
        if len(data) > MAX_RECORD:
            return _too_long(self._path, line, data)
        return Raw(str(self._path), line, form, data)

    def _paragraphs(self, file: IO[bytes]) -> Iterator[Raw | Problem]:
        """Runs of lines that are not blank; of those that are too long no more is kept than tells so."""
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
            if file.schema_arrow.names.count(self._text_field) != 1:
                yield self._missing_column(file.schema_arrow.names)
                return
            row = 1
            for group in range(file.num_row_groups):
                described = file.metadata.row_group(group)
                size = _batch_size(described.total_byte_size, described.num_rows)
                for batch in file.iter_batches(size, row_groups=[group], columns=[self._text_field]):
                    yield from self._rows(batch.column(0), row)
                    row += len(batch)
                    self._position = lambda row=row: self.size * (row - 1) // file.metadata.num_rows  # type: ignore[misc]

    def _rows_of_dataset(self) -> Iterator[Raw | Problem]:
        import datasets

        rows = datasets.load_from_disk(str(self._path))
        if self._text_field not in rows.column_names:
            yield self._missing_column(rows.column_names)
            return
        row, size = 1, _batch_size(rows.data.nbytes, len(rows))
        for table in rows.select_columns([self._text_field]).with_format("arrow").iter(size):
            yield from self._rows(table.column(0), row)
            row += len(table)
            self._position = lambda row=row: self.size * (row - 1) // len(rows)  # type: ignore[misc]

    def _missing_column(self, names: Sequence[str]) -> Problem:
        there = f"there is no single {self._text_field!r} among {', '.join(map(repr, names)):.80}"
        return problem(str(self._path), "missing field", there, "set text_field")

    def _rows(self, column: Any, first: int) -> Iterator[Raw | Problem]:
        """Rows of an Arrow column; nothing has checked that texts are UTF-8."""
        from pyarrow import large_binary, large_string, types

        if types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        is_text = str(column.type) in ("string", "large_string", "string_view")
        values = column.cast(large_string()).cast(large_binary()) if is_text else column
        for row, value in enumerate(values.to_pylist(), first):
            if is_text and value is not None:
                yield self._record(row, "row", value)
            else:
                yield not_a_string(f"{self._path}:{row}", self._text_field, value)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 where it cannot be told."""
    try:
        return sum(size_of(inner) for inner in path.iterdir()) if path.is_dir() else path.stat().st_size
    except OSError:
        return 0


def _batch_size(size: int, rows: int) -> int:
    """Rows of a table of `size` bytes that are read at once."""
    return min(max(BLOCK * rows // max(size, 1), 1), 1000)


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    r"""Lines without their `\n`, numbered from 1; of one that is too long only the first `MAX_RECORD + 1` bytes."""
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


def not_a_string(where: str, field: str, value: Any) -> Problem:
    """The problem of a text that is a number, a list, null or the like."""
    return problem(where, "field not a string", f"{field!r} is {value!r:.60}", "make it a string, or set text_field")
