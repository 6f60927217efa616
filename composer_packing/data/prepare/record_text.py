"""The text of a record, and which texts are held out for evaluation."""

import codecs
import hashlib
import json
import logging
from collections import Counter

from composer_packing.data.prepare.records import Problem, Raw, not_a_string, problem

log = logging.getLogger(__name__)


def held_out(text: str, share: float) -> bool:
    """Whether a text is held out for evaluation: `share` of all texts are, the same ones wherever they turn up."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") < share * 2**64


def looks_like_utf_16(data: bytes) -> bool:
    """Whether bytes of a file whose encoding nobody states hold so many zeros that they must be UTF-16."""
    return data.count(0) > len(data) // 4


def text_of(raw: Raw, text_field: str, mended: Counter[str]) -> str | Problem | None:
    """The text of a record; None where it is a blank line of `.jsonl`. What is mended is counted in `mended`."""
    data = raw.data
    if raw.line == 1 and raw.form != "row" and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        mended["byte-order mark"] += 1
    where = f"{raw.path}:{raw.line}"
    if raw.form != "row" and looks_like_utf_16(data):
        cure = "convert it by iconv -f UTF-16 -t UTF-8"
        return problem(where, "wrong encoding", f"many zeros in {data[:20]!r}, as in UTF-16", cure)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = raw.line + data.count(b"\n", 0, error.start)
        value = f"not UTF-8 at {data[error.start : error.start + 10]!r}"
        return problem(f"{raw.path}:{line}", "wrong encoding", value, "convert it by iconv -t UTF-8")
    if raw.form == "jsonl":
        if not text.strip():
            mended["blank line"] += 1
            return None
        parsed = _parsed(where, text, text_field)
        if isinstance(parsed, Problem):
            return parsed
        text = parsed
    elif raw.form != "row":
        # The last line of several has lost its \n already.
        unix = (text.removesuffix("\r") if raw.form == "blank_line" else text).replace("\r\n", "\n")
        if unix != text:
            mended["CRLF line ends"] += 1
            text = unix
    if not text.strip():
        return problem(where, "empty text", f"{text!r:.60}", "leave it out")
    return text


def _parsed(where: str, line: str, text_field: str) -> str | Problem:
    """The text in a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return problem(where, "not JSON", f"{error!s:.60}: {line!r:.60}", "write one JSON object per line")
    if not isinstance(value, dict):
        return problem(where, "not a JSON object", f"{line!r:.60}", f'write {{"{text_field}": "..."}}')
    if text_field not in value:
        there = f"there is no {text_field!r} among {', '.join(map(repr, value)):.80}"
        return problem(where, "missing field", there, "set text_field")
    text = value[text_field]
    if not isinstance(text, str):
        return not_a_string(where, text_field, text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(error.start - 20, 0) : error.end + 20]
        return problem(where, "lone surrogate", f"half a character in {around!r}", "replace it")
    return text
