import gzip
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from composer_packing.common.errors import ConfigError
from composer_packing.data.prepare import records as reading
from composer_packing.data.prepare.files import find_files
from composer_packing.data.prepare.record_text import held_out, looks_like_utf_16, text_of
from composer_packing.data.prepare.records import Problem, Raw, Records

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), max_size=20)


def read(
    path: Path, text_field: str = "text", document_per: str = "file"
) -> tuple[list[str], list[Problem], Counter[str]]:
    """Texts, problems and what was repaired of a file."""
    repaired: Counter[str] = Counter()
    records = Records(path, text_field, document_per)
    made = [record if isinstance(record, Problem) else text_of(record, text_field, repaired) for record in records]
    return (
        [each for each in made if isinstance(each, str)],
        [each for each in made if isinstance(each, Problem)],
        repaired,
    )


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def as_jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"n": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


ZEROS = ["\0", "\0" * 9, "a\0\0"]
"""Legal texts with more zeros than any text file has."""


@given(TEXTS)
@example(ZEROS)
def test_texts_written_as_lines_of_json_come_out_in_order_plain_or_compressed(folder: Path, texts: list[str]) -> None:
    content = as_jsonl(texts)
    for name, packed in {
        "a.jsonl": content,
        "a.jsonl.gz": gzip.compress(content[:99]) + gzip.compress(content[99:]),
        "a.jsonl.zst": zstandard.compress(content),
    }.items():
        got, problems, repaired = read(written(folder / name, packed))
        assert got == texts
        assert [problem.reason for problem in problems] == ["empty file"] * (not texts)
        assert not repaired


@given(TEXTS)
@example(ZEROS)
def test_texts_written_as_rows_of_parquet_come_out_in_order(folder: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import parquet

    plain = pyarrow.string()
    for kind in (plain, pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int32(), plain)):
        column = pyarrow.array(texts, plain).cast(kind)
        parquet.write_table(
            pyarrow.table({"n": range(len(texts)), "text": column}), folder / "a.parquet", row_group_size=3
        )
        assert read(folder / "a.parquet")[0] == texts


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r")).filter(
            lambda t: t.encode().strip() and t.strip()
        )
    ),
    st.lists(st.sampled_from(["\n", "\n \n", "\n\t\n\n"]), min_size=1, max_size=5),
    st.booleans(),
)
@example(ZEROS, ["\n"], False)
@example(["\ufeff\0"], ["\n"], True)
def test_runs_of_lines_come_out_in_order_whatever_blank_lines_are_between_them(
    folder: Path, texts: list[str], blanks: list[str], windows: bool
) -> None:
    documents = [f"{text}\n {text}" for text in texts]
    content = "".join(f"{document}\n{blanks[n % len(blanks)]}" for n, document in enumerate(documents))
    if windows:
        content = content.replace("\n", "\r\n")
    path = written(folder / "a.txt", content)
    got, problems, repaired = read(path, document_per="blank_line")
    in_file = [document.replace("\n", "\r\n") + "\r" if windows else document for document in documents]
    in_file[:1] = [document.removeprefix("\ufeff") for document in in_file[:1]]
    taken = [text for text, raw in zip(documents, in_file, strict=True) if not looks_like_utf_16(raw.encode())]
    assert [text.removeprefix("\ufeff") for text in got] == [text.removeprefix("\ufeff") for text in taken]
    wrong = [problem.reason for problem in problems if problem.reason != "empty file"]
    assert wrong == ["wrong encoding"] * (len(documents) - len(taken))
    assert repaired["CRLF line ends"] == windows * len(taken)


def test_one_in_so_many_texts_is_held_out_by_the_hash_of_the_text_alone() -> None:
    texts = [str(number) for number in range(20_000)]
    share = sum(held_out(text, 0.05) for text in texts) / len(texts)
    assert 0.04 < share < 0.06
    assert all(held_out(text, 0.06) for text in texts if held_out(text, 0.05))
    assert all(held_out(text, 1.0) and not held_out(text, 0.0) for text in texts)
    place = int(hashlib.sha256("é".encode()).hexdigest()[:16], 16) / 2**64
    assert held_out("é", place + 1e-6)
    assert not held_out("é", place - 1e-6)


def test_a_txt_file_is_one_document_and_is_left_as_it_is(tmp_path: Path) -> None:
    content = " a\n\n\u2028b\0\x85c\r\n"
    assert read(written(tmp_path / "a.txt", content)) == ([content[:-2] + "\n"], [], Counter({"CRLF line ends": 1}))
    assert read(written(tmp_path / "b.txt", "a\rb\r")) == (["a\rb\r"], [], Counter())


