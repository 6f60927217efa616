"""Errors that a user can fix, and errors as one line of text."""

from typing import Any


def one_line(value: Any, characters: int = 80) -> str:
    """Type and value, or error and what it says, in one line; the latter cut to so many characters."""
    return f"{type(value).__name__}: {' '.join(str(value).split())[:characters]}"


class ConfigError(ValueError):
    """Something the user can mend, in one line."""
