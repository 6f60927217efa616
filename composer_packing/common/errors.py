"""The error that a user can fix, and any value as one line of text."""


class ConfigError(ValueError):
    """A mistake that the user can fix. Its message is one line."""


def join_lines(text: object) -> str:
    """Return the text of a value on one line: each run of line ends and spaces becomes one space."""
    return " ".join(str(text).split())


def one_line(value: object, characters: int | None = 80) -> str:
    """Return `Type: text` of a value or an error on one line.

    Args:
        value: what to show.
        characters: longest text that is shown, without the type; the rest is cut off. None shows all.
    """
    # textwrap.shorten would cut between words, and show nothing of a long list or path without spaces.
    return f"{type(value).__name__}: {join_lines(value)[:characters]}"
