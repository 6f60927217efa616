"""One split written as MDS shards, and counted."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import MDSWriter


class _EncodedWriter(MDSWriter):
    """Takes samples that are encoded already: all but a twentieth of what writing one costs goes to encoding it."""

    def encode_sample(self, sample: Any) -> bytes:
        """The sample, as it is."""
        return bytes(sample)


def encode_sample(items: NDArray[np.unsignedinteger[Any]], is_text: bool) -> bytes:
    """The only value of a sample: how many bytes it has, then UTF-8, or one dimension, its extent and ids."""
    value = items.tobytes()
    if not is_text:
        extent_bytes = 1 if len(items) < 2**8 else 2 if len(items) < 2**16 else 4
        value = bytes([1 << 2 | extent_bytes >> 1]) + len(items).to_bytes(extent_bytes, "little") + value
    return len(value).to_bytes(4, "little") + value


class ShardWriter:
    """Writes documents in one column: `input_ids` of ids, or `text`.

    Args:
        folder: is made.
        dtype: uint16 or uint32 for ids; None for texts.
    """

    def __init__(self, folder: Path, dtype: Any | None) -> None:
        self._is_text = dtype is None
        column, encoding = ("text", "str") if dtype is None else ("input_ids", f"ndarray:{np.dtype(dtype).name}")
        # Hashes, so that the index of other data is another, whatever its sizes.
        self._writer = _EncodedWriter(columns={column: encoding}, out=str(folder), hashes=["xxh64"])
        # Two of them, so that it does not matter how documents are shared out to calls.
        self._data_hash, self._lengths_hash = hashlib.sha256(), hashlib.sha256()
        self._documents = self._items = self._longest = 0
        self._lengths: Counter[int] = Counter()

    def write(self, data: NDArray[np.unsignedinteger[Any]], lengths: NDArray[np.int64]) -> None:
        """Write documents.

        Args:
            data: ids of the dtype above, or uint8 of UTF-8; all documents end to end.
            lengths: int64 `(documents,)`, at least 1 each.
        """
        if not len(lengths):
            return
        self._data_hash.update(data.tobytes())
        self._lengths_hash.update(lengths.tobytes())
        self._documents += len(lengths)
        self._items += len(data)
        self._longest = max(self._longest, int(lengths.max()))
        _, exponents = np.frexp(lengths - 1)
        self._lengths.update((2 ** exponents.astype(np.int64)).tolist())
        start = 0
        for end in np.cumsum(lengths).tolist():
            self._writer.write(encode_sample(data[start:end], self._is_text))
            start = end

    def finish(self) -> dict[str, Any]:
        """Write the last shard and the index.

        Returns:
            How many documents and tokens (of texts, bytes) there are, how many the longest has, how many documents
            have at most 1, 2, 4, 8, ... and more than the number before, and a fingerprint of data and lengths.
        """
        self._writer.finish()
        fingerprint = hashlib.sha256(self._data_hash.digest() + self._lengths_hash.digest())
        return {
            "documents": self._documents,
            "bytes" if self._is_text else "tokens": self._items,
            "longest": self._longest,
            "lengths": {str(length): count for length, count in sorted(self._lengths.items())},
            "fingerprint": fingerprint.hexdigest()[:16],
        }
