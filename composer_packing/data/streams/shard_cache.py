"""The shards of a split on this machine: fetched when they are needed or before, removed when they take too much room.

A run's ranks and worker processes share the folder. A file lock for each shard is all they share. The system releases
it however a process ends, so that a crash leaves nothing behind that the next run would wait for.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from streaming.base.util import bytes_to_int

from composer_packing.common.errors import ConfigError
from composer_packing.data.streams.download import Downloader, connect, downloader_of
from composer_packing.data.streams.shard import StreamedShard

THREADS = 2
"""Threads of a process that fetch shards ahead."""


class ShardCache:
    """Fetches shards, and keeps those that were downloaded within a limit.

    Args:
        shards: all shards of the split.
        limit: what may lie on disk at a time, such as 100gb; None for no limit.

    Raises:
        ConfigError: the limit is not a size.
    """

    def __init__(self, shards: Sequence[StreamedShard], limit: str | None) -> None:
        try:
            self._limit_bytes = None if limit is None else bytes_to_int(limit)
        except ValueError as error:
            raise ConfigError(f"data.streaming.cache_limit={limit}: must be a size, such as 100gb") from error
        self._shards = shards
        self._process = os.getpid()
        self._of_parents: list[Downloader] = []
        self._threads: ThreadPoolExecutor | None = None
        self._being_fetched: set[int] = set()

    def enter_process(self) -> None:
        """Call this before the others in each process: it drops what cannot be used after a fork.

        The parent's connections must not be used, nor closed: its threads do not exist here. The list keeps the
        connections, as Python would close them when they are no longer referenced.
        """
        if self._process != os.getpid():
            for stream in {id(shard.stream): shard.stream for shard in self._shards}.values():
                self._of_parents.append(downloader_of(stream))
                connect(stream)
            self._process, self._threads, self._being_fetched = os.getpid(), None, set()

    def fetch(self, shard: StreamedShard) -> None:
        """Fetch a shard unless it is on this machine, and then keep the limit.

        Raises:
            ConfigError: the shard cannot be fetched, or its length differs from what its index says.
        """
        shard.fetch()
        if self._limit_bytes is not None:
            self._make_room(self._limit_bytes, shard.path)

    def fetch_ahead(self, indices: Iterable[int]) -> None:
        """Have shards fetched on threads. An error is dropped: it comes again when the shard is read.

        Args:
            indices: of the shards, the first to be fetched first.
        """
        for index in indices:
            if index not in self._being_fetched and not self._shards[index].path.exists():
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=__name__)
                self._being_fetched.add(index)
                self._threads.submit(self._fetch_on_thread, index)

    def _fetch_on_thread(self, index: int) -> None:
        try:
            self.fetch(self._shards[index])
        finally:
            self._being_fetched.discard(index)

    def _make_room(self, limit_bytes: int, keep: Path) -> None:
        """Remove downloaded shards, the one fetched longest ago first, until the rest is within the limit."""
        found = []
        for shard in self._shards:
            with contextlib.suppress(FileNotFoundError):
                if shard.stream.remote is not None:
                    status = shard.path.stat()
                    found.append((status.st_mtime_ns, status.st_size, shard.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total > limit_bytes and path != keep:
                path.unlink(missing_ok=True)
                total -= size
