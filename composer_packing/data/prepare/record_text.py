"""The text or the example in a record, and which of them are held out for evaluation."""

import codecs
import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from composer_packing.data.prepare.records import EXAMPLE_FIELDS, Problem, Raw


def held_out(text: str, share: float) -> bool:
    """Whether a text is held out for evaluation: `share` of all texts are, the same ones wherever they turn up."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") < share * 2**64


def example_key(example: Mapping[str, Any]) -> str:
    """What decides whether an example is held out: its own fields as JSON, whatever other fields the record has."""
    return json.dumps({name: example[name] for name in EXAMPLE_FIELDS if example.get(name) is not None}, sort_keys=True)


def looks_like_utf_16(data: bytes) -> bool:
    """Whether bytes of a file whose encoding nobody states hold so many zeros that they must be UTF-16."""
    return data.count(0) > len(data) // 4


def text_of(raw: Raw, text_field: str, repaired: Counter[str], keep_blank: bool = False) -> str | Problem | None:
    """The text of a record; None for a blank line of `.jsonl`.

    Args:
        raw: the record.
        text_field: field with the text, in a line of JSON.
        repaired: counts what was repaired.
        keep_blank: a text of spaces only is a text too.
    """
    text = _decode(raw, repaired)
    if not isinstance(text, str):
        return text
    where = f"{raw.path}:{raw.line}"
    if raw.form == "jsonl":
        fields = _parse_object(where, text, text_field)
        if isinstance(fields, Problem):
            return fields
        if text_field not in fields:
            there = f"there is no {text_field!r} among {', '.join(map(repr, fields)):.80}"
            return Problem.at(where, "missing field", there, "set text_field")
        text = fields[text_field]
        if not isinstance(text, str):
            return Problem.not_a_string(where, text_field, text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            around = text[max(error.start - 20, 0) : error.end + 20]
            return Problem.at(where, "lone surrogate", f"half a character in {around!r}", "replace it")
    elif raw.form != "row":
        # The last line of a paragraph has lost its \n already.
        unix = (text.removesuffix("\r") if raw.form == "blank_line" else text).replace("\r\n", "\n")
        if unix != text:
            repaired["CRLF line ends"] += 1
            text = unix
    if not text.strip() and not (text and keep_blank):
        return Problem.at(where, "empty text", f"{text!r:.60}", "leave it out")
    return text


def example_of(raw: Raw, repaired: Counter[str]) -> dict[str, Any] | Problem | None:
    """The fields of an example; None for a blank line of `.jsonl`. `ExampleTokenizer` checks what they hold.

    Args:
        raw: the record, a line of JSON or a row as JSON.
        repaired: counts what was repaired.
    """
    text = _decode(raw, repaired)
    if not isinstance(text, str):
        return text
    return _parse_object(f"{raw.path}:{raw.line}", text, "messages")


def _decode(raw: Raw, repaired: Counter[str]) -> str | Problem | None:
    """The characters of a record; None for a blank line of `.jsonl`. Only a file may have marks, or be UTF-16."""
    data, where = raw.data, f"{raw.path}:{raw.line}"
    if raw.line == 1 and raw.form != "row" and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        repaired["byte-order mark"] += 1
    if raw.form != "row" and looks_like_utf_16(data):
        cure = "convert it by iconv -f UTF-16 -t UTF-8"
        return Problem.at(where, "wrong encoding", f"many zeros in {data[:20]!r}, as in UTF-16", cure)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = raw.line + data.count(b"\n", 0, error.start)
        value = f"not UTF-8 at {data[error.start : error.start + 10]!r}"
        return Problem.at(f"{raw.path}:{line}", "wrong encoding", value, "convert it by iconv -t UTF-8")
    if raw.form == "jsonl" and not text.strip():
        repaired["blank line"] += 1
        return None
    return text


def _parse_object(where: str, line: str, field: str) -> dict[str, Any] | Problem:
    """The fields of a line of JSON; errors show an object with this field."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Problem.at(where, "not JSON", f"{error!s:.60}: {line!r:.60}", "write one JSON object per line")
    if not isinstance(value, dict):
        return Problem.at(where, "not a JSON object", f"{line!r:.60}", f'write {{"{field}": ...}}')
    return value