def test_a_row_that_is_no_utf_8_is_told_and_the_others_are_taken(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    offsets, data = pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"a\xffb")
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, offsets, data])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    texts, [problem], _ = read(tmp_path / "a.parquet")
    assert texts == ["a", "b"]
    assert problem.message.startswith(f"{tmp_path}/a.parquet:2: wrong encoding (not UTF-8 at b'\\xff'")


def test_what_is_repaired_is_counted(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    path = written(tmp_path / "a.jsonl", mark + b'{"text": "a"}\r\n\n \t\r\n{"text": "\xef\xbb\xbfb"}')
    assert read(path) == (["a", "\ufeffb"], [], Counter({"blank line": 2, "byte-order mark": 1}))
    assert read(written(tmp_path / "a.txt", mark + b"a")) == (["a"], [], Counter({"byte-order mark": 1}))


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "wrong encoding": (b'{"text": "\xe9t\xe9"}', r"\(not UTF-8 at b'\\xe9t\\xe9\"}'\); convert it"),
    "not JSON": (b'{"text": "a"', r"\(Expecting ',' delimiter.*: '{\"text\": \"a\"'\); write"),
    "not a JSON object": (b'["a"]', r"\('\[\"a\"\]'\); write"),
    "missing field": (b'{"txt": "a", "id": 1}', r"\(there is no 'text' among 'txt', 'id'\); set text_field"),
    "field not a string": (b'{"text": null}', r"\('text' is None\); make it a string"),
    "empty text": (b'{"text": " \\n"}', r"\(' \\n'\); leave it out"),
    "lone surrogate": (b'{"text": "a\\ud800b"}', r"\(half a character in 'a\\ud800b'\); replace it"),
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_is_named_with_file_line_value_and_what_would_do(tmp_path: Path, reason: str) -> None:
    line, message = BAD_LINES[reason]
    path = written(tmp_path / "a.jsonl", b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}')
    texts, problems, _ = read(path)
    assert texts == ["one", "two"]
    assert [problem.reason for problem in problems] == [reason]
    assert problems[0].message.startswith(f"{path}:3: {reason} (")
    assert "\n" not in problems[0].message
    assert re.search(message, problems[0].message)


@pytest.mark.parametrize("line", [b"[" * 100_000, b"1" * 5000, b'{"text": NaN}', b"\0"])
def test_lines_that_json_cannot_bear_are_no_crash(tmp_path: Path, line: bytes) -> None:
    texts, problems, _ = read(written(tmp_path / "a.jsonl", line + b'\n{"text": "a"}'))
    assert texts == ["a"]
    assert len(problems) == 1
    assert len(problems[0].message) < 500


def test_legal_if_odd_json_is_taken(tmp_path: Path) -> None:
    content = b'{"text": "no", "text": "a\\u0000\\ud83d\\ude00"}\n  {"x": Infinity, "text": "\\u2028b"}  '
    assert read(written(tmp_path / "a.jsonl", content))[0] == ["a\0\U0001f600", "\u2028b"]


def test_the_line_of_a_wrong_byte_is_told_within_a_document(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", b"a\nb\n\nc\nd\xff")
    assert [problem.message.split(": ")[0] for problem in read(path)[1]] == [f"{path}:5"]
    texts, problems, _ = read(path, document_per="blank_line")
    assert texts == ["a\nb"]
    assert [problem.message.split(": ")[0] for problem in problems] == [f"{path}:5"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_called_by_its_name_and_passed_over_as_a_whole(tmp_path: Path, name: str, encoding: str) -> None:
    path = written(tmp_path / name, '\ufeff{"text": "a"}\n\n{"text": "b"}\n'.encode(encoding))
    for document_per in ("file", "blank_line"):
        texts, problems, _ = read(path, document_per=document_per)
        assert texts == []
        assert [problem.reason for problem in problems] == ["wrong encoding"]
        assert "UTF-16" in problems[0].message


@pytest.fixture
def records_of_100_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_RECORD", 100)
    monkeypatch.setattr(reading, "BLOCK", 64)


@pytest.mark.usefixtures("records_of_100_bytes")
@pytest.mark.parametrize("extra", [0, 1, 64, 1000])
def test_a_line_that_is_too_long_is_passed_over_and_the_next_one_taken(tmp_path: Path, extra: int) -> None:
    long = b'{"text": "' + b"x" * (100 - 12 + extra) + b'"}'
    for end in (b"\n", b'\n{"text": "b"}'):
        texts, problems, _ = read(written(tmp_path / "a.jsonl", b'{"text": "a"}\n' + long + end))
        assert len(texts) == 1 + (extra == 0) + (end != b"\n")
        assert [problem.message.split(" (")[0] for problem in problems] == [
            f"{tmp_path}/a.jsonl:2: too long record" for _ in range(extra > 0)
        ]


@pytest.mark.usefixtures("records_of_100_bytes")
@pytest.mark.parametrize("extra", [0, 1, 1000])
def test_documents_that_are_too_long_are_told_from_those_that_just_fit(tmp_path: Path, extra: int) -> None:
    path = written(tmp_path / "a.txt", "\n" + "x\n" * 50 + "x" * extra)
    assert (read(path)[0] == []) == (path.stat().st_size > 100)
    for lines in ("x\n" * (49 + extra) + "xx\n", "x" * (100 + extra) + "\n"):
        texts, problems, _ = read(written(tmp_path / "b.txt", f"a\n\n{lines}\nb\n"), document_per="blank_line")
        assert texts == ["a", lines[:-1], "b"][:: 1 + (extra > 0)]
        assert [problem.message.split(" (")[0] for problem in problems] == [
            f"{tmp_path}/b.txt:3: too long record" for _ in range(extra > 0)
        ]


@pytest.mark.usefixtures("records_of_100_bytes")
def test_rows_are_counted_from_1_and_those_that_are_no_texts_told(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = ["a", None, "x" * 101, " ", "b"] * 3
    parquet.write_table(pyarrow.table({"body": rows}), tmp_path / "a.parquet", row_group_size=4)
    texts, problems, _ = read(tmp_path / "a.parquet", "body")
    assert texts == ["a", "b"] * 3
    assert {problem.message.split(" (")[0].removeprefix(f"{tmp_path}/a.parquet:") for problem in problems} == {
        f"{5 * n + row}: {reason}"
        for n in range(3)
        for row, reason in ((2, "field not a string"), (3, "too long record"), (4, "empty text"))
    }
    parquet.write_table(pyarrow.table({"text": [1, 2]}), tmp_path / "b.parquet")
    assert [problem.message.split(")")[0] for problem in read(tmp_path / "b.parquet")[1]] == [
        f"{tmp_path}/b.parquet:{row}: field not a string ('text' is {row}" for row in (1, 2)
    ]
    _, [problem], _ = read(tmp_path / "a.parquet")
    assert problem.message.startswith(f"{tmp_path}/a.parquet: missing field (there is no single 'text' among 'body')")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.txt.gz", gzip.compress(b"", mtime=0)),
        ("a.jsonl", b""),
        ("a.jsonl.zst", zstandard.compress(b"")),
    ],
)
def test_an_empty_file_is_told(tmp_path: Path, name: str, content: bytes) -> None:
    _, [problem], _ = read(written(tmp_path / name, content))
    assert problem.message.startswith(f"{tmp_path}/{name}: empty file (0 documents); leave it out")


LINES = as_jsonl([hashlib.sha256(str(number).encode()).hexdigest() * 9 for number in range(5000)])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES)[:-100]),
        ("a.jsonl.gz", b"no gzip"),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-100]),
        ("a.jsonl.zst", b"no zstd"),
        ("a.parquet", b"no parquet"),
        ("a.parquet", b""),
    ],
)
def test_a_damaged_file_is_told_and_what_was_read_before_is_kept(tmp_path: Path, name: str, content: bytes) -> None:
    texts, [problem], _ = read(written(tmp_path / name, content))
    assert problem.reason == "unreadable file"
    line = f":{len(texts) + 1}" if texts else ""
    assert problem.message.startswith(f"{tmp_path}/{name}{line}: unreadable file (")
    assert bool(texts) == (len(content) > 1000)


