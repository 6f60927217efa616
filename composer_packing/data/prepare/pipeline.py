"""Texts of any size made into MDS shards: read by one process, tokenized by all, written by the first in order.

A folder that `write_shards` has filled::

    train/index.json, shard.00000.mds, ...    a column input_ids (ndarray:uint16 or uint32), or text (str)
    val/index.json, ...                       the documents that are held out
    stats.json                                counts and fingerprints

The bytes are the same however many processes share the work.
"""

import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from composer_packing.common.errors import ConfigError
from composer_packing.config.sources import DOCUMENT_PER, ON_ERROR
from composer_packing.data.prepare.ordered_pool import map_in_order
from composer_packing.data.prepare.records import size_of
from composer_packing.data.prepare.shard_writer import ShardWriter
from composer_packing.data.prepare.stats import STATS
from composer_packing.data.prepare.tokenize_records import ChunkDocuments, Tokenizing, chunks
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.token_arrays import token_dtype

log = logging.getLogger(__name__)

FORMAT = 1
"""Of `stats.json` and of what lies beside it."""

LONG = ("keep", "cut", "chunk")
"""What becomes of documents that are longer than `max_seq_len`."""


@dataclass(frozen=True)
class Preparing:
    """How texts are made into shards.

    Attributes:
        val_share: share of documents that is held out, by a hash of their text.
        text_field: field or column with the text, in `.jsonl`, Parquet and datasets.
        document_per: what a document of `.txt` is: a file, or what lies between blank lines (blank_line).
        on_error: stop at a record that cannot be read, or skip it and count it.
        long: keep long documents whole, cut them, or chunk them into pieces with special tokens each.
        max_seq_len: tokens that a document or piece may have, for cut and chunk.
        processes: how many do the work.

    Raises:
        ConfigError: a value will not do, or some do not go together.
    """

    val_share: float = 0.01
    text_field: str = "text"
    document_per: str = "file"
    on_error: str = "stop"
    long: str = "keep"
    max_seq_len: int | None = None
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def __post_init__(self) -> None:
        for name, choices in (("document_per", DOCUMENT_PER), ("on_error", ON_ERROR), ("long", LONG)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}={getattr(self, name)}: must be one of {', '.join(choices)}")
        if not 0 < self.val_share < 1:
            raise ConfigError(f"val_share={self.val_share}: must lie between 0 and 1")
        if self.processes < 1:
            raise ConfigError(f"processes={self.processes}: must be at least 1")
        if self.long == "keep" and self.max_seq_len is not None:
            raise ConfigError(f"max_seq_len={self.max_seq_len}: long=keep leaves all as long as they are; cut or chunk")
        if self.long != "keep" and self.max_seq_len is None:
            raise ConfigError(f"long={self.long}: needs max_seq_len; set it")


