"""Checkpoints in an object store such as s3. An object in a store is always whole, or not there at all.

All access goes through Composer, which writes the checkpoints: same addresses, same credentials, same stores.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from composer.utils import get_file, maybe_create_object_store_from_uri, parse_uri, validate_credentials
from composer.utils.object_store import ObjectStore

from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError, one_line

TEST_OBJECT = ".credentials_validated_successfully"
"""Object that Composer writes at the root of a bucket to find out whether it can."""


def check_store(save_folder: str) -> None:
    """Raise ConfigError if nothing can be written to the object store of a folder."""
    try:
        validate_credentials(_store_of(save_folder), TEST_OBJECT)
    except Exception as error:  # each store raises errors of its own
        raise _cannot_use_store(save_folder, error) from error


def list_folder(folder: str) -> dict[str, str]:
    """Return the address of each object in a folder of an object store, by its name in the folder.

    Objects in folders below are left out, although the store lists them too.

    Raises:
        ConfigError: the store cannot be read.
    """
    backend, bucket, path = parse_uri(folder)
    inside = PurePosixPath(path)
    try:
        found = [PurePosixPath(name) for name in _store_of(folder).list_objects(f"{inside}/".removeprefix("./"))]
    except Exception as error:
        raise _cannot_use_store(folder, error) from error
    return {name.name: f"{backend}://{bucket}/{name}" for name in found if name.parent == inside}


@contextlib.contextmanager
def local_copy(load_path: str) -> Iterator[Path]:
    """Give the file at a path as it is, or a temporary copy of the object at an address.

    Args:
        load_path: path or address as Composer takes it: with `{rank}`, and in a store also of a `.symlink` object.

    Raises:
        ConfigError: the object cannot be copied.
    """
    path = load_path.replace("{rank}", "0")
    if not is_address(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.pt"
        try:
            get_file(path, str(copy), progress_bar=False)
        except Exception as error:
            raise ConfigError(f"load_path={load_path}: {one_line(error, None)}; give another checkpoint") from error
        yield copy


def _store_of(folder: str) -> ObjectStore:
    store = maybe_create_object_store_from_uri(folder)
    assert store is not None
    return store


def _cannot_use_store(folder: str, error: Exception) -> ConfigError:
    return ConfigError(f"save_folder={folder}: {one_line(error, None)}; check address and credentials")
