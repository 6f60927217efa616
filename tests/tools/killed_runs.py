"""Run by itself: `train.py` on two ranks, once undisturbed and once killed again and again. Prints a JSON line."""

import hashlib
import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Logger, State
from composer.utils import dist

import train
from composer_packing.common.processes import run_and_exit
from composer_packing.training import run as training_run
from composer_packing.training.monitor import PackingMonitor
from tests.tools.forked import fork_ranks, wait_for
from tests.tools.reference import RESULT
from tests.tools.written_sources import VOCAB_SIZE, write_mds, write_tokenizer

KILLS = 20
INTERVAL = 4
"""Batches between checkpoints."""

CUT_AFTER, FULL_AFTER = (5, 11, 16), 8
"""Kills after which the last checkpoint is cut off, or the next run finds the disk full."""

LARGEST_FILE = 2**17
"""Bytes that a file may have on a full disk: more than a journal, less than a checkpoint."""

YAML = """
max_duration: 150ba
max_seq_len: 64
global_train_batch_size: 16
device_train_microbatch_size: 2
run_name: {name}
save_folder: {folder}/{{run_name}}
save_interval: {interval}ba
progress_bar: false
data: {{cache_folder: {folder}/cache, mds: {{folder: {folder}/data}}}}
model:
  vocab_size: {vocab_size}
  hidden_size: 16
  intermediate_size: 16
  num_hidden_layers: 1
  num_attention_heads: 2
train_loader:
  num_workers: 1
  packing_prefetch_factor: 3
  batch_size_warmup_min_size: 8
  batch_size_warmup_tokens: 40_000tok
  masking_ratio_cooldown_start_tokens: 20_000tok
  masking_ratio_cooldown_tokens: 60_000tok
  final_masking_ratio: 0.1
eval_loader: {{mlm_probability: 0.3}}
"""


class Journal(PackingMonitor):
    """Notes each batch before it is trained on: rank, batch, epoch, and a hash of the batch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        super().batch_start(state, logger)
        digest = hashlib.sha256()
        for name in ("input_ids", "labels"):
            digest.update(state.batch[name].numpy().tobytes())
        digest.update(str([cu_seqlens.tolist() for cu_seqlens in state.batch["cu_seqlens"]]).encode())
        clock = state.timestamp
        line = f"{dist.get_global_rank()} {clock.batch.value} {clock.epoch.value} {digest.hexdigest()}\n"
        with open(os.environ["JOURNAL"], "a") as file:
            file.write(line)


def read(journal: Path) -> list[tuple[int, int, int, str]]:
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [(int(rank), int(batch), int(epoch), digest) for rank, batch, epoch, digest in map(str.split, lines)]


def write_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 1500), ("val", 40)):
        samples = [
            {"input_ids": rng.integers(5, VOCAB_SIZE, rng.integers(2, 90)).astype(np.uint16)} for _ in range(count)
        ]
        write_mds(folder / split, {"input_ids": "ndarray:uint16"}, samples, size_limit=2**16)
    write_tokenizer(folder / "tokenizer")


def start(folder: Path, name: str, disk_is_full: bool = False) -> list[int]:
    """Start two ranks of `train.py`."""

    def body(rank: int) -> int:
        os.environ["JOURNAL"] = str(folder / f"{name}.journal")
        output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if disk_is_full:  # for a file above this size
            resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        run_and_exit(train.main, [str(folder / f"{name}.yaml")], os.getppid())

    yaml = YAML.format(name=name, folder=folder, interval=INTERVAL, vocab_size=VOCAB_SIZE)
    (folder / f"{name}.yaml").write_text(yaml)
    return fork_ranks(2, body)


def disturb(pids: list[int], journal: Path, before: int, rng: random.Random) -> str:
    """Kill at a random moment: while the run starts, or some batches and milliseconds later."""
    if rng.random() < 0.15:
        time.sleep(rng.uniform(0.0, 1.5))
    else:
        lines = before + 2 * rng.randrange(1, 3 * INTERVAL)
        until = time.monotonic() + 300
        while len(read(journal)) < lines and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.06))
    how = rng.choice(["first rank", "second rank", "both", "SIGTERM"])
    for number, pid in enumerate(pids):
        if how == "SIGTERM" and number == 0:
            os.kill(pid, signal.SIGTERM)
        elif how == "both" or how == ("first rank", "second rank")[number]:
            os.kill(pid, signal.SIGKILL)
    return how


def cut_off(folder: Path) -> None:
    """Cut off the last checkpoint, unless it is the only one."""
    checkpoints = sorted(folder.glob("ep*.pt"), key=lambda path: path.stat().st_mtime)
    if len(checkpoints) > 1:
        os.truncate(checkpoints[-1], checkpoints[-1].stat().st_size - 1)


def main(folder: Path, seed: str) -> dict[str, Any]:
    vars(training_run)["PackingMonitor"] = Journal
    torch.set_num_threads(1)
    write_data(folder / "data")
    whole = wait_for(start(folder, "whole"), 500)
    if any(whole):
        raise RuntimeError((folder / "whole.out").read_text())
    journal, rng, attempts = folder / "killed.journal", random.Random(seed), list[Any]()

    def attempt(how: str | None, **more: Any) -> None:
        before = len(read(journal))
        pids = start(folder, "killed", **more)
        how = disturb(pids, journal, before, rng) if how is None else how
        # A rank whose partner was killed while both started would wait for it; Composer's launcher would end it.
        waits_for_ever = "rank" in how and len(read(journal)) == before
        codes = wait_for(pids, 5.0 if waits_for_ever else 200.0)
        attempts.append({"how": how, "codes": codes, "journal": read(journal)[before:]})

    for number in range(KILLS):
        attempt(None)
        if number in CUT_AFTER:
            cut_off(folder / "killed")
            attempts[-1]["how"] += ", cut off"
        if number == FULL_AFTER:
            attempt("disk full", disk_is_full=True)
    for _ in range(2):
        attempt("undisturbed")
    return {
        "undisturbed": read(folder / "whole.journal"),
        "attempts": attempts,
        "out": (folder / "killed.out").read_text(),
    }


if __name__ == "__main__":
    print(RESULT + json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
