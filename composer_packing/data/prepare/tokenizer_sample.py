"""Texts to train a tokenizer on: the train split, or a sample of it that fits into memory."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from composer_packing.config.prepare import PrepareConfig
from composer_packing.data.prepare.pipeline import documents_of, split_parts

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 30
"""Bytes of all texts in the sample, at most."""


def sample_texts(
    train: Sequence[Path], val: Sequence[Path], settings: PrepareConfig, max_bytes: int = MAX_BYTES
) -> list[str]:
    """Texts of the train split in order: all of them, or half of them chosen by a hash, or a quarter, and so on.

    Args:
        train: files, as `find_files` gives them.
        val: files with the documents to evaluate on, which are not read; if there are none, a share of the documents of
            `train` is held out, and not taken either.
        settings: how texts are read.
        max_bytes: bytes of all texts, at most.

    Raises:
        ConfigError: a record cannot be read, or a process was killed.
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
                # These bytes of the hash are not those that decide what is held out.
                rank = int.from_bytes(hashlib.sha256(text).digest()[8:16], "big") / 2**64
                if rank < share:
                    taken.append((rank, text))
                    size += length
            while size > max_bytes:
                share /= 2
                taken = [(rank, text) for rank, text in taken if rank < share]
                size = sum(len(text) for _, text in taken)
    log.info("training the tokenizer on %d of %d documents, %d bytes", len(taken), documents, size)
    return [text.decode() for _, text in taken]
