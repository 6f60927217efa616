"""Choices: how rows are filled, and what becomes of documents that are too long or too few for another batch."""

import enum
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=enum.Enum)


def chosen(kind: type[Choice], name: str, value: Any) -> Choice:
    """The member of an enum, given as itself or as its value; ValueError that calls it `name` where there is none."""
    for member in kind:
        if value in (member, member.value):
            return member
    raise ValueError(f"{name}={value!r} must be one of {', '.join(str(member.value) for member in kind)}")


class PackingStrategy(str, enum.Enum):
    """How documents find their row: which packer a run from a YAML file has."""

    BEST_FIT = "best_fit"
    """Greedy best fit, document by document: `GreedyBestFitSequencePacker`. As published."""
    SUBSET_SUM = "subset_sum"
    """Rows are filled to the last slot from many waiting documents at once: `SubsetSumSequencePacker`."""


class OverLong(str, enum.Enum):
    """What becomes of a document that is longer than a row. All but the first are counted, and logged once an epoch."""

    ERROR = "error"
    """The packer stops with an error that shows both lengths."""
    TRUNCATE = "truncate"
    """Its first tokens fill a row; the rest is not trained on."""
    SPLIT = "split"
    """It comes in pieces, each a document of its own, all but the last as long as a row. No token is lost."""
    DROP = "drop"
    """It is not trained on at all."""


class Tail(str, enum.Enum):
    """What becomes of the documents that are left when an epoch's source ends and they cannot give every row one."""

    DROP = "drop"
    """They are not trained on in this epoch; their number is logged as a warning. As published."""
    CARRY = "carry"
    """They come first in the next epoch."""
    EMIT = "emit"
    """They come in batches of fewer rows, so that every document comes once."""
