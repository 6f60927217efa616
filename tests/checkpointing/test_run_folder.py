import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from composer import Timestamp
from composer.utils import ensure_folder_has_no_conflicting_files
from filelock import FileLock

from composer_packing.checkpointing import run_folder
from composer_packing.checkpointing.find import find_last_whole, is_whole
from composer_packing.checkpointing.run_folder import RunFolder
from composer_packing.checkpointing.saving import shorten_save_errors
from composer_packing.common.errors import ConfigError
from composer_packing.common.folders import locked
from tests.tools.runs import config_of


def saved(number: int) -> bytes:
    file = io.BytesIO()
    torch.save({"state": {"number": number, "weights": torch.arange(300)}}, file)
    return file.getvalue()


def write(folder: Path, name: str, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def test_the_last_checkpoint_is_that_of_the_latest_batch_unless_a_later_run_has_overwritten_that_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert find_last_whole(tmp_path) is None
    names = ("ep3-ba900-rank0.pt", "ep0-ba9-rank0.pt", "ep1-ba20-rank0.pt", "ep1-ba100-rank0.pt")
    old, first, second, third = (write(tmp_path, name, saved(1)) for name in names)
    write(tmp_path, "notes.pt", b"mine")
    (tmp_path / "ep9-ba999-rank0.pt").mkdir()
    (tmp_path / "ep9-ba998-rank0.pt").symlink_to("nowhere")
    for at, file in enumerate((old, first, second, third)):
        os.utime(file, (at, at))  # the first was written by a run that was overwritten
    link = tmp_path / "latest-rank0.pt"
    link.symlink_to(third.name)
    assert find_last_whole(tmp_path) == third
    link.unlink()
    link.symlink_to(second.name)
    assert find_last_whole(tmp_path) == third, "the run was killed before it changed the link"
    third.write_bytes(b"")
    assert find_last_whole(tmp_path) == second, "the run was killed before it wrote the checkpoint"
    link.unlink()
    third.write_bytes(saved(1))
    old.unlink()
    for file in (first, second, third):
        os.utime(file, (7, 7))  # as after a copy without the link
    assert find_last_whole(tmp_path) == third
    for file in (first, second, third):
        file.write_bytes(b"")
    caplog.clear()
    assert find_last_whole(tmp_path) is None
    assert "has no whole checkpoint; the run starts from the beginning" in caplog.text


def test_a_checkpoint_that_is_cut_off_or_damaged_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = saved(1)
    write(tmp_path, "ep0-ba9-rank0.pt", whole)
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba20-rank0.pt")
    hole = bytearray(whole)
    hole[len(whole) // 2 : len(whole) // 2 + 40] = bytes(40)  # a disk that lost its power may lose such a block
    lengths = (0, 1, 4, *range(100, len(whole), 101), len(whole) - 1)
    directories = [bytearray(whole) for _ in range(60)]
    rng = np.random.default_rng(0)
    for directory in directories:  # zipfile may raise any error
        at = len(whole) - int(rng.integers(22, 300))
        directory[at : at + 8] = rng.bytes(8)
    assert {is_whole(write(tmp_path, "a.pt", bytes(directory))) for directory in directories} >= {False}
    for content in [*(whole[:length] for length in lengths), bytes(hole)]:
        caplog.clear()
        damaged = write(tmp_path, "ep0-ba20-rank0.pt", content)
        assert find_last_whole(tmp_path) == tmp_path / "ep0-ba9-rank0.pt", f"{len(content)} bytes"
        assert "ep0-ba20-rank0.pt is passed over: it is cut off or damaged" in caplog.text
        assert damaged.exists(), "nothing is removed"


def test_a_flipped_bit_at_the_end_of_a_checkpoint_never_makes_the_check_itself_fail(tmp_path: Path) -> None:
    content = saved(1)
    answers = set()
    for from_end in range(1, 120):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[-from_end] ^= 1 << bit
            answers.add(is_whole(write(tmp_path, "damaged.pt", bytes(damaged))))
    assert False in answers


def test_a_checkpoint_given_as_load_path_is_checked_too(tmp_path: Path) -> None:
    load_path = write(tmp_path, "given.pt", saved(1)[:-50])
    with pytest.raises(
        ConfigError, match=r"load_path=.*given\.pt: is cut off or damaged; remove it, or give another checkpoint$"
    ):
        folder_of(tmp_path, load_path=str(load_path), run_name=None).read_checkpoint()


def folder_of(tmp_path: Path, **more: Any) -> RunFolder:
    return RunFolder(config_of(**({"save_folder": str(tmp_path / "{run_name}"), "run_name": "mine"} | more)))


def test_a_run_with_a_name_resumes_from_its_last_checkpoint_even_if_load_path_says_otherwise(tmp_path: Path) -> None:
    given = {"load_path": "other.pt", "load_weights_only": True}
    assert folder_of(tmp_path, **given).config.load_path == "other.pt"
    path = write(tmp_path / "mine", "ep0-ba9-rank0.pt", saved(1))
    config = folder_of(tmp_path, **given).config
    assert (config.load_path, config.load_weights_only) == (str(path), False)
    for changed in ({"save_overwrite": True}, {"autoresume": False}, {"run_name": None}, {"run_name": "other"}):
        config = folder_of(tmp_path, **(given | changed)).config
        assert (config.load_path, config.load_weights_only) == ("other.pt", True)


def test_two_runs_with_one_name_at_once_are_an_error_and_the_second_waits_for_the_first_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run_folder, "WAIT_SECONDS", 0.2)
    first = folder_of(tmp_path)
    with pytest.raises(
        ConfigError, match=r"mine: another run writes there; end it, or give another run_n\w+$"
    ) as caught:
        folder_of(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert "another run writes there; waiting" in caplog.text
    assert folder_of(tmp_path, run_name="other")
    del first
    folder_of(tmp_path)


def test_the_folder_of_a_killed_process_is_free_at_once(tmp_path: Path) -> None:
    script = f"""
import os, signal
from tests.checkpointing.test_run_folder import *
folder = folder_of(Path({str(tmp_path)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120)
    assert done.returncode == -signal.SIGKILL
    FileLock(tmp_path / "mine" / ".lock").acquire(timeout=0)


def test_on_a_disk_without_file_locks_a_run_warns_and_leaves_nothing_that_blocks_the_next_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """filelock's other kind of lock would do so, if this process is killed and the next one runs on another machine."""
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "Function not implemented")):
        folder_of(tmp_path)
        folder_of(tmp_path)
        with pytest.raises(OSError, match=r"the disk has no file locks: .*cache.lock"), locked(tmp_path / "cache"):
            pass
    assert caplog.text.count("mine: cannot be locked (") == 2
    with locked(tmp_path / "cache"):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(ConfigError, match=r"^save_folder=.*: File exists: .*mine; give another$"):
        folder_of(tmp_path)


