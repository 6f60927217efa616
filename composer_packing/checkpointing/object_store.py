"""Checkpoints in an object store, where an object is there as a whole or not at all."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from composer.utils import get_file, maybe_create_object_store_from_uri, parse_uri, validate_credentials

from composer_packing.common.errors import ConfigError, one_line

PROBE = ".credentials_validated_successfully"
"""What Composer writes at the root of a bucket to see whether it can."""


def is_in_store(path: str) -> bool:
    """Whether Composer takes a path for an address, as `s3://bucket/folder`."""
    return bool(parse_uri(path)[0])


def check_store(save_folder: str) -> None:
    """ConfigError where nothing can be written to the store of a folder."""
    try:
        store = maybe_create_object_store_from_uri(save_folder)
        assert store is not None
        validate_credentials(store, PROBE)
    except Exception as error:  # each store has its own
        raise ConfigError(
            f"save_folder={save_folder}: {one_line(error, None)}; check address and credentials"
        ) from error


def addresses_in(folder: str) -> dict[str, str]:
    """Addresses of the objects in a folder of a store, by their names there; all below it are listed for that.

    Raises:
        ConfigError: the store cannot be asked.
    """
    backend, bucket, path = parse_uri(folder)
    inside = PurePosixPath(path)
    try:
        store = maybe_create_object_store_from_uri(folder)
        assert store is not None
        found = [PurePosixPath(name) for name in store.list_objects(f"{inside}/".removeprefix("./"))]
    except Exception as error:
        raise ConfigError(f"save_folder={folder}: {one_line(error, None)}; check address and credentials") from error
    return {name.name: f"{backend}://{bucket}/{name}" for name in found if name.parent == inside}


@contextlib.contextmanager
def local_copy(load_path: str) -> Iterator[Path]:
    """The file at a path, or a copy of what is at an address, as long as it is needed.

    Args:
        load_path: as Composer takes it, with `{rank}`, and in a store with or without the `.symlink` of a link.

    Raises:
        ConfigError: what is in the store cannot be copied.
    """
    path = load_path.replace("{rank}", "0")
    if not is_in_store(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.pt"
        try:
            get_file(path, str(copy), progress_bar=False)
        except Exception as error:
            raise ConfigError(f"load_path={load_path}: {one_line(error, None)}; give another checkpoint") from error
        yield copy
