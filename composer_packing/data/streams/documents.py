"""Documents in streams of MDS shards, downloaded while training: `streaming.Stream` fetches, checks and unpacks them.

Only the library's streams are used, not its `StreamingDataset`, for three reasons. That one repeats documents until all
ranks have equally many; here each comes once. Its workers wait for those of all ranks at every epoch, which may be for
ever where packing lets ranks drift apart. And it leaves shared memory behind in a crash, which the next run trips
over. Here a file lock per shard is all that processes share: the system gives it back however they end.
"""

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming.base.util import bytes_to_int
from torch.utils.data import Dataset

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.config.sources import StreamingConfig
from composer_packing.data.mds.documents import check_ids_of
from composer_packing.data.streams.index import OpenStreams
from composer_packing.data.streams.shard import StreamedShard, connect
from composer_packing.data.tokenizer import TextTokenizer
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.packing.token_arrays import token_dtype

TRIES = 8
"""How often a shard is fetched that others keep removing, as too little may lie on disk."""


class Wanted(NamedTuple):
    """What a worker is to read.

    Attributes:
        numbers: int64 `(documents,)`, documents to give.
        soon: int64 `(shards,)`, shards that these and the next are in, in the order in which they are wanted.
    """

    numbers: NDArray[np.int64]
    soon: NDArray[np.int64]


