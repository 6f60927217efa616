"""The batch contract: what a packed batch holds, how it is split into microbatches and counted.

======================  ==========================================  ===========================
key                     batch of one rank                           microbatch (one row)
======================  ==========================================  ===========================
input_ids, labels       int64 `(rows, row_len)`                     int64 `(row_len,)`
attention_mask          int64 `(rows, row_len)`, 1 = real token     int64 `(row_len,)`
cu_seqlens              list of int32 `(segments + 1,)`             int32 `(segments + 1,)`
max_seqlen              list of int                                 int
mask_prob               float32 scalar, if the ratio is scheduled   same
num_tokens              list of int, if counted: real tokens        int
num_targets             list of int, if counted: targets            int
num_documents           list of int, if counted: documents          int
loss_weight             list of int, in a step without targets: 1   int
longest_wait_batches    int, if known: of its documents
displacement_documents  int, if known: sum over its documents
======================  ==========================================  ===========================

Without masking `labels` is None and `attention_mask` is missing. The padding at the end of a row is one
more segment of `cu_seqlens`, never a document. The counts are plain ints, so that nothing has to be
counted on the device; docs/what_a_packed_batch_weighs.md says what they are for. A document has waited for the
batches that were packed since it was read, and its displacement is how many places it has moved from reading order:
large figures would be a curriculum that nobody asked for.
"""

from typing import Any

import torch

Batch = dict[str, Any]
"""A batch or microbatch, as the table of this module says."""

IGNORE_INDEX = -100
"""Label of a slot that is no target."""

COUNTS = ("num_tokens", "num_targets", "num_documents", "loss_weight")


def with_equal_weights(batch: Batch) -> Batch:
    """The batch of a step in which no rank has a target: its losses are 0, and Composer divides by their weights."""
    return batch | {"loss_weight": [1] * len(batch["input_ids"])}


def with_counts(batch: Batch) -> Batch:
    """The batch with `num_tokens`, `num_targets` and `num_documents` per row, where it does not have them yet.

    Raises:
        ValueError: there is no `attention_mask`, or labels mark what is no target by another number than -100.
    """
    if "num_tokens" in batch:
        return batch
    attention_mask = batch.get("attention_mask")
    if attention_mask is None:
        raise ValueError("a batch without attention_mask cannot be counted: nothing tells padding from documents")
    labels = batch.get("labels")
    if labels is not None and (lowest := int(labels.min())) < 0 and lowest != IGNORE_INDEX:
        raise ValueError(f"labels hold {lowest}: what is no target must be {IGNORE_INDEX} (ignore_token_id)")
    return batch | {
        "num_tokens": attention_mask.sum(-1).tolist(),
        "num_targets": [0] * len(attention_mask) if labels is None else (labels != IGNORE_INDEX).sum(-1).tolist(),
        "num_documents": [
            len(row) - 1 - padded
            for row, padded in zip(batch["cu_seqlens"], (attention_mask[:, -1] == 0).int().tolist(), strict=True)
        ],
    }


def check_batch(batch: Batch) -> None:
    """Raise ValueError where a batch breaks the contract of this module.

    Shapes and dtypes are the table's; `cu_seqlens` starts at 0, strictly increases and ends at the row length;
    `max_seqlen` is the longest segment; `attention_mask` is 1 up to the end of the last document and 0 behind
    it; no target lies behind it.
    """
    rows, row_len = batch["input_ids"].shape
    for key in ("input_ids", "labels", "attention_mask"):
        tensor = batch.get(key)
        if tensor is not None and (tensor.dtype != torch.int64 or tensor.shape != (rows, row_len)):
            raise ValueError(f"{key} is {tensor.dtype} {tuple(tensor.shape)}, not int64 {(rows, row_len)}")
    if not len(batch["cu_seqlens"]) == len(batch["max_seqlen"]) == rows:
        raise ValueError(f"{len(batch['cu_seqlens'])} cu_seqlens, {len(batch['max_seqlen'])} max_seqlen, {rows} rows")
    for row in range(rows):
        cu_seqlens = batch["cu_seqlens"][row]
        lengths = cu_seqlens.diff()
        if cu_seqlens.dtype != torch.int32:
            raise ValueError(f"row {row}: cu_seqlens is {cu_seqlens.dtype}, not int32")
        if cu_seqlens[0] != 0 or cu_seqlens[-1] != row_len or (lengths <= 0).any():
            raise ValueError(f"row {row}: {cu_seqlens.tolist()=} must rise from 0 to {row_len=}")
        if batch["max_seqlen"][row] != int(lengths.max()):
            raise ValueError(
                f"row {row}: max_seqlen={batch['max_seqlen'][row]} is not the longest of {lengths.tolist()}"
            )
        if batch.get("attention_mask") is None:
            continue
        attention_mask = batch["attention_mask"][row]
        real_tokens = int(attention_mask.sum())
        ends = (row_len, int(cu_seqlens[-2]))
        if real_tokens not in ends or not attention_mask[:real_tokens].all():
            raise ValueError(
                f"row {row}: attention_mask has {real_tokens} ones, cu_seqlens ends at {ends[1]} or {row_len}"
            )
        if batch.get("labels") is not None and (batch["labels"][row, real_tokens:] != IGNORE_INDEX).any():
            raise ValueError(f"row {row}: a target lies behind the last document, at {real_tokens} or later")
