"""Writes the tables of configuration.md from the dataclasses of the schema: `python docs/make_configuration.py`.

The text above the marker is written by hand and stays. Everything below it comes from the fields, their defaults, and
the `Attributes` in the docstrings of their classes.
"""

import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from composer_packing.common.resume import Resume
from composer_packing.config.limits import DurationRange, OneOf
from composer_packing.config.schema import TrainConfig

PAGE = Path(__file__).with_name("configuration.md")

MARKER = "<!-- Below this line: made by `make configuration` from the dataclasses in composer_packing. -->"

ON_RESUME = {
    Resume.BATCHES: "batches",
    Resume.WEIGHTS: "weights",
    Resume.TRAINING: "training",
    Resume.FINGERPRINT: "same data",
    Resume.FREE: "free",
}
"""What must hold for a key when a run resumes, in the words of the page."""

NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def make_page(page: str) -> str:
    """The page with its tables made again."""
    head, marker, _ = page.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE.name}: has no line {MARKER!r}; add it where the tables begin")
    return head + MARKER + "\n\n" + "\n".join(_section(TrainConfig, "")) + "\n"


def _section(schema: type[Any], *prefixes: str) -> Iterator[str]:
    """Lines of a heading, a table of a dataclass's own keys, and the sections of the dataclasses inside it.

    Args:
        schema: the dataclass.
        prefixes: what comes before its keys, with a dot at the end. Several if several keys hold the same dataclass:
            the heading names all of them, the table shows the first.
    """
    hints, meanings = typing.get_type_hints(schema), _meanings(schema)
    extended = typing.get_type_hints(schema, include_extras=True)
    inner = {name: inside for name, hint in hints.items() if (inside := _dataclass_in(hint)) is not None}
    own = [field for field in fields(schema) if field.name not in inner]
    yield f"## {', '.join(f'`{prefix[:-1]}`' for prefix in prefixes if prefix) or 'Keys of the run'}"
    yield ""
    yield _first_paragraph(schema)
    yield ""
    yield "| key | type | default | on resume | meaning |"
    yield "|---|---|---|---|---|"
    for field in own:
        key = prefixes[0] + field.name
        kind = _kind(hints[field.name], _limits(extended[field.name]))
        on_resume = ON_RESUME[field.metadata[Resume]]
        yield f"| `{key}` | {kind} | {_default(field)} | {on_resume} | {meanings[field.name]} |"
    for inside, names in itertools.groupby(inner, key=inner.__getitem__):
        yield ""
        inner_prefixes = (name + ".NAME" * (typing.get_origin(hints[name]) is dict) for name in names)
        yield from _section(inside, *(f"{prefixes[0]}{name}." for name in inner_prefixes))


def _dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass that a field holds, also as `Schema | None` and `dict[str, Schema]`."""
    return next((part for part in (hint, *typing.get_args(hint)) if is_dataclass(part)), None)  # type: ignore[return-value]


def _limits(hint: Any) -> list[Any]:
    """What `Annotated[...]`, or `Annotated[...] | None`, declares of the values."""
    return [limit for part in (hint, *typing.get_args(hint)) for limit in getattr(part, "__metadata__", ())]


def _kind(hint: Any, limits: list[Any]) -> str:
    """The type of a value in words, with its choices."""
    optional = type(None) in typing.get_args(hint)
    if optional:
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    choices = [limit for limit in limits if isinstance(limit, OneOf)]
    if any(isinstance(limit, DurationRange) for limit in limits):
        words = "duration"
    elif choices:
        words = str(choices[0])
    elif typing.get_origin(hint) in (list, tuple):
        words = f"list of {NAMES[typing.get_args(hint)[0]]}"
    else:
        words = NAMES[hint]
    return words + " or null" * optional


def _default(field: Field[Any]) -> str:
    """The default as a YAML file has it."""
    value = field.default
    if value is NO_DEFAULT or value == MISSING:
        return "required"
    written = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
    return f"`{written.splitlines()[0]}`"


def _meanings(schema: type[Any]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute."""
    found: dict[str, str] = {}
    for each in reversed(schema.__mro__[:-1]):
        _, _, attributes = (inspect.getdoc(each) or "").partition("\nAttributes:\n")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE):
            found[name] = " ".join(text.split()).replace("|", "\\|")
    return found


def _first_paragraph(schema: type[Any]) -> str:
    text, _, _ = (inspect.getdoc(schema) or "").partition("\nAttributes:\n")
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text()))
