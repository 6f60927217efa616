"""From the source that an experiment names to its tokenizer and its two splits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.config.sources import DocsConfig, MdsConfig, StreamingConfig, TextsConfig
from composer_packing.data.array_documents import DocumentDataset
from composer_packing.data.docstrings.corpus import open_or_build
from composer_packing.data.mds.documents import MdsDocuments
from composer_packing.data.prepare.stats import (
    STATS,
    TOKENIZER,
    TOKENIZER_FILES,
    check_made_with,
    counted_tokens,
    stats_in,
    tokenizer_for,
)
from composer_packing.data.prepare.text_cache import copy_texts_once
from composer_packing.data.streams.documents import StreamedDocuments
from composer_packing.data.streams.download import fetch_stream_file, local_folder
from composer_packing.data.streams.index import open_streams
from composer_packing.data.tokenizer import TextTokenizer, load_tokenizer
from composer_packing.packing.options import Objective
from composer_packing.packing.source_batch import FlatSourceBatch

Documents = DocumentDataset | MdsDocuments | StreamedDocuments
"""Map-style datasets whose `__getitems__` gives a numbered `FlatSourceBatch`."""

SAMPLE = 256
"""Documents that are read to tell how long they are where nobody has counted."""


@dataclass(frozen=True)
class Split:
    """Documents to train or to evaluate on.

    Attributes:
        documents: a map-style dataset.
        per_epoch: how many of them an epoch has.
        num_tokens: their tokens; from a sample where nobody has counted.
        summary: what they are, in words.
    """

    documents: Documents
    per_epoch: int
    num_tokens: int
    summary: str


@dataclass(frozen=True)
class Source:
    """What a run reads.

    Attributes:
        tokenizer: of all documents.
        train: to train on.
        val: to evaluate on.
    """

    tokenizer: TextTokenizer
    train: Split
    val: Split


def open_source(config: TrainConfig) -> Source:
    """The source of a run; what must be built for it is built by one rank, while the others wait for its lock.

    Raises:
        ConfigError: a file is missing or damaged, ids do not fit the tokenizer, or the tokenizer not the model.
    """
    ((kind, given),) = config.data.sources.items()
    if isinstance(given, MdsConfig):
        return _of_mds(given, config)
    if isinstance(given, StreamingConfig):
        return _of_streams(given, config)
    try:
        return _of_docs(given, config) if isinstance(given, DocsConfig) else _of_texts(kind, given, config)
    except OSError as error:
        raise ConfigError(
            f"data.cache_folder={config.data.cache_folder}: {error.strerror or error}: {error.filename or ''}; "
            f"give a folder that can be written"
        ) from error


def _checked(tokenizer: TextTokenizer, config: TrainConfig) -> TextTokenizer:
    """The tokenizer, if it goes with the model and the objective."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: must be at least {tokenizer.vocab_size}, the words of the "
            f"tokenizer"
        )
    if config.objective == Objective.MLM and tokenizer.vocabulary.mask_token_id is None:
        raise ConfigError("objective=mlm: the tokenizer has no mask token; give one that has, or objective=causal")
    return tokenizer


def _of_docs(given: DocsConfig, config: TrainConfig) -> Source:
    has_examples = config.objective == Objective.SFT
    corpus, max_seq_len = open_or_build(config.cache_folder, given.vocab_size, has_examples), config.max_seq_len
    train, val = (counted_split(corpus.documents(split, max_seq_len), max_seq_len) for split in ("train", "val"))
    return Source(_checked(corpus.tokenizer, config), train, val)


def counted_split(documents: DocumentDataset, max_seq_len: int) -> Split:
    """A split of which everything is known."""
    longer = f"{documents.num_long:,} longer than {max_seq_len}"
    summary = f"{documents.num_documents:,} documents, {documents.num_tokens:,} tokens; {longer} come in pieces"
    if documents.has_loss_mask:
        summary = (
            f"{len(documents):,} of {documents.num_documents:,} examples, {documents.num_tokens:,} tokens; {longer} "
            f"cut, {documents.num_dropped:,} dropped as nothing of their response was left"
        )
    return Split(documents, len(documents), documents.num_tokens, summary)


def _of_texts(kind: str, given: TextsConfig, config: TrainConfig) -> Source:
    tokenizer = _checked(load_tokenizer(given.tokenizer), config)
    folder = copy_texts_once(kind, given, config.cache_folder)
    skipped = (stats_in(folder / STATS) or {}).get("skipped")
    note = f"; skipped {', '.join(f'{count:,} ({reason})' for reason, count in skipped.items())}" if skipped else ""
    try:
        opened = [MdsDocuments(folder / split, tokenizer) for split in ("train", "val")]
        return Source(tokenizer, *(_in_shards(documents, None, config, note) for documents in opened))
    except ConfigError as error:
        raise ConfigError(f"{error}; or delete {folder}, and it is made anew") from error


