"""Documents in streams of MDS shards, which are downloaded while training.

Two parts of mosaicml-streaming are used: `Stream` fetches, checks and unpacks shards, and a reader decodes samples. Its
`StreamingDataset` is not used, for three reasons:

- It repeats documents until all ranks have equally many. Here every document comes once.
- Its workers wait for the workers of all ranks at every epoch. Ranks that pack may drift apart by an epoch, and then
  this wait may never end.
- It leaves shared memory behind after a crash, and the next run stumbles over that.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.config.sources import StreamingConfig
from composer_packing.data.mds.documents import check_ids_of
from composer_packing.data.streams.index import OpenStreams
from composer_packing.data.streams.shard import StreamedShard
from composer_packing.data.streams.shard_cache import ShardCache
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.packing.token_arrays import token_dtype

TRIES = 8
"""How often a shard is fetched to read one document, if other processes keep removing it to make room."""


class StreamRequest(NamedTuple):
    """What a worker is asked for.

    Attributes:
        numbers: int64 `(documents,)`, the documents to read.
        shards: int64 `(shards,)`, indices of the shards that hold these and the next documents, in the order in which
            they are needed.
    """

    numbers: NDArray[np.int64]
    shards: NDArray[np.int64]


class StreamedDocuments(Dataset[FlatSourceBatch]):
    """One split of all streams as a map-style dataset. Documents are numbered over the shards of all streams.

    Args:
        streams: the split.
        settings: how ids are encoded, and how much may lie on disk.
        tokenizer: says which ids are valid, and makes ids of a column of texts.

    Attributes:
        streams: the split.
        samples_per_shard: int64 `(shards,)`, documents of each shard.
        are_texts: at least one stream holds texts, which are tokenized as they are read.
        bytes_dtype: type of the ids, if all streams hold them in a column of bytes; else None.
        vocab_size: all ids lie below this number.

    Raises:
        ConfigError: the limit on disk is not a size.
    """

    def __init__(self, streams: OpenStreams, settings: StreamingConfig, tokenizer: TextTokenizer) -> None:
        self.streams = streams
        self._tokenizer, self._settings = tokenizer, settings
        self._cache = ShardCache(streams.shards, settings.cache_limit)
        self.samples_per_shard = np.array([shard.reader.samples for shard in streams.shards], np.int64)
        self._ends = np.cumsum(self.samples_per_shard)
        self.are_texts = any(shard.encoding == "str" for shard in streams.shards)
        self.bytes_dtype = settings.bytes_dtype if all(shard.encoding == "bytes" for shard in streams.shards) else None
        self.vocab_size = tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Of what the indexes list, and of how many documents an epoch takes from each stream; 16 hexadecimal digits.

        Checkpoints hold the value: a run whose data has another fingerprint does not resume.
        """
        chosen = [int(choose) for choose in self.streams.choose_per_stream]
        digest = blake2b(repr((chosen, self.bytes_dtype)).encode(), digest_size=8)
        for shard in self.streams.shards:
            file = shard.reader.file_pairs[0][0]
            digest.update(repr((file.basename, file.bytes, sorted(file.hashes.items()), shard.column)).encode())
            digest.update(str(shard.reader.samples).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, request: StreamRequest | Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Read documents. Their shards are downloaded first, if they are not on this machine.

        Args:
            request: document numbers, alone or with the shards to fetch ahead.

        Returns:
            The documents in the order of the request, with their numbers.

        Raises:
            ConfigError: a shard cannot be fetched or is damaged, or the tokenizer does not have one of the ids.
        """
        self._cache.enter_process()
        if isinstance(request, StreamRequest):
            self._cache.fetch_ahead(request.shards.tolist())
            numbers = request.numbers
        else:
            numbers = np.asarray(request, np.int64)
        shards = self.shards_of(numbers)
        indices_in_shard = numbers - (self._ends - self.samples_per_shard)[shards]
        samples = [
            self._read(self.streams.shards[shard], index)
            for shard, index in zip(shards.tolist(), indices_in_shard.tolist(), strict=True)
        ]
        are_texts = [index for index, sample in enumerate(samples) if isinstance(sample, str)]
        for index, ids in zip(are_texts, self._tokenize([samples[index] for index in are_texts]), strict=True):
            samples[index] = ids
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        tokens = np.concatenate([np.empty(0, np.int64), *samples], dtype=np.int64, casting="same_kind")
        check_ids_of("data.streaming", tokens, self._tokenizer)
        return FlatSourceBatch(tokens.astype(token_dtype(self._tokenizer.vocab_size)), lengths, numbers)

    def shards_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The index of the shard that holds each document, int64 `(documents,)`."""
        return np.searchsorted(self._ends, numbers, side="right")

    def _tokenize(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        tokens, lengths = self._tokenizer(texts)
        return np.split(tokens, np.cumsum(lengths)[:-1]) if texts else []

    def _read(self, shard: StreamedShard, index: int) -> Any:
        """Read one document: an array of its ids, or its text.

        The library's reader opens the file for each sample. So another process may remove the shard at any time, and
        this one fetches it again.
        """
        for _ in range(TRIES):
            try:
                value = shard.reader[index][shard.column]
                if shard.encoding == "bytes":
                    return np.frombuffer(value, self._settings.bytes_dtype)
                if shard.encoding == "str":
                    return value
                if value.dtype.kind not in "iu":
                    raise ValueError(f"{shard.column} has dtype {value.dtype}; it must hold integers")
                return value.reshape(-1)
            except FileNotFoundError:
                pass
            except Exception as error:  # a decoder may raise anything for damaged bytes
                raise ConfigError(
                    f"{shard.path}: sample {index} cannot be read ({one_line(error)}); copy the shard again"
                ) from error
            self._cache.fetch(shard)
        raise ConfigError(
            f"data.streaming.cache_limit={self._settings.cache_limit}: {shard.path} was removed {TRIES} times before "
            f"it was read; raise the limit"
        )
