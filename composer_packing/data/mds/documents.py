"""Documents in MDS shards on this machine, read from memory maps. Texts are tokenized as they are read."""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from composer_packing.common.errors import ConfigError
from composer_packing.data.mds.column import MdsColumn
from composer_packing.data.mds.shards import INDEX, read_index
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.document_table import LossMask
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.packing.token_arrays import check_ids

COLUMNS = ("input_ids", "tokens", "text")
"""Columns that hold documents in ModernBERT's, llm-foundry's and our own shards."""

LOSS_MASK = "loss_mask"
"""Column of examples for fine-tuning: 1 for a token that is to be learned, 0 for others."""


class MdsDocuments(Dataset[FlatSourceBatch]):
    """A split as a map-style dataset. The number of a document is its position in the shards.

    Args:
        folder: holds `index.json` and the shards.
        tokenizer: makes ids of a column of texts; all ids must lie below its size.
        column: name of the column; None for the first of `COLUMNS` that the shards have.
        bytes_dtype: type of the ids in a column of bytes.
        loss_masked: read the column `loss_mask` too.

    Attributes:
        are_texts: the column holds texts, which are tokenized as they are read.
        has_loss_mask: the shards have loss masks, read or not.
        bytes_dtype: type that ids are taken to have; None unless the column is one of bytes.
        vocab_size: all ids lie below it.

    Raises:
        ConfigError: the shards differ from their index, or a column is missing or has a wrong type.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: TextTokenizer,
        column: str | None = None,
        bytes_dtype: str = "int64",
        loss_masked: bool = False,
    ) -> None:
        self._column = MdsColumn(folder, COLUMNS if column is None else (column,), bytes_dtype)
        self._folder, self._tokenizer = folder, tokenizer
        self.are_texts = self._column.dtype is None
        self.bytes_dtype = bytes_dtype if self._column.encoding == "bytes" else None
        self.vocab_size = tokenizer.vocab_size
        self.has_loss_mask = any(name == LOSS_MASK for name, *_ in read_index(folder)[0].columns)
        if loss_masked and (self.are_texts or not self.has_loss_mask):
            what = f"{self._column.name} holds texts" if self.are_texts else f"there is no column {LOSS_MASK}"
            raise ConfigError(
                f"{folder}: {what}, and objective=sft needs ids with loss masks; prepare examples by "
                f"python -m composer_packing.prepare --examples"
            )
        self._loss_mask = MdsColumn(folder, (LOSS_MASK,)) if loss_masked else None

    @property
    def fingerprint(self) -> str:
        """Hash of the index, which holds hashes of all shards, and of how ids are read; 16 hexadecimal digits."""
        digest = blake2b(repr((self._column.name, self.bytes_dtype)).encode(), digest_size=8)
        digest.update((self._folder / INDEX).read_bytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._column)

    def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Several documents at once, numbered, as the loader asks for them.

        Raises:
            ConfigError: a shard is damaged, an id is not one of the tokenizer's, a text is not UTF-8, or a loss mask
                does not fit its document.
        """
        numbers = np.asarray(indices, np.int64)
        data, sizes = self._column.gather(numbers)
        if self._column.dtype is None:
            tokens, lengths = self._tokenizer(self._texts(data.tobytes(), sizes, numbers))
        else:
            tokens, lengths = data.view(self._column.dtype), sizes // self._column.dtype.itemsize
            check_ids_of(f"{self._folder}: column {self._column.name}", tokens, self._tokenizer)
        return FlatSourceBatch(tokens, lengths, numbers, self._loss_masks(numbers, lengths))

    def _loss_masks(self, numbers: NDArray[np.int64], lengths: NDArray[np.int64]) -> LossMask | None:
        if self._loss_mask is None:
            return None
        data, sizes = self._loss_mask.gather(numbers)
        dtype = self._loss_mask.dtype
        if dtype is None:
            raise ConfigError(f"{self._folder}: {LOSS_MASK} holds texts, and must hold integers")
        counts = sizes // dtype.itemsize
        for wrong in np.flatnonzero(counts != lengths)[:1]:
            raise ConfigError(
                f"{self._folder}: {LOSS_MASK} of sample {numbers[wrong]} has {counts[wrong]} values for "
                f"{lengths[wrong]} tokens; write the shards again"
            )
        loss_mask = data.view(dtype)
        if len(loss_mask) and not (loss_mask.min() >= 0 and loss_mask.max() <= 1):
            raise ConfigError(f"{self._folder}: {LOSS_MASK} holds other values than 0 and 1; write the shards again")
        return loss_mask.astype(np.uint8)

    def _texts(self, data: bytes, sizes: NDArray[np.int64], numbers: NDArray[np.int64]) -> list[str]:
        texts, at = [], 0
        for size, number in zip(sizes.tolist(), numbers, strict=True):
            try:
                texts.append(data[at : at + size].decode())
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self._folder}: the text of sample {number} is not UTF-8 ({error.reason}); write it again"
                ) from error
            at += size
        return texts


def check_ids_of(where: str, tokens: NDArray[np.integer], tokenizer: TextTokenizer) -> None:  # type: ignore[type-arg]
    """Raise ConfigError if an id is not one of the tokenizer's.

    Args:
        where: start of the error message.
        tokens: ids, any integers.
        tokenizer: the tokenizer that should have made the ids.
    """
    if len(tokens):
        try:
            check_ids(int(tokens.min()), int(tokens.max()), tokenizer.vocab_size)
        except ValueError as error:
            raise ConfigError(
                f"{where}: {error}, as the tokenizer has {tokenizer.vocab_size} entries; give the tokenizer that made "
                f"the data, or for a column of bytes the right bytes_dtype"
            ) from error