def test_files_that_cannot_be_opened_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    _, [problem], _ = read(tmp_path / "a.txt")
    assert problem.message.startswith(f"{tmp_path}/a.txt: unreadable file (No such file or directory)")


def test_files_are_found_all_the_way_down_by_name_and_others_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in (
        "b/2.txt",
        "b/1.TXT",
        "b/c/x.jsonl.gz",
        "a.parquet",
        ".hidden.txt",
        ".git/x.txt",
        "b.txt",
        "x.csv",
        "y.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "circle").symlink_to(tmp_path)
    with caplog.at_level(logging.INFO):
        found = find_files([tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in found] == [
        "a.parquet",
        "b/1.TXT",
        "b/2.txt",
        "b/c/x.jsonl.gz",
        "b.txt",
    ]
    others = ", ".join(f"{tmp_path}/{name}" for name in ("circle", "x.csv", "y.json"))
    assert caplog.messages == [f"{tmp_path}: passed over other files (3): {others}"]
    assert find_files([tmp_path / "b.txt", tmp_path / "b"], (".txt",)) == [
        tmp_path / name for name in ("b.txt", "b/1.TXT", "b/2.txt")
    ]
    assert find_files([str(tmp_path / "b" / "c")]) == [tmp_path / "b/c/x.jsonl.gz"]


def _twice(folder: Path) -> list[Path]:
    return [written(folder / "a.txt", "a"), folder]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda folder: [], r"^there is no input; give files \(\.txt, "),
        (lambda folder: [folder / "none.txt"], r"none\.txt: does not exist; give files"),
        (
            lambda folder: [written(folder / "a.csv", "a")],
            r"a\.csv: is of another kind; give files \(\.txt",
        ),
        (lambda folder: [written(folder / "state.json", "{}")], r"state\.json: is of another kind"),
        (
            lambda folder: [written(folder / "a.csv", "a").parent],
            r": holds no \.txt, .*; give a folder",
        ),
        (_twice, r"a\.txt: is given 2 times"),
    ],
)
def test_inputs_that_will_not_do_are_an_error_of_one_line(
    tmp_path: Path, inputs: Callable[[Path], list[Path]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        find_files(inputs(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_data_set_on_disk_is_one_input_and_one_of_several_splits_names_them(tmp_path: Path) -> None:
    import datasets

    texts = [f"text {number}" for number in range(2500)]
    rows = datasets.Dataset.from_dict({"text": texts, "n": range(2500)})
    rows.select(range(2000)).save_to_disk(str(tmp_path / "one"))
    assert find_files([tmp_path]) == find_files([tmp_path / "one"]) == [tmp_path / "one"]
    assert read(tmp_path / "one")[0] == texts[:2000]
    _, [problem], _ = read(tmp_path / "one", "body")
    assert problem.message.startswith(f"{tmp_path}/one: missing field (there is no single 'body' among 'text', 'n')")
    arrow = next((tmp_path / "one").glob("*.arrow"))
    written(arrow, arrow.read_bytes()[:-5000])
    _, [problem], _ = read(tmp_path / "one")
    assert problem.reason == "unreadable file"

    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ConfigError, match=rf"give the folder of one: {tmp_path}/both/test, {tmp_path}/both/train$"):
        find_files([tmp_path / "both"])


def test_no_line_is_lost_of_a_paragraph_that_reaches_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_RECORD", 20)
    path = tmp_path / "a.txt"
    for first, is_kept in (("x" * 20, False), ("x" * 18, True), ("x" * 19, False)):
        path.write_text(f"{first}\ny\n\nnext")
        one, two = Records(path, "text", "blank_line")
        assert isinstance(two, Raw)
        assert two.data == b"next"
        if is_kept:
            assert isinstance(one, Raw)
            assert one.data == f"{first}\ny".encode()
        else:
            assert isinstance(one, Problem)
            assert one.reason == "too long record"


def test_a_file_is_read_by_the_end_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl.txt"
    path.write_text('{"text": "a"}')
    (record,) = Records(path, "text", "file")
    assert isinstance(record, Raw)
    assert record.form == "file"


def test_what_comes_before_damage_in_a_compressed_file_is_read(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 5000)
    for damaged, whole in ((packed + b"\0" * 512, True), (packed[:-4] + b"\1\1\1\1", False), (packed[:-8], False)):
        path.write_bytes(damaged)
        *records, last = Records(path, "text", "file")
        assert isinstance(last, Raw) == whole
        assert len(records) + whole == 5000
        if isinstance(last, Problem):
            assert last.message.startswith(f"{path}:5001: unreadable file (")


def test_a_pipe_in_a_folder_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "b.txt").touch()
    os.mkfifo(tmp_path / "a.txt")
    assert find_files([tmp_path]) == [tmp_path / "b.txt"]
    assert str(tmp_path / "a.txt") in caplog.text


def test_utf_16_without_a_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("hello".encode("utf-16-le"))
    (raw,) = Records(tmp_path / "a.txt", "text", "file")
    assert isinstance(raw, Raw)
    found = text_of(raw, "text", Counter())
    assert isinstance(found, Problem)
    assert found.reason == "wrong encoding"


def test_a_byte_order_mark_alone_on_its_line_is_blank(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf\n\nhello")
    (raw,) = Records(tmp_path / "a.txt", "text", "blank_line")
    assert isinstance(raw, Raw)
    assert (raw.line, raw.data) == (3, b"hello")
