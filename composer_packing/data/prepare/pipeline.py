"""From texts or examples of any size to MDS shards: one process reads, all tokenize, the first writes in order.

A folder that `write_shards` has filled::

    train/index.json, shard.00000.mds, ...    columns as below
    val/index.json, ...                       the documents that are held out
    stats.json                                counts and fingerprints

    documents             columns
    tokens of texts       input_ids (ndarray:uint16 or uint32)
    tokens of examples    input_ids, and loss_mask (ndarray:uint8)
    texts                 text (str)

The bytes do not depend on how many processes share the work.
"""

import itertools
import json
import logging
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from composer_packing.common.errors import ConfigError
from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.prepare.ordered_pool import map_in_order
from composer_packing.data.prepare.records import size_of
from composer_packing.data.prepare.shard_writer import ShardWriter
from composer_packing.data.prepare.stats import STATS
from composer_packing.data.prepare.tokenize_records import COUNTS, GroupDocuments, RecordTokenizer, record_groups
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.token_arrays import token_dtype

log = logging.getLogger(__name__)

SPLITS = ("train", "val")

FORMAT = 2
"""Format of `stats.json` and of the files next to it."""


def write_shards(
    folder: Path, train: Sequence[Path], val: Sequence[Path], settings: PrepareConfig, tokenizer: TextTokenizer | None
) -> dict[str, Any]:
    """Fill an existing empty folder with `train/`, `val/` and `stats.json`, as the top of this file shows.

    Args:
        folder: is filled; if this fails, the folder may hold anything.
        train: files, and folders of `save_to_disk`, as `find_files` gives them.
        val: files with the documents to evaluate on; if there are none, documents of `train` are held out by a hash.
        settings: how documents are made.
        tokenizer: None for a column of texts.

    Returns:
        What `stats.json` holds.

    Raises:
        ConfigError: the settings do not fit the tokenizer, a record cannot be read, or a split has no document.
        OSError: the folder cannot be written.
    """
    _check(settings, tokenizer)
    dtype = None if tokenizer is None else token_dtype(tokenizer.vocab_size)
    writers = {split: ShardWriter(folder / split, dtype, settings.examples) for split in SPLITS}
    counts = {split: Counter(dict.fromkeys(COUNTS, 0)) for split in SPLITS}
    skipped, repaired = Counter[str](), Counter[str]()
    parts = split_parts(train, val, settings)
    with closing(documents_of(parts, settings, tokenizer)) as made:
        for documents in made:
            for split, is_val in zip(SPLITS, (False, True), strict=True):
                chosen = documents.held_out == is_val
                items, mask = np.repeat(chosen, documents.lengths), documents.loss_mask
                own_mask = None if mask is None else mask[items]
                writers[split].write(documents.data[items], documents.lengths[chosen], own_mask)
                counts[split].update(documents.counts[split])
            skipped.update(problem.reason for problem in documents.problems)
            repaired.update(documents.repaired)
    shaped_by = asdict(settings) | {"val_share": None if val else settings.val_share}
    del shaped_by["processes"]
    stats: dict[str, Any] = {
        "format": FORMAT,
        **{split: writers[split].finish() | counts[split] for split in SPLITS},
        "tokenizer": tokenizer and {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "settings": shaped_by,
        "skipped": dict(skipped),
        "repaired": dict(repaired),
    }
    _check_splits(stats, bool(val))
    (folder / STATS).write_text(json.dumps(stats, indent=2) + "\n")
    return stats


def split_parts(
    train: Sequence[Path], val: Sequence[Path], settings: PrepareConfig
) -> list[tuple[Sequence[Path], float]]:
    """Files, and which share of their documents is held out: all of `val`, or of `train` the share that is set."""
    return [(train, 0.0), (val, 1.0)] if val else [(train, settings.val_share)]


def documents_of(
    parts: Sequence[tuple[Sequence[Path], float]], settings: PrepareConfig, tokenizer: TextTokenizer | None
) -> Generator[GroupDocuments, None, None]:
    """Documents in order, many at a time, with a progress bar. Closing the generator ends the processes.

    The log shows the first record that is skipped for each reason.

    Args:
        parts: files, and the share of their documents that is held out.
        settings: how documents are made.
        tokenizer: None for documents of UTF-8.

    Raises:
        ConfigError: a record cannot be read, or a process was killed.
    """
    total = sum(size_of(path) for files, _ in parts for path in files)
    seen, done, start = set[str](), 0, time.monotonic()
    groups = itertools.chain.from_iterable(record_groups(files, share, settings) for files, share in parts)
    made = map_in_order(RecordTokenizer(settings, tokenizer), groups, settings.processes, __name__)
    what = "reading" if tokenizer is None else "tokenizing"
    with closing(made), tqdm(total=total, desc=what, unit="B", unit_scale=True, mininterval=1.0) as bar:
        for documents in made:
            for reason, message in documents.problems:
                if settings.on_error == "stop":
                    raise ConfigError(f"{message}, or skip such records by on_error=skip")
                if reason not in seen:
                    seen.add(reason)
                    log.warning("skipped, as the first of its kind: %s", message)
            yield documents
            done += len(documents.data)
            if tokenizer is not None:
                bar.set_postfix_str(f"{done / (time.monotonic() - start):,.0f} tokens/s", refresh=False)
            bar.update(documents.size)


def _check(settings: PrepareConfig, tokenizer: TextTokenizer | None) -> None:
    if tokenizer is None and settings.examples:
        raise ConfigError("examples=true: needs a tokenizer; a loss mask is made of tokens")
    if settings.max_seq_len is None:
        return
    if tokenizer is None:
        raise ConfigError(f"long={settings.long}: texts that are not tokenized stay whole; leave it out")
    special = tokenizer.num_special_tokens
    if settings.max_seq_len <= special:
        raise ConfigError(
            f"max_seq_len={settings.max_seq_len}: leaves no room for text next to {special} special tokens; raise it"
        )


def _check_splits(stats: dict[str, Any], val_is_given: bool) -> None:
    skipped = f", and {sum(stats['skipped'].values())} were skipped" if stats["skipped"] else ""
    cures = {
        "train": "give more files, or lower val_share",
        "val": "give other files" if val_is_given else "raise val_share, or give files for it",
    }
    for split, cure in cures.items():
        counts, max_seq_len = stats[split], stats["settings"]["max_seq_len"]
        if counts["documents"]:
            continue
        if counts["dropped"] and max_seq_len is not None:
            raise ConfigError(
                f"max_seq_len={max_seq_len}: so many tokens hold nothing of a response in any of {counts['dropped']} "
                f"examples of {split}; raise it"
            )
        dropped = f", as nothing is to be learned in {counts['dropped']} examples" if counts["dropped"] else ""
        raise ConfigError(f"{split}: there is no document{dropped}{skipped}; {cure}")
