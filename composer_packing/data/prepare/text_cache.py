"""Texts of any format, copied once into MDS shards, so that training can read them in any order."""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

from composer_packing.common.errors import ConfigError
from composer_packing.common.folders import build_once
from composer_packing.config.sources import TextsConfig
from composer_packing.data.prepare.files import STATE, check_apart, find_files
from composer_packing.data.prepare.pipeline import write_shards

SUFFIXES_OF = {
    "text": (".txt", ".txt.gz", ".txt.zst"),
    "jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"),
    "parquet": (".parquet",),
    "huggingface": (STATE,),
}
"""Ends of the file names of each source. A data set of Hugging Face is a folder with this file."""

MOST_BYTES_ALONE = 2**26
"""Below this size, one process finishes before others would have started."""

FORMAT = 1
"""Part of the fingerprint. Raise it when the same files should give different shards."""


def copy_texts_once(kind: str, source: TextsConfig, cache_folder: Path) -> Path:
    """The folder with the shards of the splits `train` and `val`. The first run that needs the folder fills it.

    The folder's name holds a fingerprint of the settings, and of the path, size and time of change of every file.

    Args:
        kind: key of the source in `data`.
        source: settings of the source.
        cache_folder: holds such folders.

    Raises:
        ConfigError: a file is missing, or a record cannot be read and the source says to stop at it.
        OSError: the folder cannot be made or written.
    """
    settings = asdict(source)
    settings.pop("tokenizer")
    train = find_files(source.train, SUFFIXES_OF[kind])
    val = find_files(source.val, SUFFIXES_OF[kind]) if source.val else []
    check_apart(train, val)
    digest = hashlib.sha256(repr((FORMAT, kind, sorted(settings.items()))).encode())
    num_bytes = 0
    for path in [*train, *val]:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            try:
                found = file.stat()
            except OSError as error:
                raise ConfigError(f"{file}: {error.strerror}; make it readable, or leave it out") from error
            num_bytes += found.st_size
            digest.update(f"\n{file.absolute()} {found.st_size} {found.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    folder = cache_folder / f"texts-{digest.hexdigest()[:12]}"
    config = source.prepare_config()
    if num_bytes < MOST_BYTES_ALONE:
        config = replace(config, processes=1)

    def copy(building: Path) -> None:
        write_shards(building, train, val, config, tokenizer=None)

    build_once(folder, copy)
    return folder
