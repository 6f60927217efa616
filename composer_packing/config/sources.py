"""The keys under `data`: one for each kind of source that documents can come from."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from omegaconf import MISSING

from composer_packing.common.resume import Resume, key
from composer_packing.config.limits import LARGEST, OneOf, Range
from composer_packing.config.prepare import DocumentPer, OnError, PrepareConfig, Share

BYTES_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
"""Types that the ids in a column of bytes may have."""

BytesDtype = Annotated[str, OneOf(BYTES_DTYPES)]
Positive = Range(above=0, below=LARGEST)


@dataclass
class DocsConfig:
    """The built-in corpus: docstrings of the installed Python packages.

    With `objective: sft`, examples are the signatures of functions as prompts and their docstrings as responses.

    Attributes:
        vocab_size: entries of the tokenizer that is trained on the docstrings.
    """

    vocab_size: int = key(8192, Resume.FINGERPRINT)


@dataclass
class TextsConfig:
    """Texts that are tokenized while training.

    Attributes:
        train: files and folders to train on; for huggingface, folders that `save_to_disk` wrote.
        val: files and folders to evaluate on; null to hold out a share of the documents of `train`.
        val_share: share of the documents that is held out, chosen by a hash of each text.
        tokenizer: folder that `save_pretrained` wrote, or a name on the Hugging Face hub.
        on_error: stop at a record that cannot be read, or skip it and count it.
    """

    train: list[str] = key(MISSING, Resume.FINGERPRINT)
    val: list[str] | None = key(None, Resume.FINGERPRINT)
    val_share: Share = key(PrepareConfig.val_share, Resume.FINGERPRINT)
    tokenizer: str = key(MISSING, Resume.FINGERPRINT)
    on_error: OnError = key(PrepareConfig.on_error, Resume.FINGERPRINT)

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
        document_per: a document is a file, or the lines between blank lines (blank_line).
    """

    document_per: DocumentPer = key(PrepareConfig.document_per, Resume.FINGERPRINT)


@dataclass
class RecordsConfig(TextsConfig):
    """Records with one text each: JSON lines, Parquet, or Hugging Face data sets on disk.

    Attributes:
        text_field: field or column with the text.
    """

    text_field: str = key(PrepareConfig.text_field, Resume.FINGERPRINT)


@dataclass
class MdsConfig:
    """MDS shards on this machine, as `composer_packing.prepare`, ModernBERT's or llm-foundry's tools write them.

    With `objective: sft`, the shards need a column `loss_mask`, which `composer_packing.prepare --examples` writes.

    Attributes:
        folder: holds a folder for each split.
        train: name of the folder to train on.
        val: name of the folder to evaluate on.
        column: column with the documents; null for the first of input_ids, tokens and text that the shards have.
        bytes_dtype: type of the ids in a column of bytes.
        tokenizer: as for text; null for the one that `composer_packing.prepare` wrote next to the shards.
    """

    folder: str = key(MISSING, Resume.FINGERPRINT)
    train: str = key("train", Resume.FINGERPRINT)
    val: str = key("val", Resume.FREE)
    column: str | None = key(None, Resume.FINGERPRINT)
    bytes_dtype: BytesDtype = key("int64", Resume.FINGERPRINT)
    tokenizer: str | None = key(None, Resume.FINGERPRINT)


@dataclass
class StreamConfig:
    """One of several streams of MDS shards.

    Attributes:
        remote: address that holds a folder for each split, as s3://bucket/folder or any other that Streaming reads;
            null if the splits are on this machine.
        local: folder that the splits are downloaded to, or are in; null for a folder in `data.cache_folder`.
        train: name of the folder to train on.
        val: name of the folder to evaluate on; null to evaluate on no documents of this stream.
        proportion: share of an epoch that comes from this stream; for all streams or for none.
        repeat: how often an epoch has each document of this stream; below 1, the share of its documents; null for once.
        choose: how many documents of this stream an epoch has.
    """

    remote: str | None = key(None, Resume.FINGERPRINT)
    local: str | None = key(None, Resume.FINGERPRINT)
    train: str = key("train", Resume.FINGERPRINT)
    val: str | None = key("val", Resume.FREE)
    proportion: Annotated[float, Positive] | None = key(None, Resume.FINGERPRINT)
    repeat: Annotated[float, Positive] | None = key(None, Resume.FINGERPRINT)
    choose: Annotated[int, Positive] | None = key(None, Resume.FINGERPRINT)


@dataclass
class StreamingConfig:
    """Streams of MDS shards through mosaicml-streaming, downloaded while training.

    Attributes:
        streams: each under a name of your choice.
        column: column with the documents; null for the first of input_ids, tokens and text that the shards have.
        bytes_dtype: type of the ids in a column of bytes.
        tokenizer: as for text; null for the one that `composer_packing.prepare` wrote next to the first stream.
        cache_limit: size that each split may take on this machine's disk, such as 100gb; null for no limit.
    """

    streams: dict[str, StreamConfig] = field(default_factory=dict)
    column: str | None = key(None, Resume.FINGERPRINT)
    bytes_dtype: BytesDtype = key("int64", Resume.FINGERPRINT)
    tokenizer: str | None = key(None, Resume.FINGERPRINT)
    cache_limit: str | None = key(None, Resume.FREE)


@dataclass
class DataConfig:
    """Where documents come from: exactly one of the sources.

    Attributes:
        cache_folder: holds prepared docstrings, copied texts and downloads.
        docs: docstrings of the installed Python packages.
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
        """The given sources by their keys. `checks` makes sure that there is exactly one."""
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "cache_folder"}
        return {name: source for name, source in given.items() if source is not None}
