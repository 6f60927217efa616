"""Run by itself: which batches ranks get from an old checkpoint and from old settings. Prints a JSON line.

`tests/golden/before_rooms` was written by the last commit before the package was divided into rooms:
`checkpoint.pt.xz` by `train.py` on two ranks after twelve batches, `fed.json` by two ranks and by one rank that resumed
from there, `batches.json` by `train_batches` over the sources below.
"""

import hashlib
import json
import lzma
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.utils import dist

import train
from composer_packing.batch.contract import Batch
from composer_packing.common.processes import run_and_exit
from composer_packing.config.loading import load_config
from composer_packing.data.open_source import open_source
from composer_packing.training import run as training_run
from composer_packing.training.batches import train_batches
from tests.tools import ROOT
from tests.tools.array_documents import DocumentDataset
from tests.tools.forked import fork_ranks, on_ranks, wait_for
from tests.tools.killed_runs import YAML, Journal, read
from tests.tools.reference import RESULT
from tests.tools.written_sources import VOCAB_SIZE, write_mds, write_tokenizer

RECORDED = ROOT / "tests" / "golden" / "before_rooms"
COUNT = 50
"""Number of batches of each kind."""


def write_data(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 300), ("val", 40)):
        samples = [
            {"input_ids": rng.integers(5, VOCAB_SIZE, rng.integers(2, 90)).astype(np.uint16)} for _ in range(count)
        ]
        write_mds(folder / split, {"input_ids": "ndarray:uint16"}, samples, size_limit=2**16, hashes=["xxh64"])
    write_tokenizer(folder / "tokenizer")


def fed_after_the_checkpoint(folder: Path, world_size: int) -> list[str]:
    """Rank, batch, epoch and hash of each batch that comes after those of the checkpoint."""
    name = f"on{world_size}"

    def body(rank: int) -> int:
        os.environ["JOURNAL"] = str(folder / f"{name}.journal")
        output = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        load_path = f"load_path={folder / 'checkpoint.pt'}"
        run_and_exit(
            train.main, [str(folder / "run.yaml"), "max_duration=20ba", load_path, f"run_name={name}"], os.getppid()
        )

    if any(wait_for(fork_ranks(world_size, body), 500)):
        raise RuntimeError((folder / f"{name}.out").read_text())
    return [
        f"rank {rank} batch {batch} epoch {epoch} {digest[:8]}"
        for rank, batch, epoch, digest in sorted(read(folder / f"{name}.journal"))
    ]


def hash_of(batch: Batch) -> str:
    digest = hashlib.sha256()
    for name in ("input_ids", "labels", "attention_mask"):
        digest.update(batch[name].numpy().tobytes())
    digest.update(repr([cu_seqlens.tolist() for cu_seqlens in batch["cu_seqlens"]]).encode())
    counts = [batch[key] for key in ("max_seqlen", "num_tokens", "num_targets", "num_documents")]
    digest.update(repr(counts).encode())
    return digest.hexdigest()[:8]


def examples() -> DocumentDataset:
    """Numbers as examples of fine-tuning, the last token of each among those to learn."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, 60, 500)
    tokens = rng.integers(5, VOCAB_SIZE, lengths.sum()).astype(np.uint16)
    offsets = np.cumsum([0, *lengths])
    loss_mask = rng.integers(0, 2, lengths.sum()).astype(np.uint8)
    loss_mask[offsets[1:] - 1] = 1
    return DocumentDataset(tokens, offsets, 64, loss_mask)


def fed(path: str, objective: str, strategy: str, world_size: int) -> str:
    """Hashes of the first batches of this rank."""
    if world_size > 1:
        dist.initialize_dist("cpu")
    masking = ("masking_ratio_cooldown_start_tokens", "masking_ratio_cooldown_tokens", "final_masking_ratio")
    overrides = [f"train_loader.packing_strategy={strategy}", "train_loader.num_workers=0"]
    if objective != "mlm":
        overrides += ["objective=causal", "model.causal=true", "eval_loader.mlm_probability=0.15"]
        overrides += [f"train_loader.{key}=null" for key in masking]
    config = load_config(path, overrides, world_size)
    config.objective = objective
    source = open_source(load_config(path, [], 1))
    documents = examples() if objective == "sft" else source.train.documents
    batches = train_batches(documents, config, source.tokenizer.vocabulary)
    # When these batches were recorded, the schedules of a rank followed its own counts, not the mean of all ranks.
    vars(batches._epochs.source)["follow"] = lambda counts: None
    found: list[str] = []
    while len(found) < COUNT:
        for batch in batches:
            found.append(hash_of(batch))
            if len(found) == COUNT:
                break
    batches.close()
    return " ".join(found)


def main(folder: Path) -> dict[str, Any]:
    vars(training_run)["PackingMonitor"] = Journal
    torch.set_num_threads(1)
    write_data(folder / "data")
    yaml = YAML.format(name="run", folder=folder, interval=12, vocab_size=VOCAB_SIZE)
    (folder / "run.yaml").write_text(yaml)
    (folder / "checkpoint.pt").write_bytes(lzma.decompress((RECORDED / "checkpoint.pt.xz").read_bytes()))
    found: dict[str, Any] = {
        "fed": {"2 ranks": fed_after_the_checkpoint(folder, 2), "1 rank": fed_after_the_checkpoint(folder, 1)},
        "batches": {},
    }
    for objective in ("mlm", "causal", "sft"):
        for strategy in ("subset_sum", "best_fit"):
            for world_size in (1, 2):
                hashes = on_ranks(world_size, fed, folder, str(folder / "run.yaml"), objective, strategy, world_size)
                for rank, of_rank in enumerate(hashes):
                    found["batches"][f"{objective}, {strategy}, rank {rank} of {world_size}"] = of_rank
    return found


if __name__ == "__main__":
    print(RESULT + json.dumps(main(Path(sys.argv[1]))))
