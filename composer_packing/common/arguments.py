"""Checks of arguments. Each error is one line that names the argument and shows its value."""

import enum
import operator
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=enum.Enum)


def parse_choice(kind: type[Choice], name: str, value: Any) -> Choice:
    """Return the member of an enum that `value` names.

    Args:
        kind: the enum.
        name: what errors call the argument.
        value: a member, or the value of a member.

    Raises:
        ValueError: no member has this value.
    """
    for member in kind:
        if value in (member, member.value):
            return member
    raise ValueError(f"{name}={value!r} must be one of {', '.join(str(member.value) for member in kind)}")


def check_ints(**numbers: int) -> None:
    """Raise TypeError if a number is not an int, ValueError if a number does not fit int64."""
    for name, number in numbers.items():
        try:
            fits = -(2**63) <= operator.index(number) < 2**63
        except TypeError as error:
            raise TypeError(f"{name}={number!r} must be an int") from error
        if not fits:
            raise ValueError(f"{name}={number} must fit int64")


def check_positive(**numbers: int) -> None:
    """Raise TypeError if a number is not an int, ValueError if a number is below 1 or does not fit int64."""
    check_ints(**numbers)
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")


def check_ratio(name: str, value: float) -> None:
    """Raise ValueError unless `value` lies between 0 and 1. Errors call the argument `name`."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie between 0 and 1")
