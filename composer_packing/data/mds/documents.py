"""Documents in MDS shards on this machine, read where they lie; texts are tokenized as they are read."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from composer_packing.common.errors import ConfigError
from composer_packing.data.mds.column import MdsColumn
from composer_packing.data.mds.shards import INDEX
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.packing.token_arrays import check_ids

COLUMNS = ("input_ids", "tokens", "text")
"""Columns that hold documents, as ModernBERT's, llm-foundry's and our own shards call them."""


class MdsDocuments(Dataset[FlatSourceBatch]):
    """A split as a map-style dataset. The number of a document is its place in the shards.

    Args:
        folder: holds `index.json` and the shards.
        tokenizer: bounds the ids, and makes them of a column of texts.
        column: name of the column; None for the first there is of `COLUMNS`.
        bytes_dtype: type of the ids in a column of bytes.

    Attributes:
        are_texts: they are tokenized as they are read.
        bytes_dtype: type that ids are taken to be of; None unless the column is one of bytes.
        vocab_size: all ids lie below it.

    Raises:
        ConfigError: the shards are not what their index says, or have no column that will do.
    """

    def __init__(
        self, folder: Path, tokenizer: TextTokenizer, column: str | None = None, bytes_dtype: str = "int64"
    ) -> None:
        self._column = MdsColumn(folder, COLUMNS if column is None else (column,), bytes_dtype)
        self._folder, self._tokenizer = folder, tokenizer
        self.are_texts = self._column.dtype is None
        self.bytes_dtype = bytes_dtype if self._column.encoding == "bytes" else None
        self.vocab_size = tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Of the index, and so of all shards whose hashes it has, and of how ids are read; 16 hexadecimal digits."""
        digest = blake2b(repr((self._column.name, self.bytes_dtype)).encode(), digest_size=8)
        digest.update((self._folder / INDEX).read_bytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._column)

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Several documents at once, numbered, as the loader asks for them.

        Raises:
            ConfigError: a shard is damaged, an id is not one of the tokenizer, or a text is not UTF-8.
        """
        numbers = np.asarray(indices, np.int64)
        data, sizes = self._column.gather(numbers)
        if self._column.dtype is None:
            tokens, lengths = self._tokenizer(self._texts(data.tobytes(), sizes, numbers))
        else:
            tokens, lengths = data.view(self._column.dtype), sizes // self._column.dtype.itemsize
            check_ids_of(f"{self._folder}: column {self._column.name}", tokens, self._tokenizer)
        return FlatSourceBatch(tokens, lengths, numbers)

    def _texts(self, data: bytes, sizes: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[str]:
        texts, at = [], 0
        for size, number in zip(sizes.tolist(), numbers, strict=True):
            try:
                texts.append(data[at : at + size].decode())
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self._folder}: the text of sample {number} is not UTF-8 ({error.reason}); write it anew"
                ) from error
            at += size
        return texts


def check_ids_of(where: str, tokens: NDArray[np.integer], tokenizer: TextTokenizer) -> None:  # type: ignore[type-arg]
    """Raise ConfigError where an id is not one of the tokenizer.

    Args:
        where: what errors begin with.
        tokens: ids, any integers.
        tokenizer: what they should be of.
    """
    if len(tokens):
        try:
            check_ids(int(tokens.min()), int(tokens.max()), tokenizer.vocab_size)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {error}, as the tokenizer has {tokenizer.vocab_size} entries; give the tokenizer that the "
                f"data was made with, or for a column of bytes the right bytes_dtype"
            ) from error
