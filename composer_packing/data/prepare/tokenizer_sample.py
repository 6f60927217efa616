"""Texts to train a tokenizer on: those of the train split, or as many of them as memory has room for."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.prepare.pipeline import documents_of, split_parts

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
"""Bytes of all texts that are taken, at most."""


def sample_texts(
    train: Sequence[Path], val: Sequence[Path], settings: PrepareConfig, max_bytes: int = MAX_BYTES
) -> list[str]:
    """Texts of the train split in order: all, or half of them by a hash, or a quarter, and so on.

    Args:
        train: files, as `find_files` gives them.
        val: those with the documents to evaluate on, of which none is taken; none to hold them out by hash.
        settings: how texts are read.
        max_bytes: bytes of all texts, at most.

    Raises:
        ConfigError: as `documents_of` says.
    """
    taken: list[tuple[float, bytes]] = []
    size = documents = 0
    share = 1.0
    with closing(documents_of(split_parts(train, val, settings)[:1], settings, None)) as made:
        for some in made:
            end = 0
            for length, is_val in zip(some.lengths.tolist(), some.held_out.tolist(), strict=True):
                start, end = end, end + length
                if is_val:
                    continue
                documents += 1
                text = some.data[start:end].tobytes()
                # Other bytes of the hash than those that say what is held out.
                place = int.from_bytes(hashlib.sha256(text).digest()[8:16], "big") / 2**64
                if place < share:
                    taken.append((place, text))
                    size += length
            while size > max_bytes:
                share /= 2
                taken = [(place, text) for place, text in taken if place < share]
                size = sum(len(text) for _, text in taken)
    log.info("training the tokenizer on %d of %d documents, %d bytes", len(taken), documents, size)
    return [text.decode() for _, text in taken]