def _of_mds(given: MdsConfig, config: TrainConfig) -> Source:
    folder = Path(given.folder)
    if not folder.is_dir():
        raise ConfigError(f"data.mds.folder={given.folder}: there is no such folder; give one that holds the splits")
    stats = stats_in(folder / STATS)
    tokenizer = _checked(tokenizer_for("data.mds", given.tokenizer, folder / TOKENIZER), config)
    check_made_with("data.mds", folder, stats, tokenizer)
    splits = []
    for split in (given.train, given.val):
        documents = MdsDocuments(folder / split, tokenizer, given.column, given.bytes_dtype)
        splits.append(_in_shards(documents, counted_tokens(folder, stats, split, len(documents)), config))
    return Source(tokenizer, *splits)


def _in_shards(documents: MdsDocuments, num_tokens: int | None, config: TrainConfig, note: str = "") -> Split:
    sample = _sampled(documents, np.linspace(0, len(documents) - 1, SAMPLE).astype(np.int64))
    if num_tokens is not None:
        return _split(documents, len(documents), num_tokens, config, "", note)
    return _split(documents, len(documents), round(sample.lengths.mean() * len(documents)), config, "about ", note)


def _of_streams(given: StreamingConfig, config: TrainConfig) -> Source:
    opened = [open_streams(given, split, config.cache_folder, config.seed) for split in ("train", "val")]
    first = next(iter(given.streams.values()))
    for name in TOKENIZER_FILES if given.tokenizer is None else ():
        fetch_stream_file(first, f"{TOKENIZER}/{name}", config.cache_folder)
    beside = local_folder(first, config.cache_folder) / TOKENIZER
    tokenizer = _checked(tokenizer_for("data.streaming", given.tokenizer, beside), config)
    for name, stream in given.streams.items():
        stats = stats_in(fetch_stream_file(stream, STATS, config.cache_folder))
        check_made_with("data.streaming", Path(stream.remote or stream.local or name), stats, tokenizer)
    splits = []
    for streams in opened:
        documents = StreamedDocuments(streams, given, tokenizer)
        num_tokens = 0.0
        # Of the first shard of each stream only, as it is downloaded for it.
        first_shards = np.cumsum([0, *streams.shards_per_stream[:-1]])
        begins = np.cumsum([0, *documents.samples_per_shard])[first_shards]
        most = max(1, SAMPLE // len(begins))
        for begin, size, choose in zip(
            begins, documents.samples_per_shard[first_shards], streams.choose_per_stream, strict=True
        ):
            num_tokens += choose * _sampled(documents, np.arange(begin, begin + min(most, size))).lengths.mean()
        splits.append(_split(documents, sum(streams.choose_per_stream), round(num_tokens), config, "about "))
    return Source(tokenizer, *splits)


def _sampled(documents: MdsDocuments | StreamedDocuments, numbers: NDArray[np.int64]) -> FlatSourceBatch:
    """Some documents of a split, read so that what is wrong with them shows before the first batch."""
    sample = documents.__getitems__(np.unique(numbers))
    if documents.bytes_dtype is not None:
        narrow = np.dtype(documents.bytes_dtype)
        of_bytes = np.ascontiguousarray(sample.tokens, narrow)
        for wider in (np.dtype(f"uint{8 * size}") for size in (2, 4, 8) if size > narrow.itemsize):
            # Ids that are read half as wide as they are have a 0 behind each.
            fits = of_bytes.nbytes % wider.itemsize == 0 and of_bytes.view(wider).max() < documents.vocab_size
            if fits and len(of_bytes) >= SAMPLE:
                raise ConfigError(
                    f"data: bytes_dtype={narrow}: the ids are those of the tokenizer as {wider} too; give that, or "
                    f"int{8 * wider.itemsize}"
                )
    return sample


def _split(
    documents: MdsDocuments | StreamedDocuments,
    per_epoch: int,
    num_tokens: int,
    config: TrainConfig,
    about: str,
    note: str = "",
) -> Split:
    summary = (
        f"{per_epoch:,} documents, {about}{num_tokens:,} tokens; those longer than {config.max_seq_len} come in pieces"
    )
    return Split(documents, per_epoch, max(1, num_tokens), summary + note)
