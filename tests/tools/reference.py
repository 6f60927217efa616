"""The packer as its description reads, one document at a time, in plain Python: slow, obvious, the oracle."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from composer_packing.batch.contract import IGNORE_INDEX, check_batch

Documents = list[list[int]]

RESULT = "RESULT "
"""What the programs that run on several ranks put before the line they are run for."""


def best_fit(room: list[int], length: int) -> int | None:
    """Row with the least room that holds `length`, the lowest on a tie."""
    fitting = [(free, row) for row, free in enumerate(room) if free >= length]
    return min(fitting)[1] if fitting else None


def epoch_batches(
    source_batches: list[Documents],
    epoch: int,
    src_batch_size: int,
    out_batch_size: int,
    out_pseq_len: int,
    buffer_size: int,
    pad_token_id: int,
    mask_token_id: int,
    mask_prob: float,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Batches of one epoch as nested lists; each also tells which documents it placed."""
    source = iter(source_batches)
    waiting: Documents = []
    rng = np.random.default_rng(seed + epoch)

    def refill(limit: int) -> int:
        added = 0
        while buffer_size - len(waiting) > src_batch_size:
            if added + src_batch_size > limit:
                break
            batch = next(source, None)
            if batch is None:
                break
            documents = [document for document in batch if document]
            waiting.extend(documents)
            added += len(documents)
        return added

    while True:
        room = [out_pseq_len] * out_batch_size
        rows: list[Documents] = [[] for _ in range(out_batch_size)]
        skipped: Documents = []
        while waiting or refill(buffer_size - len(skipped)):
            document = waiting.pop(0)
            row = best_fit(room, len(document))
            if row is None:
                skipped.append(document)
            else:
                rows[row].append(document)
                room[row] -= len(document)
        for document in skipped:
            waiting.insert(0, document)
        if not all(rows):
            return
        yield finished(rows, room, rng, out_pseq_len, pad_token_id, mask_token_id, mask_prob)


def finished(
    rows: list[Documents],
    room: list[int],
    rng: np.random.Generator,
    row_len: int,
    pad: int,
    mask_token: int,
    mask_prob: float,
) -> dict[str, Any]:
    """Lay out, pad and mask."""
    ids = np.array([[*itertools.chain(*row), *[pad] * free] for row, free in zip(rows, room, strict=True)])
    real = np.array([[1] * (row_len - free) + [0] * free for free in room])
    ends = [np.cumsum([len(document) for document in row]).tolist() for row in rows]
    cu_seqlens = [[0, *end] + ([row_len] if free else []) for end, free in zip(ends, room, strict=True)]
    draw = rng.random(ids.shape)
    labels = np.where((draw < mask_prob) & (real == 1), ids, -100)
    ids = np.where(draw < 0.8 * mask_prob, mask_token, ids)
    words = rng.integers(0, ids.max() + 1, ids.shape)
    ids = np.where((draw >= 0.8 * mask_prob) & (draw < 0.9 * mask_prob), words, ids)
    return {
        "input_ids": ids.tolist(),
        "labels": labels.tolist(),
        "attention_mask": real.tolist(),
        "cu_seqlens": cu_seqlens,
        "max_seqlen": [max(np.diff(row).tolist()) for row in cu_seqlens],
        "documents": rows,
    }


def warmup_size(minimum: int, maximum: int, tokens: int, world_size: int, seen: int) -> int:
    """Batch size in force, by walking over all sizes."""
    local = math.ceil(tokens / world_size)
    if seen >= local:
        return maximum
    total = sum(range(minimum, maximum))
    for size in range(minimum, maximum):
        if math.ceil(local / total * sum(range(minimum, size + 1))) > seen:
            return size
    return maximum


def masked_documents(batches: list[dict[str, Any]]) -> list[tuple[list[int], list[int], list[int]]]:
    """Documents of packed batches, in their order: as they were, as they are seen, and their labels."""
    found = []
    for batch in batches:
        check_batch(batch)
        original = torch.where(batch["labels"] == IGNORE_INDEX, batch["input_ids"], batch["labels"])
        for row, cu_seqlens in enumerate(batch["cu_seqlens"]):
            ends = [end for end in cu_seqlens.tolist() if end <= batch["attention_mask"][row].sum()]
            for start, end in itertools.pairwise(ends):
                one, two, three = (
                    of[row, start:end].tolist() for of in (original, batch["input_ids"], batch["labels"])
                )
                found.append((one, two, three))
    return found


def originals(batches: list[dict[str, Any]]) -> Documents:
    """Documents of packed batches as they were before masking."""
    return [original for original, _, _ in masked_documents(batches)]
