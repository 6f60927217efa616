"""One shard of a stream: whether it is on this machine, and how it is fetched."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from streaming import Stream
from streaming.base.format import Reader
from streaming.base.storage.download import CloudDownloader

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.common.folders import locked
from composer_packing.data.mds.shards import INDEX


class _WholeFiles:
    """Downloads as another does, but so that a file is there whole or not at all, which not all of those see to."""

    def __init__(self, downloader: CloudDownloader) -> None:
        self._downloader = downloader

    def download(self, remote: str | None, local: str, timeout: float) -> None:
        """Download a file, unless it is here already."""
        if not os.path.exists(local):
            part = f"{local}.part"
            Path(part).unlink(missing_ok=True)
            self._downloader.download(remote, part, timeout)
            os.replace(part, local)

    def clean_up(self) -> None:
        """Close what is open to the storage."""
        self._downloader.clean_up()


@dataclass(frozen=True)
class StreamedShard:
    """One shard of a stream.

    Attributes:
        stream: which fetches it.
        reader: which reads it once it is here.
        path: where it is then.
        column: name of the column with the documents.
        encoding: of that column: ndarray, bytes or str.
    """

    stream: Stream
    reader: Reader
    path: Path
    column: str
    encoding: str

    def is_here(self) -> bool:
        """Whether the file is here, be it compressed."""
        files = [file for file in self.reader.file_pairs[0] if file is not None]
        return any(Path(self.reader.dirname, self.reader.split, file.basename).exists() for file in files)

    def fetch(self) -> None:
        """Download and unpack the file, if it is not here, while no other process does.

        Raises:
            ConfigError: it cannot be fetched, or is not as long as its index says.
        """
        try:
            with locked(self.path):
                self.stream.prepare_shard(self.reader)
                self.check_size()
        except ConfigError:
            raise
        except Exception as error:  # each kind of storage has its own
            where = f"{self.stream.remote or self.stream.local}/{self.stream.split}"
            name = self.reader.file_pairs[0][0].basename
            raise ConfigError(
                f"{where}/{name}: cannot be fetched ({one_line(error, 200)}); see that it is there, and run again"
            ) from error

    def check_size(self) -> None:
        """Raise ConfigError where the file is here and not as long as its index says."""
        says = self.reader.file_pairs[0][0].bytes
        with contextlib.suppress(FileNotFoundError):  # another process may just make room
            if (size := self.path.stat().st_size) != says:
                raise ConfigError(
                    f"{self.path}: has {size:,} bytes, and its index says {says:,}; delete it, or the {INDEX} beside "
                    f"it if the data was written anew"
                )


def connect(stream: Stream) -> None:
    """Give a stream a connection of this process's own."""
    stream._downloader = _WholeFiles(CloudDownloader.get(stream.remote))