def test_a_run_that_starts_from_the_beginning_does_not_overwrite_another_run(tmp_path: Path) -> None:
    write(tmp_path / "mine", "ep0-ba9-rank0.pt", saved(1))
    folder = folder_of(tmp_path, autoresume=False)
    with (
        pytest.raises(ConfigError, match=r"^save_folder=.*ep0-ba9-rank0\.pt is from a later batch; leave out autores"),
        shorten_save_errors(folder.config),
    ):
        ensure_folder_has_no_conflicting_files(str(tmp_path / "mine"), "ep{epoch}-ba{batch}-rank{rank}.pt", Timestamp())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_in_one_line_that_says_how_to_resume(tmp_path: Path, number: int) -> None:
    class Full(io.BytesIO):
        def write(self, *arguments: Any) -> int:
            raise OSError(number, os.strerror(number))

    config = folder_of(tmp_path).config
    with pytest.raises(ConfigError, match=f"{os.strerror(number)}: make room and run the same command"):  # noqa: SIM117
        with shorten_save_errors(config):
            torch.save({"weights": torch.arange(3000)}, Full())
    with pytest.raises(OSError, match="something else"), shorten_save_errors(config):
        raise OSError("something else")
    with pytest.raises(RuntimeError, match="something else"), shorten_save_errors(config):
        raise RuntimeError("something else")