def write_shards(
    folder: Path, train: Sequence[Path], val: Sequence[Path], settings: Preparing, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """Fill an existing empty folder with `train/`, `val/` and `stats.json`, as the top of this file shows.

    Args:
        folder: to be filled; where this fails, something may lie there.
        train: files, and folders of `save_to_disk`, as `find_files` gives them.
        val: those with the documents to evaluate on; where there are none, they are held out of `train` by hash.
        settings: how.
        tokenizer: None for a column of texts.

    Returns:
        What `stats.json` holds.

    Raises:
        ConfigError: settings do not go with the tokenizer, a record cannot be read, or a split has no document.
        OSError: the folder cannot be written.
    """
    _check(settings, tokenizer)
    dtype = None if tokenizer is None else token_dtype(tokenizer.vocab_size)
    writers = {split: ShardWriter(folder / split, dtype) for split in ("train", "val")}
    long, skipped, mended = (
        Counter(dict.fromkeys(("documents", "tokens_cut_off", "chunks"), 0)),
        Counter[str](),
        Counter[str](),
    )
    parts = split_parts(train, val, settings)
    with closing(documents_of(parts, settings, tokenizer)) as made:
        for documents in made:
            in_val = np.repeat(documents.held_out, documents.lengths)
            writers["train"].write(documents.data[~in_val], documents.lengths[~documents.held_out])
            writers["val"].write(documents.data[in_val], documents.lengths[documents.held_out])
            long.update(documents.long)
            skipped.update(problem.reason for problem in documents.problems)
            mended.update(documents.mended)
    shaped_by = asdict(settings) | {"val_share": None if val else settings.val_share}
    del shaped_by["processes"]
    stats: dict[str, Any] = {
        "format": FORMAT,
        **{split: writer.finish() for split, writer in writers.items()},
        "tokenizer": tokenizer and {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "settings": shaped_by,
        "long": dict(long),
        "skipped": dict(skipped),
        "mended": dict(mended),
    }
    _check_splits(stats, bool(val))
    (folder / STATS).write_text(json.dumps(stats, indent=2) + "\n")
    return stats


def split_parts(train: Sequence[Path], val: Sequence[Path], settings: Preparing) -> list[tuple[Sequence[Path], float]]:
    """Files, and the share of their documents that is held out: all of `val`, or of `train` the share that is set."""
    return [(train, 0.0), (val, 1.0)] if val else [(train, settings.val_share)]


def documents_of(
    parts: Sequence[tuple[Sequence[Path], float]], settings: Preparing, tokenizer: TextTokenizer | None
) -> Generator[ChunkDocuments, None, None]:
    """Documents in order, many at a time, with a progress bar. Close it, and the processes end.

    Of records that are skipped, the first for each reason is in the log.

    Args:
        parts: files, and the share of their documents that is held out.
        settings: how.
        tokenizer: None for documents of UTF-8.

    Raises:
        ConfigError: a record cannot be read, or a process was killed.
    """
    total = sum(size_of(path) for files, _ in parts for path in files)
    seen, done, start = set[str](), 0, time.monotonic()
    read = itertools.chain.from_iterable(
        chunks(files, share, settings.text_field, settings.document_per) for files, share in parts
    )
    work = Tokenizing(settings.text_field, tokenizer, settings.long, settings.max_seq_len)
    made = map_in_order(work, read, settings.processes, __name__)
    what = "reading" if tokenizer is None else "tokenizing"
    with closing(made), tqdm(total=total, desc=what, unit="B", unit_scale=True, mininterval=1.0) as bar:
        for documents in made:
            for reason, message in documents.problems:
                if settings.on_error == "stop":
                    raise ConfigError(f"{message}, or let on_error=skip pass it over")
                if reason not in seen:
                    seen.add(reason)
                    log.warning("skipped, as the first of its kind: %s", message)
            yield documents
            done += len(documents.data)
            if tokenizer is not None:
                bar.set_postfix_str(f"{done / (time.monotonic() - start):,.0f} tokens/s", refresh=False)
            bar.update(documents.size)


def _check(settings: Preparing, tokenizer: TextTokenizer | None) -> None:
    if settings.max_seq_len is None:
        return
    if tokenizer is None:
        raise ConfigError(f"long={settings.long}: texts that are not tokenized are kept whole; leave it out")
    special = tokenizer.num_special_tokens
    if settings.max_seq_len <= special:
        raise ConfigError(
            f"max_seq_len={settings.max_seq_len}: leaves no room beside {special} special tokens; raise it"
        )


def _check_splits(stats: dict[str, Any], val_is_given: bool) -> None:
    skipped = f", and {sum(stats['skipped'].values())} were skipped" if stats["skipped"] else ""
    if not stats["train"]["documents"]:
        raise ConfigError(f"train: there is no document{skipped}; give more files, or lower val_share")
    if not stats["val"]["documents"]:
        cure = "give other files" if val_is_given else "raise val_share, or give files for it"
        raise ConfigError(f"val: there is no document{skipped}; {cure}")
