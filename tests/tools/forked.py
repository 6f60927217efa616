"""Ranks that are forked from a program which has imported everything: a start costs a second, not ten.

For programs of their own only, which have no threads yet; the launcher itself is tried in `test_train`.
"""

import functools
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composer.algorithms  # noqa: F401  the Trainer imports them when a run begins
import numpy as np
from composer.utils.collect_env import get_cpu_model

from composer_packing import find_best_fit


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@functools.cache
def load_before_forking() -> None:
    """Load once what every rank would load again: the processor's name, which takes a second, and numba's types."""
    get_cpu_model()
    find_best_fit(np.ones(1, np.int64), 1)


def fork_ranks(world_size: int, body: Callable[[int], int]) -> list[int]:
    """Start as many processes, which know of each other as the launcher's do; each ends with the code `body` gives."""
    load_before_forking()
    port, pids = free_port(), []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0"})
                os.environ.update({"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)})
                os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
                code = body(rank)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def wait_for(pids: list[int], seconds: float) -> list[int]:
    """Exit codes, negative for signals; those that have not ended by then are killed."""
    codes: dict[int, int] = {}
    until = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def on_ranks(world_size: int, function: Callable[..., Any], folder: Path, *arguments: Any, seconds: float = 120) -> Any:
    """What a function gives on each rank; RuntimeError where it fails."""

    def body(rank: int) -> int:
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(function(*arguments)))
        return 0

    codes = wait_for(fork_ranks(world_size, body), seconds)
    if any(codes):
        raise RuntimeError(f"{function.__name__} on {world_size} ranks ended with {codes}")
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world_size)]
