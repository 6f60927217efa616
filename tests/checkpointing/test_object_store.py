"""Checkpoints in an object store: from which one a run resumes, and that uploads end when all processes get SIGTERM."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_packing.checkpointing.object_store import check_store, list_folder, local_copy
from composer_packing.checkpointing.run_folder import RunFolder
from composer_packing.checkpointing.saving import find_last_saved
from composer_packing.common.errors import ConfigError
from tests.tools.running import COMPOSER, SHORT, run, training
from tests.tools.runs import config_of

Put = Callable[..., None]


@pytest.fixture
def put(object_store: Any, request: pytest.FixtureRequest) -> Put:
    """A function that puts small objects with these names into the bucket `runs`, which is empty at first."""
    object_store.create_bucket(Bucket="runs")
    for stored in object_store.list_objects_v2(Bucket="runs").get("Contents", []):
        object_store.delete_object(Bucket="runs", Key=stored["Key"])

    def put(*names: str) -> None:
        for name in names:
            object_store.put_object(Bucket="runs", Key=name, Body=name.encode())

    return put


def folder_of(**more: Any) -> RunFolder:
    return RunFolder(config_of(**({"save_folder": "s3://runs/{run_name}", "run_name": "mine"} | more)))


def test_only_objects_in_the_folder_itself_are_listed(put: Put) -> None:
    assert list_folder("s3://runs/mine") == {}
    put("mine/a", "mine/b", "mine/below/c", "mine2/d", "e")
    for folder in ("s3://runs/mine", "s3://runs/mine/", "s3://runs//mine"):
        assert list_folder(folder) == {"a": "s3://runs/mine/a", "b": "s3://runs/mine/b"}
    assert list_folder("s3://runs") == list_folder("s3://runs/") == {"e": "s3://runs/e"}


def test_a_run_resumes_from_the_checkpoint_of_its_latest_batch(put: Put) -> None:
    assert folder_of().config.load_path is None
    put("mine/ep0-ba9-rank0.pt", "mine/ep1-ba10-rank0.pt", "mine/ep0-ba99-rank0.pt.part", "other/ep9-ba999-rank0.pt")
    config = folder_of(load_path="other.pt", load_weights_only=True).config
    assert (config.load_path, config.load_weights_only) == ("s3://runs/mine/ep1-ba10-rank0.pt", False)


@pytest.mark.parametrize("save_folder", ["s3://runs/{run_name}", "s3://runs/{run_name}/"])
def test_the_local_copy_of_the_last_checkpoint_is_removed_once_the_store_has_it(
    put: Put, tmp_path: Path, save_folder: str
) -> None:
    put("mine/ep0-ba9-rank0.pt")
    config, copy = folder_of(save_folder=save_folder).config, tmp_path / "ep0-ba12-rank0.pt"
    assert find_last_saved(config, [], "mine") == "s3://runs/mine/ep0-ba9-rank0.pt", "from which it started"
    copy.touch()
    with pytest.raises(ConfigError, match=rf"ba12-rank0.pt could not be uploaded, .*; its copy is {copy}, and .*ba9-r"):
        find_last_saved(config, [str(copy)], "mine")
    assert copy.exists()
    put("mine/ep0-ba12-rank0.pt")
    assert find_last_saved(config, [str(copy)], "mine") == "s3://runs/mine/ep0-ba12-rank0.pt"
    assert not copy.exists()


@pytest.mark.parametrize("changed", [{"save_overwrite": True}, {"autoresume": False}])
def test_a_run_in_a_store_is_not_overwritten(put: Put, changed: dict[str, bool]) -> None:
    assert folder_of(**changed).config.load_path is None
    put("mine/ep0-ba9-rank0.pt")
    with pytest.raises(ConfigError, match=r"there is s3://runs/mine/ep0-ba9-rank0\.pt, and nothing is overwritten in"):
        folder_of(**changed)


def test_a_checkpoint_is_fetched_and_its_copy_removed(put: Put, tmp_path: Path) -> None:
    put("mine/ep0-ba9-rank0.pt")
    with local_copy("s3://runs/mine/ep0-ba9-rank{rank}.pt") as copy:
        assert copy.read_text() == "mine/ep0-ba9-rank0.pt"
    assert not copy.parent.exists()
    with local_copy(str(tmp_path / "rank{rank}")) as file:
        assert file == tmp_path / "rank0"


def test_a_store_or_object_that_cannot_be_read_is_named_in_one_line(put: Put) -> None:
    for make in (
        lambda: check_store("s3://nowhere/mine"),
        lambda: check_store("what://runs/mine"),
        lambda: folder_of(save_folder="s3://nowhere/{run_name}"),
        lambda: folder_of(save_folder="what://runs/{run_name}"),
        lambda: folder_of(load_path="s3://runs/nothing.pt").read_checkpoint(),
        lambda: folder_of(load_path="s3://nowhere/nothing.pt").read_checkpoint(),
    ):
        with pytest.raises(
            ConfigError, match=r"^(save_folder=\w+://\w+/mine|load_path=s3://\w+/nothing.pt): "
        ) as caught:
            make()
        assert len(str(caught.value).splitlines()) == 1
    put("mine/ep0-ba9-rank0.pt")
    with pytest.raises(
        ConfigError, match=r"load_path=s3://runs/mine/ep0-ba9-rank0.pt: is cut off or damaged; remove it, or"
    ):
        folder_of().read_checkpoint()


@pytest.mark.slow
def test_one_rank_resumes_from_a_store_even_if_all_its_processes_got_sigterm(put: Put, cache: Path) -> None:
    keys = ("run_name=stored", "save_folder=s3://runs/{run_name}", "save_interval=4ba", *SHORT)
    with training(cache, *keys, "console_log_interval=1ba", ranks=1) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        sent = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        process.stderr.read()  # until no process holds it
        out = process.stdout.read()
        assert time.monotonic() - sent < 30
        assert process.wait(60) == 143
    stopped = re.search(r"stopped    by SIGTERM after batch (\d+); the same command resumes from (\S+)", out)
    assert stopped, out
    assert stopped[2] == f"s3://runs/stored/ep0-ba{stopped[1]}-rank0.pt"

    done = run(COMPOSER, "train.py", "yamls/pretrain.yaml", *keys, f"data.cache_folder={cache}")
    assert done.code == 0, done.err
    assert "1 x cpu" in done.out
    assert f"resumed    after batch {stopped[1]}, from {stopped[2]}" in done.out
    assert re.search(r"checkpoint +s3://runs/stored/ep0-ba\d+-rank0.pt", done.out)
    assert len(list_folder("s3://runs/stored")) > 2
