"""Texts and the files they lie in: which files there are, what text a record has, which texts are held out.

::

    inputs  --find_files-->  paths  --Records-->  Raw, Raw, Problem, Raw, ...  --text_of-->  text, or Problem

`Records` reads in order and looks at line ends only; what costs time is left to `text_of`, in any process.
"""

import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from composer_packing.common.errors import ConfigError

log = logging.getLogger(__name__)

STATE = "state.json"
"""The file by which a folder is known that `save_to_disk` of Hugging Face datasets wrote."""

SUFFIXES = (".txt", ".txt.gz", ".txt.zst", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", STATE)
"""How names of files that can be read end; `state.json` stands for its folder."""


def find_files(inputs: Sequence[str | Path], suffixes: Collection[str] | None = None) -> list[Path]:
    """Files, and folders that `save_to_disk` wrote, in the order of the inputs; those of a folder sorted by name.

    Folders are searched all the way down. Hidden files and folders are passed over, other files named in the log.

    Args:
        inputs: files and folders.
        suffixes: how names of files end that are wanted, `state.json` for a folder of `save_to_disk`; None for
            all of `SUFFIXES`.

    Raises:
        ConfigError: there is no input, one does not exist, is of another kind, or is given twice, or a folder
            holds nothing of what is wanted.
    """
    wanted = SUFFIXES if suffixes is None else tuple(suffixes)
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
            raise ConfigError(f"{given}: is of a kind that is not read here; give files ({kinds}) or folders of them")
        else:
            found.append(given)
    for path, times in Counter(path.resolve() for path in found).items():
        if times > 1:
            raise ConfigError(
                f"{path}: is given {times} times, and its documents would be there as often; give it once"
            )
    return found


def check_apart(train: Sequence[Path], val: Sequence[Path]) -> None:
    """Raise ConfigError where a file is in both splits."""
    for path in {path.resolve() for path in train} & {path.resolve() for path in val}:
        raise ConfigError(f"{path}: is given for training and for evaluation; leave it out of one")


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
        # os.walk does not go into linked folders, which might lead in circles.
        others += [here / name for name in folders if os.path.islink(here / name)]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                # Who opens a pipe waits for its other end.
                is_odd = (here / name).exists() and not (here / name).is_file()
                (found if name.lower().endswith(wanted) and not is_odd else others).append(here / name)
    if not found:
        raise ConfigError(f"{folder}: holds no file of the kinds {', '.join(wanted)}; give a folder that does")
    if others:
        named = ", ".join(str(path) for path in sorted(others)[:10]) + ", ..." * (len(others) > 10)
        log.warning("%s: passed over other files (%d): %s", folder, len(others), named)
    return sorted(found, key=lambda path: path.relative_to(folder).parts)