class StreamedDocuments(Dataset[FlatSourceBatch]):
    """One split of all streams as a map-style dataset. The number of a document is its place in all shards.

    Args:
        streams: the split.
        settings: how ids are encoded, and what may lie on disk.
        tokenizer: bounds the ids, and makes them of a column of texts.

    Attributes:
        streams: the split.
        samples_per_shard: int64 `(shards,)`, documents of each.
        are_texts: some are tokenized as they are read.
        bytes_dtype: type that ids are taken to be of; None unless they are in columns of bytes.
        vocab_size: all ids lie below it.

    Raises:
        ConfigError: the limit is no size.
    """

    def __init__(self, streams: OpenStreams, settings: StreamingConfig, tokenizer: TextTokenizer) -> None:
        self.streams = streams
        self._tokenizer, self._settings = tokenizer, settings
        try:
            self._cache_limit = None if settings.cache_limit is None else bytes_to_int(settings.cache_limit)
        except ValueError as error:
            limit = settings.cache_limit
            raise ConfigError(f"data.streaming.cache_limit={limit}: must be a size, such as 100gb") from error
        self.samples_per_shard = np.array([shard.reader.samples for shard in streams.shards], np.int64)
        self._ends = np.cumsum(self.samples_per_shard)
        self.are_texts = any(shard.encoding == "str" for shard in streams.shards)
        self.bytes_dtype = settings.bytes_dtype if all(shard.encoding == "bytes" for shard in streams.shards) else None
        self.vocab_size = tokenizer.vocab_size
        self._process, self._parents = os.getpid(), list[Any]()
        self._fetching: ThreadPoolExecutor | None = None
        self._pending: set[int] = set()

    @property
    def fingerprint(self) -> str:
        """Of what the indexes list, and of how many documents an epoch takes of each stream; 16 hexadecimal digits."""
        chosen = [int(choose) for choose in self.streams.choose_per_stream]
        digest = blake2b(repr((chosen, self.bytes_dtype)).encode(), digest_size=8)
        for shard in self.streams.shards:
            file = shard.reader.file_pairs[0][0]
            digest.update(repr((file.basename, file.bytes, sorted(file.hashes.items()), shard.column)).encode())
            digest.update(str(shard.reader.samples).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitems__(self, wanted: Wanted | Sequence[int] | NDArray[np.int64]) -> FlatSourceBatch:
        """Several documents at once, numbered, their shards downloaded first where they are not here.

        Raises:
            ConfigError: a shard cannot be fetched or is damaged, or an id is not one of the tokenizer.
        """
        self._start_in_this_process()
        if isinstance(wanted, Wanted):
            self._fetch_ahead(wanted.soon)
            numbers = wanted.numbers
        else:
            numbers = np.asarray(wanted, np.int64)
        shards = self.shards_of(numbers)
        within = numbers - (self._ends - self.samples_per_shard)[shards]
        samples = [
            self._read(self.streams.shards[shard], at)
            for shard, at in zip(shards.tolist(), within.tolist(), strict=True)
        ]
        texts = [number for number, sample in enumerate(samples) if isinstance(sample, str)]
        for number, ids in zip(texts, self._tokenized([samples[number] for number in texts]), strict=True):
            samples[number] = ids
        lengths = np.fromiter(map(len, samples), np.int64, len(samples))
        tokens = np.concatenate([np.empty(0, np.int64), *samples], dtype=np.int64, casting="same_kind")
        check_ids_of("data.streaming", tokens, self._tokenizer)
        return FlatSourceBatch(tokens.astype(token_dtype(self._tokenizer.vocab_size)), lengths, numbers)

    def shards_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard of each document, int64 `(documents,)`."""
        return np.searchsorted(self._ends, numbers, side="right")

    def _tokenized(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        tokens, lengths = self._tokenizer(texts)
        return np.split(tokens, np.cumsum(lengths)[:-1]) if texts else []

    def _read(self, shard: StreamedShard, at: int) -> Any:
        """One document: its ids, or its text.

        The library's reader opens the file anew each time, so that a shard may be removed and come back at any time.
        """
        for _ in range(TRIES):
            try:
                value = shard.reader[at][shard.column]
                if shard.encoding == "bytes":
                    return np.frombuffer(value, self._settings.bytes_dtype)
                if shard.encoding == "str":
                    return value
                if value.dtype.kind not in "iu":
                    raise ValueError(f"{shard.column} is of {value.dtype}, and must be of integers")
                return value.reshape(-1)
            except FileNotFoundError:
                pass
            except Exception as error:  # whatever a decoder makes of damaged bytes
                raise ConfigError(
                    f"{shard.path}: sample {at} cannot be read ({one_line(error)}); copy it anew"
                ) from error
            self._fetch(shard)
        raise ConfigError(
            f"data.streaming.cache_limit={self._settings.cache_limit}: is too little; {shard.path} is gone before it "
            f"is read"
        )

    def _start_in_this_process(self) -> None:
        """After a fork, let go of what does not survive one: connections, which are the parent's, and threads."""
        if self._process != os.getpid():
            for stream in {id(shard.stream): shard.stream for shard in self.streams.shards}.values():
                self._parents.append(stream._downloader)  # not closed, not even by being forgotten
                connect(stream)
            self._process, self._fetching, self._pending = os.getpid(), None, set()

    def _fetch_ahead(self, numbers: NDArray[np.int64]) -> None:
        """Have shards downloaded on threads of this process; what fails there fails again where they are read."""
        for number in numbers.tolist():
            if number not in self._pending and not self.streams.shards[number].path.exists():
                if self._fetching is None:
                    self._fetching = ThreadPoolExecutor(2, thread_name_prefix=__name__)
                self._pending.add(number)
                self._fetching.submit(self._fetch_pending, number)

    def _fetch_pending(self, number: int) -> None:
        try:
            self._fetch(self.streams.shards[number])
        finally:
            self._pending.discard(number)

    def _fetch(self, shard: StreamedShard) -> None:
        shard.fetch()
        if self._cache_limit is not None:
            self._make_room(shard.path)

    def _make_room(self, keep: Path) -> None:
        """Remove the shards that were fetched longest ago, until what is left is within the limit."""
        assert self._cache_limit is not None
        fetched = []
        for shard in self.streams.shards:
            with contextlib.suppress(FileNotFoundError):
                if shard.stream.remote is not None:
                    found = shard.path.stat()
                    fetched.append((found.st_mtime_ns, found.st_size, shard.path))
        total = sum(size for _, size, _ in fetched)
        for _, size, path in sorted(fetched):
            if total > self._cache_limit and path != keep:
                path.unlink(missing_ok=True)
                total -= size
