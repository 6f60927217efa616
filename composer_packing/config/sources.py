"""The part of the schema that says where documents come from: one key for each kind of source."""

from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from composer_packing.common.resume import Resume, key
from composer_packing.config.prepare import PrepareConfig

BYTES_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""Types that the ids in a column of bytes may have."""


@dataclass
class DocsConfig:
    """The built-in corpus: the documentation of the installed Python packages.

    With `objective: sft`, signatures of their functions as prompts and the documentation as responses.

    Attributes:
        vocab_size: size of the tokenizer that is trained on it.
    """

    vocab_size: int = key(8192, Resume.FINGERPRINT)


@dataclass
class TextsConfig:
    """Texts that are tokenized while training.

    Attributes:
        train: files and folders; for huggingface, folders that `save_to_disk` wrote.
        val: those to evaluate on; null to hold out a share of the documents.
        val_share: that share, by a hash of each document's text.
        tokenizer: folder that `save_pretrained` wrote, or a name on the Hugging Face hub.
        on_error: stop at a record that cannot be read, or skip it and count it.
    """

    train: list[str] = key(MISSING, Resume.FINGERPRINT)
    val: list[str] | None = key(None, Resume.FINGERPRINT)
    val_share: float = key(PrepareConfig.val_share, Resume.FINGERPRINT)
    tokenizer: str = key(MISSING, Resume.FINGERPRINT)
    on_error: str = key(PrepareConfig.on_error, Resume.FINGERPRINT)

    def prepare_config(self) -> PrepareConfig:
        """Settings by which the texts are copied into shards.

        Raises:
            ConfigError: a value is not allowed.
        """
        names = {setting.name for setting in fields(PrepareConfig)} & {setting.name for setting in fields(self)}
        return PrepareConfig(**{name: getattr(self, name) for name in names})


@dataclass
class PlainTextConfig(TextsConfig):
    """Plain text.

    Attributes:
        document_per: a document is a file, or what lies between blank lines (blank_line).
    """

    document_per: str = key(PrepareConfig.document_per, Resume.FINGERPRINT)


@dataclass
class RecordsConfig(TextsConfig):
    """Records with a text each: JSON lines, Parquet, or Hugging Face data sets on disk.

    Attributes:
        text_field: the field, or column, with the text.
    """

    text_field: str = key(PrepareConfig.text_field, Resume.FINGERPRINT)


@dataclass
class MdsConfig:
    """MDS shards on this machine, as `composer_packing.prepare`, ModernBERT's or llm-foundry's tools write them.

    Attributes:
        folder: where the splits are.
        train: folder in it to train on.
        val: folder in it to evaluate on.
        column: null for the first that is there of input_ids, tokens and text.
        bytes_dtype: type of the ids in a column of bytes.
        tokenizer: as for text; null for the one that lies beside shards of `composer_packing.prepare`.
    """

    folder: str = key(MISSING, Resume.FINGERPRINT)
    train: str = key("train", Resume.FINGERPRINT)
    val: str = key("val", Resume.FREE)
    column: str | None = key(None, Resume.FINGERPRINT)
    bytes_dtype: str = key("int64", Resume.FINGERPRINT)
    tokenizer: str | None = key(None, Resume.FINGERPRINT)


@dataclass
class StreamConfig:
    """One of several streams of MDS shards.

    Attributes:
        remote: where its splits are, as s3://bucket/folder or any other that Streaming reads; null if they are here.
        local: folder they are downloaded to, or lie in; null for one in `data.cache_folder`.
        train: folder in it to train on.
        val: folder in it to evaluate on; null for none of this stream.
        proportion: share of an epoch that comes from this stream; for all streams or for none.
        repeat: how often an epoch has its documents, a fraction for some of them; null for once.
        choose: how many of its documents an epoch has.
    """

    remote: str | None = key(None, Resume.FINGERPRINT)
    local: str | None = key(None, Resume.FINGERPRINT)
    train: str = key("train", Resume.FINGERPRINT)
    val: str | None = key("val", Resume.FREE)
    proportion: float | None = key(None, Resume.FINGERPRINT)
    repeat: float | None = key(None, Resume.FINGERPRINT)
    choose: int | None = key(None, Resume.FINGERPRINT)


@dataclass
class StreamingConfig:
    """Streams of MDS shards through mosaicml-streaming, downloaded while training.

    Attributes:
        streams: each under a name of your own.
        column: null for the first that is there of input_ids, tokens and text.
        bytes_dtype: type of the ids in a column of bytes.
        tokenizer: as for text; null for the one that `composer_packing.prepare` put beside the first stream.
        cache_limit: what may lie on disk of each split at a time, such as 100gb; null for all.
    """

    streams: dict[str, StreamConfig] = field(default_factory=dict)
    column: str | None = key(None, Resume.FINGERPRINT)
    bytes_dtype: str = key("int64", Resume.FINGERPRINT)
    tokenizer: str | None = key(None, Resume.FINGERPRINT)
    cache_limit: str | None = key(None, Resume.FREE)


@dataclass
class DataConfig:
    """Where documents come from: exactly one of the sources.

    Attributes:
        cache_folder: where what is made of the data is kept: tokenized docs, copied texts, downloads.
        docs: the documentation of the installed Python packages.
        text: plain text.
        jsonl: JSON lines, plain or compressed (.gz, .zst).
        parquet: Parquet files.
        huggingface: Hugging Face data sets on disk.
        mds: MDS shards on this machine.
        streaming: MDS shards anywhere.
    """

    cache_folder: str = key(".cache", Resume.FREE)
    docs: DocsConfig | None = None
    text: PlainTextConfig | None = None
    jsonl: RecordsConfig | None = None
    parquet: RecordsConfig | None = None
    huggingface: RecordsConfig | None = None
    mds: MdsConfig | None = None
    streaming: StreamingConfig | None = None

    @property
    def sources(self) -> dict[str, Any]:
        """The sources that are given, by their keys; `checks` makes sure that there is one."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "cache_folder"}
        return {name: source for name, source in given.items() if source is not None}
