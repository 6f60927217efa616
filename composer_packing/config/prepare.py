"""Settings of `composer_packing.prepare`. A source of texts in a YAML file has some of them, with the same defaults."""

import os
from dataclasses import dataclass, field
from typing import Annotated

from composer_packing.common.errors import ConfigError
from composer_packing.config.limits import OneOf, Range, check_limits

Share = Annotated[float, Range(above=0, below=1)]
OnError = Annotated[str, OneOf(("stop", "skip"))]
DocumentPer = Annotated[str, OneOf(("file", "blank_line"))]
Long = Annotated[str, OneOf(("keep", "cut", "chunk", "split"))]


@dataclass(frozen=True)
class PrepareConfig:
    """How records of files become documents in shards. The text at each setting is the help of the command.

    Attributes:
        keep_blank: keep texts of spaces only, which are an error otherwise. The built-in corpus has some. The command
            has no such option.

    Raises:
        ConfigError: a value is not allowed, or two values contradict each other.
    """

    examples: Annotated[
        bool, "records are examples for fine-tuning: prompt and response, or messages; shards get a loss mask"
    ] = False
    val_share: Annotated[Share, "share of the documents that is held out, chosen by a hash of each"] = 0.01
    text_field: Annotated[str, "field or column with the text, in JSON lines, Parquet and data sets"] = "text"
    document_per: Annotated[DocumentPer, "a document of a .txt is the file, or the lines between blank lines"] = "file"
    long: Annotated[
        Long,
        "a document longer than max_seq_len is kept whole; cut at that length; chunked into documents with special "
        "tokens of their own; or split into documents without them, as training would do",
    ] = "keep"
    max_seq_len: Annotated[int | None, "tokens that a document has at most, unless it is kept whole"] = None
    on_error: Annotated[OnError, "at a record that cannot be read: stop, or skip and count it"] = "stop"
    processes: Annotated[int, Range(at_least=1), "processes that share the work, one per core"] = field(
        default_factory=lambda: len(os.sched_getaffinity(0))
    )
    keep_blank: bool = False

    def __post_init__(self) -> None:
        check_limits(self)
        if self.long == "keep" and self.max_seq_len is not None:
            raise ConfigError(
                f"max_seq_len={self.max_seq_len}: long=keep leaves documents whole; choose cut, chunk or split"
            )
        if self.long != "keep" and self.max_seq_len is None:
            raise ConfigError(f"long={self.long}: needs max_seq_len; set it")
        if self.examples and self.long not in ("keep", "cut"):
            raise ConfigError(f"long={self.long}: an example is kept whole or cut; its later pieces have no prompt")
