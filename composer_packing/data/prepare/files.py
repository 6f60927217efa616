"""Finding the files with texts or examples, and how a file becomes texts.

::

    inputs  --find_files-->  paths  --Records-->  Raw, Raw, Problem, Raw, ...  --text_of-->  text, or Problem

`Records` reads in order and looks for line ends only. The expensive work is left to `text_of`, in any process.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from composer_packing.common.errors import ConfigError

log = logging.getLogger(__name__)

STATE = "state.json"
"""A folder with this file was written by `save_to_disk` of Hugging Face datasets."""

EXAMPLE_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", STATE)
"""Ends of the names of files that may hold examples for fine-tuning. `state.json` stands for its folder."""

SUFFIXES = (".txt", ".txt.gz", ".txt.zst", *EXAMPLE_SUFFIXES)
"""Ends of the names of files that may hold texts."""


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files, and folders that `save_to_disk` wrote, in the order of the inputs. Files in a folder are sorted by name.

    Folders are searched with all folders in them. Hidden files and folders are passed over. The log names other files.

    Args:
        inputs: files and folders.
        suffixes: ends of the names of wanted files; `state.json` for a folder of `save_to_disk`.

    Raises:
        ConfigError: there is no input, an input does not exist, is of another kind or is given twice, or a folder
            holds no wanted file.
    """
    wanted = tuple(suffixes)
    kinds = ", ".join(wanted).replace(STATE, f"folders with {STATE}, as save_to_disk writes them")
    if not inputs:
        raise ConfigError(f"there is no input; give files ({kinds}) or folders of them")
    found: list[Path] = []
    for given in map(Path, inputs):
        if given.is_dir():
            found.extend(_in_folder(given, wanted))
        elif not given.exists():
            raise ConfigError(f"{given}: does not exist; give files ({kinds}) or folders of them")
        elif not given.is_file() or not given.name.lower().endswith(wanted) or given.name == STATE:
            raise ConfigError(f"{given}: is of another kind; give files ({kinds}) or folders of them")
        else:
            found.append(given)
    for path, times in Counter(path.resolve() for path in found).items():
        if times > 1:
            raise ConfigError(f"{path}: is given {times} times, and its documents would come as often; give it once")
    return found


def check_apart(train: Sequence[Path], val: Sequence[Path]) -> None:
    """Raise ConfigError if a file is in both splits."""
    for path in {path.resolve() for path in train} & {path.resolve() for path in val}:
        raise ConfigError(f"{path}: is given for training and for evaluation; remove it from one of them")


def _in_folder(folder: Path, wanted: tuple[str, ...]) -> list[Path]:
    def unreadable(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: {error.strerror}; make it readable") from error

    found, others = [], []
    for parent, folders, names in os.walk(folder, onerror=unreadable):
        here = Path(parent)
        if STATE in wanted and STATE in names:
            found.append(here)
            folders.clear()
            continue
        if STATE in wanted and "dataset_dict.json" in names:
            splits = ", ".join(str(here / name) for name in sorted(folders))
            raise ConfigError(f"{here}: holds several splits of a data set; give the folder of one: {splits}")
        # os.walk does not follow links to folders, which might lead in circles.
        others += [here / name for name in folders if os.path.islink(here / name)]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                # Opening a pipe would wait for a process at its other end.
                is_odd = (here / name).exists() and not (here / name).is_file()
                (found if name.lower().endswith(wanted) and not is_odd else others).append(here / name)
    if not found:
        raise ConfigError(f"{folder}: holds no {', '.join(wanted)}; give a folder that does")
    if others:
        named = ", ".join(str(path) for path in sorted(others)[:10]) + ", ..." * (len(others) > 10)
        log.warning("%s: passed over other files (%d): %s", folder, len(others), named)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
