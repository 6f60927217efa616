"""One split written as MDS shards, and counted."""

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import MDSWriter


class _EncodedWriter(MDSWriter):
    """Takes samples that are encoded already: the library's encoding is most of what writing a sample costs."""

    def encode_sample(self, sample: Any) -> bytes:
        """The sample, unchanged."""
        return bytes(sample)


def encode_array(items: NDArray[np.unsignedinteger[Any]]) -> bytes:
    """A column's value: a one-dimensional array whose type the column states, as its length and its items."""
    extent_bytes = 1 if len(items) < 2**8 else 2 if len(items) < 2**16 else 4
    return bytes([1 << 2 | extent_bytes >> 1]) + len(items).to_bytes(extent_bytes, "little") + items.tobytes()


def encode_sample(*values: bytes) -> bytes:
    """A sample of values in the order of their columns' names: how many bytes each value has, then the values."""
    return b"".join(len(value).to_bytes(4, "little") for value in values) + b"".join(values)


class ShardWriter:
    """Writes documents in one column, `input_ids` or `text`; for examples also in a second, `loss_mask`.

    Args:
        folder: is made.
        dtype: uint16 or uint32 for ids; None for texts.
        has_loss_mask: documents are examples.
    """

    def __init__(self, folder: Path, dtype: Any | None, has_loss_mask: bool = False) -> None:
        self._is_text = dtype is None
        columns = {"text": "str"} if dtype is None else {"input_ids": f"ndarray:{np.dtype(dtype).name}"}
        if has_loss_mask:
            columns["loss_mask"] = "ndarray:uint8"
        # With hashes, the index of other data differs even if all sizes are equal.
        self._writer = _EncodedWriter(columns=columns, out=str(folder), hashes=["xxh64"])
        # One hash for each array, so that it does not matter how documents are divided into calls.
        self._hashes = [hashlib.sha256() for _ in range(2 + has_loss_mask)]
        self._documents = self._items = self._longest = 0
        self._lengths: Counter[int] = Counter()

    def write(
        self,
        data: NDArray[np.unsignedinteger[Any]],
        lengths: NDArray[np.int64],
        loss_mask: NDArray[np.uint8] | None = None,
    ) -> None:
        """Write documents.

        Args:
            data: `(items,)`, ids of the type above, or uint8 of UTF-8; all documents end to end.
            lengths: int64 `(documents,)`, at least 1 each.
            loss_mask: uint8 `(items,)` for examples, 1 for a token that is to be learned.
        """
        if not len(lengths):
            return
        arrays: tuple[NDArray[Any], ...] = (data, lengths) if loss_mask is None else (data, lengths, loss_mask)
        for digest, array in zip(self._hashes, arrays, strict=True):
            digest.update(array.tobytes())
        self._documents += len(lengths)
        self._items += len(data)
        self._longest = max(self._longest, int(lengths.max()))
        _, exponents = np.frexp(lengths - 1)
        self._lengths.update((2 ** exponents.astype(np.int64)).tolist())
        start = 0
        for end in np.cumsum(lengths).tolist():
            values = [data[start:end].tobytes() if self._is_text else encode_array(data[start:end])]
            if loss_mask is not None:
                values.append(encode_array(loss_mask[start:end]))
            self._writer.write(encode_sample(*values))
            start = end

    def finish(self) -> dict[str, Any]:
        """Write the last shard and the index, and count.

        Returns:
            documents: how many.
            tokens: of all documents; `bytes` instead for texts.
            longest: tokens or bytes of the longest document.
            lengths: how many documents have at most 1, 2, 4, 8, ... and more than the number before.
            fingerprint: of all documents and their order.
        """
        self._writer.finish()
        fingerprint = hashlib.sha256(b"".join(digest.digest() for digest in self._hashes))
        return {
            "documents": self._documents,
            "bytes" if self._is_text else "tokens": self._items,
            "longest": self._longest,
            "lengths": {str(length): count for length, count in sorted(self._lengths.items())},
            "fingerprint": fingerprint.hexdigest()[:16],
        }
