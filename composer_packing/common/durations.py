"""Durations: read once, resolved against the length of the training, shared out among ranks.

A duration is a number and a unit, as Composer writes them: `1000tok` real tokens, `50sp` documents, `10ba`
batches, or `0.1dur`, a share of the training. Tokens and documents are counted over all ranks. In Python an
int is a number of tokens.
"""

import math
import numbers
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from composer import Time

DurationLike = Union[int, str, "Time[int]", "Time[float]"]
"""A duration as users give it: a string, a `composer.Time`, or an int for tokens."""

UNITS = {"tok": "tokens", "sp": "documents", "ba": "batches"}
"""Units that a packer can count itself, in words: real tokens, documents (Composer's samples), and batches."""


@dataclass(frozen=True)
class Duration:
    """A whole number of tokens, documents or batches.

    Attributes:
        count: at least 0; over all ranks.
        unit: one of `UNITS`.
    """

    count: int
    unit: str

    def __str__(self) -> str:
        """As Composer writes it."""
        return f"{self.count}{self.unit}"

    def local(self, world_size: int) -> int:
        """What one of `world_size` ranks counts meanwhile, rounded up; a batch is one on every rank.

        Raises:
            ValueError: `world_size` is below 1.
        """
        if world_size < 1:
            raise ValueError(f"{world_size=} must be at least 1")
        return self.count if self.unit == "ba" else -(-self.count // world_size)


def parse_duration(name: str, time: DurationLike, least: int = 0, max_duration: Duration | None = None) -> Duration:
    """Read a duration.

    Args:
        name: what to call it in errors.
        time: the duration.
        least: smallest count that makes sense.
        max_duration: length of the training, of which `dur` is a share, rounded down; without it `dur` is an error.

    Raises:
        ValueError: anything else than a duration in the units above: empty, negative, not finite, in seconds or epochs.
    """
    duration = _parse(time, max_duration)
    if duration is None:
        wanted = "1000tok, 50sp, 10ba" + ("" if max_duration is None else " or 0.1dur")
        raise ValueError(f"{name}={time!r} must be a duration such as {wanted}")
    if duration.count < 0:
        raise ValueError(f"{name}={time!r} must not be negative")
    if duration.count >= 2**63:
        raise ValueError(f"{name}={time!r} is too long; it must be below 2**63 {UNITS[duration.unit]}")
    if duration.count < least:
        raise ValueError(f"{name}={time!r} comes to {duration}; it must be at least {least}{duration.unit}")
    return duration


def _parse(time: DurationLike, max_duration: Duration | None) -> Duration | None:
    if isinstance(time, bool):
        return None
    if isinstance(time, numbers.Integral):
        return Duration(int(time), "tok")
    from composer import Time  # late: durations given as ints need no Composer

    try:
        parsed = Time.from_timestring(time) if isinstance(time, str) else time
    except (ValueError, TypeError, OverflowError):
        return None
    if not isinstance(parsed, Time):
        return None
    if parsed.unit.value in UNITS:
        return Duration(int(parsed.value), parsed.unit.value)
    if parsed.unit.value == "dur" and max_duration is not None and math.isfinite(parsed.value):
        share = Decimal(repr(float(parsed.value)))  # as it was written: 0.29 of 100 is 29, and two halves fit a whole
        return Duration(math.floor(share * max_duration.count), max_duration.unit)
    return None
