"""What `composer_packing.prepare` leaves beside its shards: counts, and the tokenizer they were made with."""

import json
from pathlib import Path
from typing import Any

from composer_packing.config import ConfigError
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


def tokenizer_for(key: str, given: str | None, beside: Path, stats: dict[str, Any] | None) -> TextTokenizer:
    """The tokenizer of shards: the one that is given, or else the one that lies beside them.

    Args:
        key: what errors begin with, as `data.mds`.
        given: name or folder.
        beside: folder that may hold one.
        stats: what `stats_in` gave.

    Raises:
        ConfigError: there is none, or it is not the one that the data was made with.
    """
    if given is None and not beside.is_dir():
        raise ConfigError(
            f"{key}.tokenizer: there is no {beside}, so it must be given; masks and random words are drawn by it"
        )
    name = str(beside) if given is None else given
    tokenizer = load_tokenizer(name)
    made_with = None if stats is None else stats["tokenizer"].get("fingerprint")
    if made_with not in (None, tokenizer.fingerprint):
        raise ConfigError(
            f"{key}.tokenizer={name}: is not the one that the data was made with (fingerprint {tokenizer.fingerprint}, "
            f"not {made_with}); leave the key out to use the one beside the data, or prepare the data again"
        )
    return tokenizer
