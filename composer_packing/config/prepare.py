"""Settings of `composer_packing.prepare`. A source of texts in a YAML file has some of them, with the same defaults."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from composer_packing.common.errors import ConfigError

ON_ERROR = ("stop", "skip")
"""What happens at a record that cannot be read."""

DOCUMENT_PER = ("file", "blank_line")
"""What a document of plain text is."""

LONG = ("keep", "cut", "chunk", "split")
"""What happens to a document that is longer than `max_seq_len`."""


def _setting(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class PrepareConfig:
    """How records of files become documents in shards. The text next to each setting is the help of the command.

    Raises:
        ConfigError: a value is not allowed, or two values contradict each other.
    """

    examples: bool = _setting(
        False, "records are examples for fine-tuning: prompt and response, or messages; shards get a loss mask"
    )
    val_share: float = _setting(0.01, "share of the documents that is held out, chosen by a hash of each")
    text_field: str = _setting("text", "field or column with the text, in JSON lines, Parquet and data sets")
    document_per: str = _setting(
        "file", "a document of a .txt is the file, or the lines between blank ones", DOCUMENT_PER
    )
    long: str = _setting(
        "keep",
        "a document longer than max_seq_len is kept whole; cut at that length; chunked into documents with special "
        "tokens of their own; or split into documents without them, as training would do",
        LONG,
    )
    max_seq_len: int | None = _setting(None, "tokens that a document has at most, unless it is kept whole")
    on_error: str = _setting("stop", "at a record that cannot be read: stop, or skip and count it", ON_ERROR)
    processes: int = field(
        default_factory=lambda: len(os.sched_getaffinity(0)),
        metadata={"help": "processes that share the work, one per core", "choices": None},
    )

    keep_blank: bool = field(default=False, metadata={"choices": None})
    """Keep texts of spaces only, which are an error otherwise. The built-in corpus has some. The command has no such
    option."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            choices, value = setting.metadata["choices"], getattr(self, setting.name)
            if choices is not None and value not in choices:
                raise ConfigError(f"{setting.name}={value}: must be one of {', '.join(choices)}")
        if not 0 < self.val_share < 1:
            raise ConfigError(f"val_share={self.val_share}: must lie above 0 and below 1")
        if self.processes < 1:
            raise ConfigError(f"processes={self.processes}: must be at least 1")
        if self.long == "keep" and self.max_seq_len is not None:
            choices = ", ".join(LONG[1:])
            raise ConfigError(
                f"max_seq_len={self.max_seq_len}: long=keep leaves documents whole; choose one of {choices}"
            )
        if self.long != "keep" and self.max_seq_len is None:
            raise ConfigError(f"long={self.long}: needs max_seq_len; set it")
        if self.examples and self.long not in ("keep", "cut"):
            raise ConfigError(f"long={self.long}: an example is kept whole or cut; its later pieces have no prompt")
