"""What `composer_packing.prepare` writes next to its shards: counts, and the tokenizer that made them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.data.tokenizer import TextTokenizer, load_tokenizer

STATS = "stats.json"
"""Name of the file with the counts."""

TOKENIZER = "tokenizer"
"""Name of the folder with the tokenizer."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""Files in that folder."""


def stats_in(file: Path | None) -> dict[str, Any] | None:
    """The contents of the file with the counts; None if there is no such file, as next to shards of other tools.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is None or not file.exists():
        return None
    try:
        stats: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stats | {"tokenizer": dict(stats["tokenizer"] or {})}  # None for texts that are not tokenized
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); prepare the data again") from error


@dataclass(frozen=True)
class SplitCounts:
    """What is known of a split's documents.

    Attributes:
        documents: in an epoch.
        tokens: their tokens.
        is_estimate: nobody has counted the tokens.
        given: documents or examples before any was cut, divided or dropped; None if unknown.
        long: how many of them are longer than `max_seq_len`.
        dropped: examples in which nothing is to be learned.
        became: what happened to the long ones, as `PrepareConfig.long` says.
        max_seq_len: tokens that documents have at most; None for no limit.
    """

    documents: int
    tokens: int
    is_estimate: bool = False
    given: int | None = None
    long: int = 0
    dropped: int = 0
    became: str = "keep"
    max_seq_len: int | None = None

    def summary(self, max_seq_len: int, are_examples: bool = False) -> str:
        """The counts in words, for a run over documents or examples of at most `max_seq_len` tokens."""
        tokens = f"{'about ' if self.is_estimate else ''}{self.tokens:,} tokens"
        kind, became = ("examples", "cut") if are_examples else ("documents", "come in pieces")
        if self.given is None or self.max_seq_len is None or self.max_seq_len > max_seq_len:
            return f"{self.documents:,} {kind}, {tokens}; those longer than {max_seq_len} {became}"
        long = f"{self.long:,} longer than {self.max_seq_len} {BECAME[self.became]}"
        if not are_examples:
            return f"{self.given:,} documents, {tokens}; {long}"
        dropped = f"{self.dropped:,} dropped as nothing of their response was left"
        return f"{self.documents:,} of {self.given:,} examples, {tokens}; {long}, {dropped}"


BECAME = {"cut": "cut", "chunk": "come in chunks", "split": "come in pieces"}
"""What happened to long documents, in words."""


def counts_of(folder: Path, stats: dict[str, Any] | None, split: str, num_documents: int) -> SplitCounts | None:
    """What was counted of a split; None if its tokens were not counted.

    Args:
        folder: holds the splits.
        stats: what `stats_in` returned.
        split: name of the split.
        num_documents: how many its index lists.

    Raises:
        ConfigError: the counts belong to other shards.
    """
    if stats is None or split not in stats:
        return None
    try:
        counts, settings = stats[split], stats.get("settings", {})
        more = {name: counts[name] for name in ("given", "long", "dropped") if name in counts}
        limits = {"became": settings["long"], "max_seq_len": settings["max_seq_len"]} if more else {}
        found = SplitCounts(int(counts["documents"]), int(counts.get("tokens", 0)), **more, **limits)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder / STATS}: has no counts of {split} ({one_line(error)}); prepare the data again"
        ) from error
    if found.documents != num_documents:
        raise ConfigError(
            f"{folder / split}: lists {num_documents:,} documents, but {STATS} next to it says {found.documents:,}; "
            f"prepare the data again, or delete {STATS} if you changed the shards yourself"
        )
    return found if found.tokens else None


def tokenizer_for(key: str, given: str | None, beside: Path) -> TextTokenizer:
    """The tokenizer of shards: the one that is given, or else the one next to the shards.

    Args:
        key: start of error messages, such as `data.mds`.
        given: name or folder.
        beside: folder next to the shards that may hold a tokenizer.

    Raises:
        ConfigError: there is no tokenizer.
    """
    if given is None and not (beside / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(
            f"{key}.tokenizer: must be given, as there is none next to the data, in {beside}; it says which ids may be "
            f"masked or drawn"
        )
    return load_tokenizer(str(beside) if given is None else given)


def check_made_with(key: str, folder: Path, stats: dict[str, Any] | None, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError if shards were made with another tokenizer.

    Args:
        key: start of error messages.
        folder: holds the shards.
        stats: what `stats_in` returned.
        tokenizer: the one in use.
    """
    made_with = None if stats is None else stats["tokenizer"].get("fingerprint")
    if made_with not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"{key}.tokenizer: {folder} was made with another tokenizer, of fingerprint {made_with}, not "
            f"{tokenizer.fingerprint}; give that one, or prepare the data again"
        )
