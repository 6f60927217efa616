"""From the source that a YAML file names to a tokenizer and two splits of documents.

Words: a source is where documents come from, one key under `data`. Opening it gives `TrainingData`. (A source batch
is what the loader hands to the packer.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.config.sources import DocsConfig, MdsConfig, StreamingConfig, TextsConfig
from composer_packing.data.docstrings.corpus import prepare_docstrings
from composer_packing.data.mds.documents import MdsDocuments
from composer_packing.data.prepare.pipeline import SPLITS
from composer_packing.data.prepare.stats import (
    STATS,
    TOKENIZER,
    TOKENIZER_FILES,
    SplitCounts,
    check_made_with,
    counts_of,
    stats_in,
    tokenizer_for,
)
from composer_packing.data.prepare.text_cache import copy_texts_once
from composer_packing.data.streams.documents import StreamedDocuments
from composer_packing.data.streams.download import fetch_stream_file, local_folder
from composer_packing.data.streams.index import OpenStreams, open_streams
from composer_packing.data.tokenizer import TextTokenizer, load_tokenizer
from composer_packing.packing.options import Objective
from composer_packing.packing.source_batch import FlatSourceBatch

SAMPLE = 256
"""Documents that are read to estimate the number of tokens, if nobody has counted them."""


class Documents(Protocol):
    """A map-style dataset of a split.

    Attributes:
        are_texts: the documents are tokenized as they are read.
    """

    are_texts: bool

    @property
    def fingerprint(self) -> str:
        """Hash of all documents and their order, 16 hexadecimal digits."""

    def __len__(self) -> int: ...

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Several documents at once, with their numbers."""


@dataclass(frozen=True)
class Split:
    """Documents to train or to evaluate on.

    Attributes:
        documents: all documents of the split.
        per_epoch: how many of them an epoch has.
        num_tokens: tokens in an epoch; an estimate if nobody has counted them.
        summary: the split in words.
    """

    documents: Documents
    per_epoch: int
    num_tokens: int
    summary: str


@dataclass(frozen=True)
class TrainingData:
    """What a run reads.

    Attributes:
        tokenizer: makes or made the ids of all documents.
        train: documents to train on.
        val: documents to evaluate on.
    """

    tokenizer: TextTokenizer
    train: Split
    val: Split


def open_source(config: TrainConfig) -> TrainingData:
    """Open the source of a run. What must be built first is built by one rank, while the others wait for its lock.

    Raises:
        ConfigError: a file is missing or damaged, ids do not fit the tokenizer, or the tokenizer does not fit the
            model.
    """
    ((kind, source),) = config.data.sources.items()
    if isinstance(source, MdsConfig):
        return _open_mds(source, config)
    if isinstance(source, StreamingConfig):
        return _open_streaming(source, config)
    try:
        return _open_docs(source, config) if isinstance(source, DocsConfig) else _open_texts(kind, source, config)
    except OSError as error:
        raise ConfigError(
            f"data.cache_folder={config.data.cache_folder}: {error.strerror or error}: {error.filename or ''}; "
            f"give a folder that can be written"
        ) from error


def _check_tokenizer(tokenizer: TextTokenizer, config: TrainConfig) -> TextTokenizer:
    """The tokenizer, if it fits the model and the objective."""
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: must be at least {tokenizer.vocab_size}, the entries of the "
            f"tokenizer"
        )
    if config.objective == Objective.MLM and tokenizer.vocabulary.mask_token_id is None:
        raise ConfigError("objective=mlm: the tokenizer has no mask token; give one that has, or objective=causal")
    return tokenizer


def _open_docs(source: DocsConfig, config: TrainConfig) -> TrainingData:
    has_examples = config.objective == Objective.SFT
    folder = prepare_docstrings(config.cache_folder, source.vocab_size, config.max_seq_len, has_examples)
    try:
        return _open_mds(MdsConfig(folder=str(folder)), config)
    except ConfigError as error:
        raise ConfigError(f"{error}; or delete {folder}, and the next run builds it again") from error


def _open_texts(kind: str, source: TextsConfig, config: TrainConfig) -> TrainingData:
    tokenizer = _check_tokenizer(load_tokenizer(source.tokenizer), config)
    folder = copy_texts_once(kind, source, config.cache_folder)
    skipped = (stats_in(folder / STATS) or {}).get("skipped")
    note = f"; skipped {', '.join(f'{count:,} ({reason})' for reason, count in skipped.items())}" if skipped else ""
    try:
        opened = [MdsDocuments(folder / split, tokenizer) for split in SPLITS]
        splits = [_split_in_shards(documents, None, config.max_seq_len, note) for documents in opened]
    except ConfigError as error:
        raise ConfigError(f"{error}; or delete {folder}, and the next run copies the texts again") from error
    return TrainingData(tokenizer, *splits)


