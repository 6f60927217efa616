"""What `composer_packing.prepare` leaves beside its shards: counts, and the tokenizer they were made with."""

import json
from pathlib import Path
from typing import Any

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.data.tokenizer import TextTokenizer, load_tokenizer

STATS = "stats.json"
"""Name of the file with the counts."""

TOKENIZER = "tokenizer"
"""Name of the folder with the tokenizer."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
"""What is in it."""


def stats_in(file: Path | None) -> dict[str, Any] | None:
    """What the file with the counts says; None where there is none, as beside shards of others.

    Raises:
        ConfigError: it cannot be read.
    """
    if file is None or not file.exists():
        return None
    try:
        stats: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return stats | {"tokenizer": dict(stats["tokenizer"] or {})}  # there is none where texts are not tokenized
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); prepare the data again") from error


def counted_tokens(folder: Path, stats: dict[str, Any] | None, split: str, num_documents: int) -> int | None:
    """Tokens of a split, if they were counted.

    Args:
        folder: where the splits are.
        stats: what `stats_in` gave.
        split: name of the split.
        num_documents: how many its index lists.

    Raises:
        ConfigError: the counts are of other shards.
    """
    if stats is None or split not in stats:
        return None
    try:
        documents, tokens = int(stats[split]["documents"]), int(stats[split].get("tokens", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder / STATS}: has no counts of {split} ({one_line(error)}); prepare the data again"
        ) from error
    if documents != num_documents:
        raise ConfigError(
            f"{folder / split}: lists {num_documents:,} documents, and {STATS} beside it says {documents:,}; prepare "
            f"it again, or delete {STATS} if you changed the shards yourself"
        )
    return tokens or None


def tokenizer_for(key: str, given: str | None, beside: Path) -> TextTokenizer:
    """The tokenizer of shards: the one that is given, or else the one that lies beside them.

    Args:
        key: what errors begin with, as `data.mds`.
        given: name or folder.
        beside: folder that may hold one.

    Raises:
        ConfigError: there is none.
    """
    if given is None and not (beside / TOKENIZER_FILES[0]).is_file():
        raise ConfigError(
            f"{key}.tokenizer: there is none beside the data, in {beside}, so that it must be given; masks and random "
            f"words are drawn by it"
        )
    return load_tokenizer(str(beside) if given is None else given)


def check_made_with(key: str, folder: Path, stats: dict[str, Any] | None, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError where shards were made with another tokenizer.

    Args:
        key: what errors begin with.
        folder: where the shards are.
        stats: what `stats_in` gave.
        tokenizer: the one in use.
    """
    made_with = None if stats is None else stats["tokenizer"].get("fingerprint")
    if made_with not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"{key}.tokenizer: {folder} was made with another tokenizer, of fingerprint {made_with}, not "
            f"{tokenizer.fingerprint}; give that one, or prepare the data again"
        )
