"""What the benchmarks compare with is what they say it is."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from composer_packing import GreedyBestFitSequencePacker
from tests.tools.packers import new_packer

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_batches(size: int) -> list[list[dict[str, Any]]]:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 40, 30 * size)
    documents = [{"input_ids": rng.integers(5, 300, length)} for length in lengths]
    return [documents[at : at + size] for at in range(0, len(documents), size)]


@pytest.mark.parametrize("as_lists", [False, True])
def test_the_plain_baseline_gives_the_same_batches_to_the_bit(as_lists: bool) -> None:
    benchmark = loaded("packing")
    size, rows, row_len, buffer_size, seed = 8, 3, 64, 32, 42
    batches = source_batches(size)
    if as_lists:
        batches = [[{"input_ids": document["input_ids"].tolist()} for document in batch] for batch in batches]
    packer = new_packer(
        GreedyBestFitSequencePacker,
        batches,
        size,
        rows,
        row_len,
        buffer_size,
        pad_token_id=benchmark.PAD,
        mask_token_id=benchmark.MASK,
        ignore_token_id=benchmark.IGNORE,
        mask_prob=benchmark.MASK_PROB,
        seed=seed,
    )
    ours = list(packer)
    plain = list(benchmark.plain_batches(batches, size, rows, row_len, buffer_size, seed))
    assert len(ours) == len(plain) > 20
    for our_batch, plain_batch in zip(ours, plain, strict=True):
        assert set(our_batch) == set(plain_batch)
        for name in ("input_ids", "labels", "attention_mask"):
            assert our_batch[name].numpy().dtype == plain_batch[name].dtype
            np.testing.assert_array_equal(our_batch[name].numpy(), plain_batch[name])
        assert our_batch["max_seqlen"] == plain_batch["max_seqlen"]
        for our_ends, plain_ends in zip(our_batch["cu_seqlens"], plain_batch["cu_seqlens"], strict=True):
            assert our_ends.numpy().dtype == plain_ends.dtype
            np.testing.assert_array_equal(our_ends.numpy(), plain_ends)


def test_the_plain_baseline_masks_and_leaves_documents_waiting() -> None:
    """The comparison above would say little where there is nothing to hide and nothing to put off."""
    benchmark = loaded("packing")
    batches = source_batches(8)
    plain = list(benchmark.plain_batches(batches, 8, 3, 64, 32))
    assert any((batch["input_ids"] == benchmark.MASK).any() for batch in plain)
    assert any((batch["labels"] != benchmark.IGNORE).any() for batch in plain)
    assert any(not batch["attention_mask"].all() for batch in plain)
