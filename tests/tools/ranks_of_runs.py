"""Run by itself: `train.py` again and again, each time on ranks forked from this program. Prints a JSON line.

Its arguments are an empty folder and a JSON list of runs, each `[number of ranks, arguments of train.py]`. A run starts
in a second this way; the launcher takes ten.
"""

import json
import os
import sys
from pathlib import Path

import torch

import train
from composer_packing.common.processes import run_and_exit
from tests.tools.forked import fork_ranks, wait_for
from tests.tools.reference import RESULT


def code_and_output(world_size: int, arguments: list[str], folder: Path) -> tuple[int, str, str]:
    """Exit code, 0 if that of every rank is 0; the output of the first rank; the errors of all ranks."""
    folder.mkdir()
    out, err = folder / "out", folder / "err"

    def body(rank: int) -> int:
        for descriptor, path in ((1, out if rank == 0 else Path(os.devnull)), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        run_and_exit(train.main, arguments, os.getppid())

    codes = wait_for(fork_ranks(world_size, body), 600)
    return max(codes, key=abs), out.read_text(), err.read_text()


def main(folder: Path, runs: list[tuple[int, list[str]]]) -> list[tuple[int, str, str]]:
    torch.set_num_threads(1)
    return [code_and_output(*run, folder / str(number)) for number, run in enumerate(runs)]


if __name__ == "__main__":
    print(RESULT + json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
