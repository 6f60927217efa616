"""Programs run as child processes, with a time limit, as a user runs them."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.tools import ROOT
from tests.tools.reference import RESULT

COMPOSER = str(Path(sys.executable).parent / "composer")
SHORT = ["max_duration=60_000tok", "scheduler.t_warmup=5ba", "scheduler.t_decay=0.3dur", "progress_bar=false"]


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run(*command: str, seconds: int = 1000) -> Done:
    """Run a command in the repository; if it takes too long, end it with all its children and fail.

    One thread for each rank: more of them crawl where another process wants the cores.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Done(process.returncode, out, err)


def result_of(*command: str) -> Any:
    """What a program prints as JSON behind `RESULT`, in a line of its own; it must end well."""
    done = run(*command)
    assert done.code == 0, done.out + done.err
    (line,) = (line for line in done.out.splitlines() if line.startswith(RESULT))
    return json.loads(line.removeprefix(RESULT))


@contextlib.contextmanager
def training(cache: Path, *keys: str, ranks: int = 2) -> Iterator["subprocess.Popen[str]"]:
    """A launcher with its ranks and their workers, which have begun to train."""
    command = [COMPOSER, "-n", str(ranks), "train.py", "yamls/pretrain.yaml"]
    command += [
        "progress_bar=false",
        "log_to_console=true",
        "train_loader.num_workers=1",
        f"data.cache_folder={cache}",
        f"save_folder={cache}/{{run_name}}",
        *keys,
    ]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        try:
            assert any("Train packing/rows" in line for line in process.stderr), "it has begun to train"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def is_alive(group: int) -> bool:
    """Whether a process of a group is left; dead ones that nobody has asked for do not count."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, its_group, *_ = file.read_text().rpartition(")")[2].split()
            if int(its_group) == group and state != "Z":
                return True
    return False


def figure(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, f"no {pattern!r} in:\n{text}"
    return [float(number.replace(",", "")) for number in found.groups()]
