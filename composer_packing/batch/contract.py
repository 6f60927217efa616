"""The batch contract: the keys of a packed batch and of a microbatch.

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
longest_wait_batches    int, if known: largest wait of a document
displacement_documents  int, if known: sum over the documents
======================  ==========================================  ===========================

If the packer does not mask, `labels` is None and `attention_mask` is missing. The padding at the end of a row is one
more segment of `cu_seqlens`, but it is not a document. The counts are plain ints, so nothing has to be counted on the
device. docs/what_a_packed_batch_weighs.md says what the counts are for.

The wait of a document is the number of batches that were packed since the document was read. The displacement of a
document is the number of documents by which packing has moved it from reading order. Both should stay small: large
values mean that documents are trained on in another order than the data set's.
"""

from typing import Any

import torch

Batch = dict[str, Any]
"""A batch or a microbatch with the keys in the table of this module."""

IGNORE_INDEX = -100
"""Label of a slot without a target."""

COUNTS = ("num_tokens", "num_targets", "num_documents", "loss_weight")
"""Keys that hold one int per row."""


def with_equal_weights(batch: Batch) -> Batch:
    """Return the batch with a `loss_weight` of 1 per row, for a step in which no rank has a target.

    All losses of such a step are 0. Composer divides their sum by the sum of the weights, which must not be 0.
    """
    return batch | {"loss_weight": [1] * len(batch["input_ids"])}


def with_counts(batch: Batch) -> Batch:
    """Return the batch with `num_tokens`, `num_targets` and `num_documents`: a list of one int per row for each key.

    A batch that has these counts already is returned as it is.

    Raises:
        ValueError: the batch has no `attention_mask`, or slots without a target have another label than -100.
    """
    if "num_tokens" in batch:
        return batch
    attention_mask = batch.get("attention_mask")
    if attention_mask is None:
        raise ValueError("a batch without attention_mask cannot be counted: nothing tells padding from documents")
    labels = batch.get("labels")
    if labels is not None and (lowest := int(labels.min())) < 0 and lowest != IGNORE_INDEX:
        raise ValueError(f"labels hold {lowest}: slots without a target must hold {IGNORE_INDEX} (ignore_token_id)")
    return batch | {
        "num_tokens": attention_mask.sum(-1).tolist(),
        "num_targets": [0] * len(attention_mask) if labels is None else (labels != IGNORE_INDEX).sum(-1).tolist(),
        "num_documents": [
            len(row) - 1 - padded
            for row, padded in zip(batch["cu_seqlens"], (attention_mask[:, -1] == 0).int().tolist(), strict=True)
        ],
    }


def check_batch(batch: Batch) -> None:
    """Raise ValueError if a batch breaks the contract of this module.

    Training does not call this check. It is for tests, also for those of your own packer, loader or collate function.

    - Shapes and dtypes are those of the table.
    - `cu_seqlens` starts at 0, strictly increases and ends at the row length.
    - `max_seqlen` is the length of the longest segment.
    - `attention_mask` is 1 up to the end of the last document and 0 after it.
    - No target lies after the last document.
    """
    rows, row_len = batch["input_ids"].shape
    for key in ("input_ids", "labels", "attention_mask"):
        tensor = batch.get(key)
        if tensor is not None and (tensor.dtype != torch.int64 or tensor.shape != (rows, row_len)):
            raise ValueError(f"{key} is {tensor.dtype} {tuple(tensor.shape)}, not int64 {(rows, row_len)}")
    if not len(batch["cu_seqlens"]) == len(batch["max_seqlen"]) == rows:
        raise ValueError(
            f"{rows} rows have {len(batch['cu_seqlens'])} cu_seqlens and {len(batch['max_seqlen'])} max_seqlen"
        )
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
                f"row {row}: attention_mask has {real_tokens} ones, not {ends[1]} or {row_len} as cu_seqlens says"
            )
        if batch.get("labels") is not None and (batch["labels"][row, real_tokens:] != IGNORE_INDEX).any():
            raise ValueError(f"row {row}: a target lies after the last document, which ends at {real_tokens}")