def _open_mds(source: MdsConfig, config: TrainConfig) -> TrainingData:
    folder = Path(source.folder)
    if not folder.is_dir():
        raise ConfigError(f"data.mds.folder={source.folder}: there is no such folder; give one that holds the splits")
    stats = stats_in(folder / STATS)
    tokenizer = _check_tokenizer(tokenizer_for("data.mds", source.tokenizer, folder / TOKENIZER), config)
    check_made_with("data.mds", folder, stats, tokenizer)
    loss_masked = config.objective == Objective.SFT
    splits = []
    for split in (source.train, source.val):
        documents = MdsDocuments(folder / split, tokenizer, source.column, source.bytes_dtype, loss_masked)
        counts = counts_of(folder, stats, split, len(documents))
        # Every token of an example is text too, so that mlm and causal may learn all of them. The line tells a user
        # who has forgotten to set objective=sft.
        is_ignored = documents.has_loss_mask and not loss_masked
        note = f"; objective={config.objective} ignores their loss masks" if is_ignored else ""
        splits.append(_split_in_shards(documents, counts, config.max_seq_len, note, loss_masked))
    return TrainingData(tokenizer, *splits)


def _split_in_shards(
    documents: MdsDocuments, counts: SplitCounts | None, max_seq_len: int, note: str, are_examples: bool = False
) -> Split:
    numbers = np.linspace(0, len(documents) - 1, SAMPLE).astype(np.int64)
    estimate = round(_read_sample(documents, numbers).lengths.mean() * len(documents))
    if counts is None:
        counts = SplitCounts(len(documents), estimate, is_estimate=True)
    summary = counts.summary(max_seq_len, are_examples) + note
    return Split(documents, len(documents), max(1, counts.tokens), summary)


def _open_streaming(source: StreamingConfig, config: TrainConfig) -> TrainingData:
    opened = [open_streams(source, split, config.cache_folder, config.seed) for split in SPLITS]
    tokenizer = _check_tokenizer(_streaming_tokenizer(source, config.cache_folder), config)
    for name, stream in source.streams.items():
        stats = stats_in(fetch_stream_file(stream, STATS, config.cache_folder))
        check_made_with("data.streaming", Path(stream.remote or stream.local or name), stats, tokenizer)
    splits = []
    for streams in opened:
        documents, per_epoch = StreamedDocuments(streams, source, tokenizer), sum(streams.choose_per_stream)
        counts = SplitCounts(per_epoch, _estimate_tokens(documents, streams), is_estimate=True)
        splits.append(Split(documents, per_epoch, max(1, counts.tokens), counts.summary(config.max_seq_len)))
    return TrainingData(tokenizer, *splits)


def _streaming_tokenizer(source: StreamingConfig, cache_folder: Path) -> TextTokenizer:
    """The tokenizer that is given, or the one next to the first stream, which is downloaded first."""
    first = next(iter(source.streams.values()))
    for name in TOKENIZER_FILES if source.tokenizer is None else ():
        fetch_stream_file(first, f"{TOKENIZER}/{name}", cache_folder)
    return tokenizer_for("data.streaming", source.tokenizer, local_folder(first, cache_folder) / TOKENIZER)


def _estimate_tokens(documents: StreamedDocuments, streams: OpenStreams) -> int:
    """Tokens in an epoch, by the first shard of each stream, as a shard must be downloaded to be read."""
    first_shards = np.cumsum([0, *streams.shards_per_stream[:-1]])
    first_documents = np.cumsum([0, *documents.samples_per_shard])[first_shards]
    most = max(1, SAMPLE // len(first_shards))
    tokens = 0.0
    for first, size, per_epoch in zip(
        first_documents, documents.samples_per_shard[first_shards], streams.choose_per_stream, strict=True
    ):
        tokens += per_epoch * _read_sample(documents, np.arange(first, first + min(most, size))).lengths.mean()
    return round(tokens)


def _read_sample(documents: MdsDocuments | StreamedDocuments, numbers: NDArray[np.int64]) -> FlatSourceBatch:
    """Some documents of a split. Reading them shows what is wrong with the split before the first batch."""
    sample = documents.__getitems__(np.unique(numbers))
    if documents.bytes_dtype is not None:
        _check_bytes_dtype(sample.tokens, np.dtype(documents.bytes_dtype), documents.vocab_size)
    return sample


def _check_bytes_dtype(tokens: NDArray[Any], narrow: np.dtype[Any], vocab_size: int) -> None:
    """Raise ConfigError if ids fit a wider type too. Ids that are read half as wide have a 0 after each id."""
    ids = np.ascontiguousarray(tokens, narrow)
    for wider in (np.dtype(f"uint{8 * size}") for size in (2, 4, 8) if size > narrow.itemsize):
        fits = ids.nbytes % wider.itemsize == 0 and ids.view(wider).max() < vocab_size
        if fits and len(ids) >= SAMPLE:
            raise ConfigError(
                f"data: bytes_dtype={narrow}: the ids are those of the tokenizer as {wider} too; give that, or "
                f"int{8 * wider.itemsize}"
            )
