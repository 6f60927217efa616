"""Which values a key may have, declared where the key is: `seed: Annotated[int, Range(at_least=0)] = 17`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from composer_packing.common.errors import ConfigError

LARGEST = 2**32
"""Bound of seeds in NumPy. No other number of a configuration needs to be as large."""


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds. `nan` is in no range.

    Attributes:
        at_least: smallest number.
        above: number below the smallest one.
        at_most: largest number.
        below: number above the largest one.
    """

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    def allows(self, value: float) -> bool:
        """Whether a number lies between the bounds."""
        return self.at_least <= value <= self.at_most and self.above < value < self.below

    def __str__(self) -> str:
        """What a number must be, such as `at least 0 and below 1`."""
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        given = [f"{words} {bound}" for words, bound in bounds.items() if math.isfinite(bound)]
        return " and ".join(given).replace(str(LARGEST), "2**32")


@dataclass(frozen=True)
class OneOf:
    """One of several words.

    Attributes:
        choices: the words; members of an enum of strings count as theirs.
    """

    choices: tuple[str, ...]

    def allows(self, value: str) -> bool:
        """Whether a value is one of the words."""
        return value in self.choices

    def __str__(self) -> str:
        """The words, such as `mlm, causal or sft`."""
        return " or ".join([", ".join(self.choices[:-1]), self.choices[-1]])


@dataclass(frozen=True)
class DurationRange:
    """Durations such as `1000tok` or `0.1dur`; `resolve_durations` reads them.

    Attributes:
        at_least: smallest count, in the unit of the duration.
    """

    at_least: int


class LimitedKey(NamedTuple):
    """A key that declares which values it may have.

    Attributes:
        path: names of the key and of what it is in, with dots.
        holder: dataclass that holds the value.
        name: name of the key in its holder.
        limit: which values the key may have.
        is_optional: the value may be None.
    """

    path: str
    holder: Any
    name: str
    limit: Range | OneOf | DurationRange
    is_optional: bool

    @property
    def value(self) -> Any:
        """The value that the configuration gives."""
        return getattr(self.holder, self.name)


def limited_keys(config: Any, prefix: str = "") -> Iterator[LimitedKey]:
    """All keys of a configuration that declare a limit, with those of nested dataclasses and of dicts of them."""
    for name, hint in get_type_hints(type(config), include_extras=True).items():
        path, value = prefix + name, getattr(config, name)
        for part in (hint, *get_args(hint)):  # `Annotated[...]` and `Annotated[...] | None`
            for limit in getattr(part, "__metadata__", ()):
                if isinstance(limit, Range | OneOf | DurationRange):
                    yield LimitedKey(path, config, name, limit, NoneType in get_args(hint))
        for within, nested in value.items() if isinstance(value, dict) else [("", value)]:
            if is_dataclass(nested):
                yield from limited_keys(nested, f"{path}.{within}." if within else f"{path}.")


def check_limits(config: Any) -> None:
    """Raise ConfigError for the first key whose value is a number out of its range, or is not one of its choices."""
    for key in limited_keys(config):
        if key.value is None or isinstance(key.limit, DurationRange):
            continue
        is_tuple = isinstance(key.value, tuple)
        if not all(map(key.limit.allows, key.value if is_tuple else [key.value])):
            shown, each = (list(key.value), "each ") if is_tuple else (key.value, "")
            or_null = ", or null" if key.is_optional else ""
            raise ConfigError(f"{key.path}={shown}: {each}must be {key.limit}{or_null}")
