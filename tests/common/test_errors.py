from typing import Any

import pytest

from composer_packing.common.errors import join_lines, one_line


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (OSError("no\n  such\tfile\r\n"), "no such file"),
        ("  two\N{LINE SEPARATOR}lines ", "two lines"),
        ([1, 2], "[1, 2]"),
        ("", ""),
    ],
)
def test_white_space_of_any_kind_becomes_one_space(value: Any, line: str) -> None:
    assert join_lines(value) == line


def test_a_value_is_shown_on_one_line_with_its_type() -> None:
    assert one_line(KeyError("a\nb")) == r"KeyError: 'a\nb'"
    assert one_line(OSError("disk\nfull")) == "OSError: disk full"
    assert one_line([[1, 2], 3]) == "list: [[1, 2], 3]"
    assert one_line(None) == "NoneType: None"


def test_a_long_text_is_cut_after_80_characters_or_as_many_as_asked_for() -> None:
    text = "0123456789" * 20
    assert one_line(text) == f"str: {text[:80]}"
    assert one_line(text, 15) == "str: 012345678901234"
    assert one_line(text, None) == f"str: {text}"
