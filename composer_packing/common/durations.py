"""Durations and their units.

A duration is a number and a unit, as Composer writes them: `1000tok` real tokens, `50sp` documents, `10ba` batches, or
`0.1dur`, a share of the training. Tokens and documents are counted over all ranks. In Python a bare int is a number of
tokens.
"""

import math
import numbers
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple, Union

if TYPE_CHECKING:
    from composer import Time

DurationLike = Union[int, str, "Time[int]", "Time[float]"]
"""A duration as users give it: a string, a `composer.Time`, or an int for tokens."""


class Unit(NamedTuple):
    """The names of what a duration counts.

    Attributes:
        word: plural for messages.
        timestamp_name: attribute of `composer.Timestamp`, and key of its `state_dict`.
    """

    word: str
    timestamp_name: str


UNITS = {"tok": Unit("tokens", "token"), "sp": Unit("documents", "sample"), "ba": Unit("batches", "batch")}
"""Units that a packer can count itself: real tokens, documents (Composer's samples) and batches."""


@dataclass(frozen=True)
class Duration:
    """A whole number of tokens, documents or batches.

    Attributes:
        count: at least 0, over all ranks.
        unit: a key of `UNITS`.
    """

    count: int
    unit: str

    def __str__(self) -> str:
        """The duration as Composer writes it."""
        return f"{self.count}{self.unit}"

    def local(self, world_size: int) -> int:
        """Return what each of `world_size` ranks counts in this duration.

        Ranks share tokens and documents; shares are rounded up. A batch counts on every rank.

        Raises:
            ValueError: `world_size` is below 1.
        """
        if world_size < 1:
            raise ValueError(f"{world_size=} must be at least 1")
        return self.count if self.unit == "ba" else -(-self.count // world_size)


def parse_duration(name: str, time: DurationLike, least: int = 0, max_duration: Duration | None = None) -> Duration:
    """Return a duration in tokens, documents or batches.

    Args:
        name: what errors call the duration.
        time: the duration as the user gives it.
        least: smallest count that makes sense.
        max_duration: length of the training. `0.1dur` is a tenth of it, rounded down. Without it `dur` is an error.

    Raises:
        ValueError: `time` is not a duration in these units, is negative, is below `least`, or does not fit int64.
    """
    duration = _parse(time, max_duration)
    if duration is None:
        wanted = "1000tok, 50sp, 10ba" + ("" if max_duration is None else " or 0.1dur")
        raise ValueError(f"{name}={time!r} must be a duration such as {wanted}")
    if duration.count < 0:
        raise ValueError(f"{name}={time!r} must not be negative")
    if duration.count >= 2**63:
        raise ValueError(f"{name}={time!r} is too long; it must be below 2**63 {UNITS[duration.unit].word}")
    if duration.count < least:
        raise ValueError(f"{name}={time!r} comes to {duration}; it must be at least {least}{duration.unit}")
    return duration


def _parse(time: DurationLike, max_duration: Duration | None) -> Duration | None:
    """Return the duration, or None if `time` is not a duration in the units of `UNITS` or `dur`."""
    if isinstance(time, bool):
        return None
    if isinstance(time, numbers.Integral):
        return Duration(int(time), "tok")
    from composer import Time  # imported here because durations that are ints need no Composer

    try:
        parsed = Time.from_timestring(time) if isinstance(time, str) else time
    except (ValueError, TypeError, OverflowError):
        return None
    if not isinstance(parsed, Time):
        return None
    if parsed.unit.value in UNITS:
        return Duration(int(parsed.value), parsed.unit.value)
    if parsed.unit.value == "dur" and max_duration is not None and math.isfinite(parsed.value):
        # Decimal takes the share as the user wrote it: 0.29dur of 100 is 29. In floats it would be 28.
        share = Decimal(repr(float(parsed.value)))
        return Duration(math.floor(share * max_duration.count), max_duration.unit)
    return None
