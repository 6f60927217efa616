"""Checks of arguments: each raises an error of one line that names the argument and shows its value."""

import enum
import operator
from typing import Any, TypeVar

Choice = TypeVar("Choice", bound=enum.Enum)


def parse_choice(kind: type[Choice], name: str, value: Any) -> Choice:
    """The member of an enum, given as itself or as its value; ValueError that calls it `name` where there is none."""
    for member in kind:
        if value in (member, member.value):
            return member
    raise ValueError(f"{name}={value!r} must be one of {', '.join(str(member.value) for member in kind)}")


def check_ints(**numbers: int) -> None:
    """Raise TypeError where a number is no int, and ValueError where it does not fit int64."""
    for name, number in numbers.items():
        try:
            fits = -(2**63) <= operator.index(number) < 2**63
        except TypeError as error:
            raise TypeError(f"{name}={number!r} must be an int") from error
        if not fits:
            raise ValueError(f"{name}={number} must fit int64")


def check_positive(**numbers: int) -> None:
    """Raise TypeError where a number is no int, and ValueError where it is below 1."""
    check_ints(**numbers)
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")


def check_ratio(name: str, value: float) -> None:
    """Raise ValueError unless `value`, called `name`, lies between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie between 0 and 1")
