"""From the source that an experiment names to its tokenizer and its two splits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_packing.config import ConfigError, TrainConfig
from composer_packing.config_data import DocsConfig, MdsConfig, RecordsConfig, StreamingConfig, TextConfig
from composer_packing.data.corpus import open_or_build
from composer_packing.data.dataset import DocumentDataset
from composer_packing.data.mds_documents import MdsDocuments
from composer_packing.data.prepared import STATS, TOKENIZER, TOKENIZER_FILES, stats_in, tokenizer_for
from composer_packing.data.streamed import StreamedDocuments
from composer_packing.data.streams import fetched_beside, local_folder, open_streams
from composer_packing.data.text_copy import copied_texts
from composer_packing.data.tokenizer import TextTokenizer, load_tokenizer
from composer_packing.policies import Objective

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
    cache_folder, max_seq_len = Path(config.data.cache_folder), config.max_seq_len
    ((kind, given),) = config.data.sources.items()
    try:
        if isinstance(given, DocsConfig):
            corpus = open_or_build(cache_folder, given.vocab_size, config.objective == Objective.SFT)
        elif isinstance(given, (TextConfig, RecordsConfig)):
            copy = copied_texts(kind, given, cache_folder)
    except OSError as error:
        raise ConfigError(
            f"data.cache_folder={config.data.cache_folder}: {error.strerror or error}: {error.filename}; "
            f"give a folder that can be written"
        ) from error
    if isinstance(given, DocsConfig):
        tokenizer = _checked(corpus.tokenizer, config)
        train, val = (counted_split(corpus.documents(split, max_seq_len), max_seq_len) for split in ("train", "val"))
        return Source(tokenizer, train, val)
    if isinstance(given, MdsConfig):
        return _of_mds(given, config)
    if isinstance(given, StreamingConfig):
        return _of_streams(given, config, cache_folder)
    tokenizer = _checked(load_tokenizer(given.tokenizer), config)
    train, val = (_in_shards(MdsDocuments(copy / split, tokenizer), None, config) for split in ("train", "val"))
    return Source(tokenizer, train, val)


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


def _of_mds(given: MdsConfig, config: TrainConfig) -> Source:
    folder = Path(given.folder)
    if not folder.is_dir():
        raise ConfigError(f"data.mds.folder={given.folder}: there is no such folder; give one that holds the splits")
    stats = stats_in(folder / STATS)
    tokenizer = _checked(tokenizer_for("data.mds", given.tokenizer, folder / TOKENIZER, stats), config)
    splits = []
    for split in (given.train, given.val):
        documents = MdsDocuments(folder / split, tokenizer, given.column, given.bytes_dtype)
        splits.append(_in_shards(documents, None if stats is None else stats.get(split), config))
    return Source(tokenizer, *splits)


def _in_shards(documents: MdsDocuments, counts: dict[str, Any] | None, config: TrainConfig) -> Split:
    numbers = np.linspace(0, len(documents) - 1, SAMPLE).astype(np.int64)
    return _sampled(documents, len(documents), numbers, counts, config)


def _of_streams(given: StreamingConfig, config: TrainConfig, cache_folder: Path) -> Source:
    opened = [open_streams(given, split, cache_folder, config.seed) for split in ("train", "val")]
    first = next(iter(given.streams.values()))
    stats = stats_in(fetched_beside(first, STATS, cache_folder))
    for name in TOKENIZER_FILES:
        fetched_beside(first, f"{TOKENIZER}/{name}", cache_folder)
    beside = local_folder(first, cache_folder) / TOKENIZER
    tokenizer = _checked(tokenizer_for("data.streaming", given.tokenizer, beside, stats), config)
    splits = []
    for streams in opened:
        documents = StreamedDocuments(streams, given, tokenizer)
        # Of the first shard of each stream only, as they are downloaded for it.
        begins = np.cumsum([0, *documents.samples_per_shard])[np.cumsum([0, *streams.shards_per_stream[:-1]])]
        numbers = [np.arange(begin, min(begin + SAMPLE // len(begins), len(documents))) for begin in begins]
        splits.append(
            _sampled(documents, sum(streams.choose_per_stream), np.concatenate(numbers), counts=None, config=config)
        )
    return Source(tokenizer, *splits)


def _sampled(
    documents: MdsDocuments | StreamedDocuments,
    per_epoch: int,
    numbers: NDArray[np.int64],
    counts: dict[str, Any] | None,
    config: TrainConfig,
) -> Split:
    """A split of which some documents have been read, so that what is wrong with them shows before the first batch."""
    numbers = np.unique(numbers)
    try:
        sampled = documents.__getitems__(numbers).tokens
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if len(sampled) >= SAMPLE and not sampled[1::2].any():
        raise ConfigError(
            "every second id of the data is 0, as when ids are read half as wide as they are; give another bytes_dtype"
        )
    counted = (counts or {}).get("tokens")
    num_tokens = round(len(sampled) / len(numbers) * per_epoch) if counted is None else int(counted)
    about = "about " if counted is None else ""
    summary = (
        f"{per_epoch:,} documents, {about}{num_tokens:,} tokens; those longer than {config.max_seq_len} come in pieces"
    )
    return Split(documents, per_epoch, max(1, num_tokens), summary)
