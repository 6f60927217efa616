"""One shard of a stream: whether it is on this machine, and how it gets there."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from streaming import Stream
from streaming.base.format import Reader

from composer_packing.common.errors import ConfigError, one_line
from composer_packing.common.folders import locked
from composer_packing.data.mds.shards import INDEX


@dataclass(frozen=True)
class StreamedShard:
    """One shard of a stream.

    Attributes:
        stream: fetches the shard.
        reader: reads the shard from `path`.
        path: of the unpacked file on this machine, which need not exist.
        column: name of the column with the documents.
        encoding: of this column: ndarray, bytes or str.
    """

    stream: Stream
    reader: Reader
    path: Path
    column: str
    encoding: str

    def is_on_this_machine(self) -> bool:
        """Whether the file exists on this machine, compressed or not."""
        files = [file for file in self.reader.file_pairs[0] if file is not None]
        return any(Path(self.reader.dirname, self.reader.split, file.basename).exists() for file in files)

    def fetch(self) -> None:
        """Download and unpack the file, unless it exists. Other processes that fetch the same shard wait.

        Raises:
            ConfigError: the shard cannot be fetched, or its length differs from what its index says.
        """
        try:
            with locked(self.path):
                self.stream.prepare_shard(self.reader)
                self.check_size()
        except ConfigError:
            raise
        except Exception as error:  # each kind of storage raises errors of its own
            where = f"{self.stream.remote or self.stream.local}/{self.stream.split}"
            name = self.reader.file_pairs[0][0].basename
            raise ConfigError(
                f"{where}/{name}: cannot be fetched ({one_line(error, 200)}); check that it exists, and run again"
            ) from error

    def check_size(self) -> None:
        """Raise ConfigError if the file exists and its length differs from what its index says."""
        expected = self.reader.file_pairs[0][0].bytes
        with contextlib.suppress(FileNotFoundError):  # another process may be making room
            if (size := self.path.stat().st_size) != expected:
                raise ConfigError(
                    f"{self.path}: has {size:,} bytes, and its index says {expected:,}; delete the file, or the "
                    f"{INDEX} next to it if the data was written again"
                )
