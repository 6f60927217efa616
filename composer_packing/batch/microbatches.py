"""Split a packed batch into microbatches, and count its tokens, documents and targets.

Composer calls these functions on whole batches (`cu_seqlens` is a list) and on microbatches (`cu_seqlens` is a tensor).
"""

import torch

from composer_packing.batch.contract import COUNTS, IGNORE_INDEX, Batch


def split_packed_batch(
    batch: Batch,
    microbatch_size: int | float,
    padding_tolerance: float = 1.0,
    mark_dynamic: bool = True,
) -> list[Batch]:
    """Split a packed batch into microbatches of one row each.

    Args:
        batch: a batch with the keys in the table of `batch.contract`.
        microbatch_size: Composer passes this argument; it has no effect, because a row is always one microbatch.
        padding_tolerance: share of padding, 0 to 1. A row with a larger share loses its padding, and the segment of
            the padding. A row that is nothing but padding keeps it.
        mark_dynamic: tell `torch.compile` that dimension 0 of `cu_seqlens` varies.

    Returns:
        One microbatch per row, with the keys in the table of `batch.contract`.

    Raises:
        ValueError: `padding_tolerance` is negative or nan.
    """
    if not padding_tolerance >= 0:
        raise ValueError(f"{padding_tolerance=} must not be negative")
    input_ids = batch["input_ids"]
    labels = batch.get("labels")
    attention_mask = batch.get("attention_mask")
    microbatches = []
    for row in range(len(input_ids)):
        micro: Batch = {
            "input_ids": input_ids[row],
            "labels": None if labels is None else labels[row],
            "cu_seqlens": batch["cu_seqlens"][row],
            "max_seqlen": batch["max_seqlen"][row],
        }
        if attention_mask is not None:
            micro["attention_mask"] = attention_mask[row]
            _cut_padding(micro, padding_tolerance)
        if "mask_prob" in batch:
            micro["mask_prob"] = batch["mask_prob"]
        micro.update({count: batch[count][row] for count in COUNTS if count in batch})
        if mark_dynamic:
            torch._dynamo.mark_dynamic(micro["cu_seqlens"], 0)
        microbatches.append(micro)
    return microbatches


def _cut_padding(micro: Batch, padding_tolerance: float) -> None:
    """Cut off the padding of a row, in place, if the row has more padding than tolerated."""
    if padding_tolerance >= 1.0:
        return
    row_len = len(micro["input_ids"])
    real_tokens = int(micro["attention_mask"].sum())
    if real_tokens == 0 or 1 - real_tokens / row_len <= padding_tolerance:
        return
    for key in ("input_ids", "labels", "attention_mask"):
        if micro[key] is not None:
            micro[key] = micro[key][:real_tokens]
    micro["cu_seqlens"] = micro["cu_seqlens"][:-1]
    micro["max_seqlen"] = int(micro["cu_seqlens"].diff().max())


def get_num_tokens_in_packed_batch(batch: Batch) -> int:
    """Return the number of real tokens in a batch or microbatch, as a builtin int.

    Without counts and `attention_mask`, nothing tells padding from documents. Then every slot is counted.
    """
    if "num_tokens" in batch:
        return _total(batch["num_tokens"])
    attention_mask = batch.get("attention_mask")
    if attention_mask is None:
        return int(batch["input_ids"].numel())
    return int(attention_mask.sum())


def get_num_samples_in_packed_batch(batch: Batch) -> int:
    """Return the number of documents in a batch or microbatch, as a builtin int. Padding does not count.

    Without counts and `attention_mask`, nothing tells padding from documents. Then every segment is counted.
    """
    if "num_documents" in batch:
        return _total(batch["num_documents"])
    cu_seqlens = batch["cu_seqlens"]
    rows = [cu_seqlens] if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
    segments = sum(len(row) - 1 for row in rows)
    attention_mask = batch.get("attention_mask")
    if attention_mask is None:
        return segments
    return segments - int((attention_mask[..., -1] == 0).sum())


def get_num_targets_in_packed_batch(batch: Batch) -> int:
    """Return the number of targets in a batch or microbatch, as a builtin int. It is 0 without labels."""
    if "num_targets" in batch:
        return _total(batch["num_targets"])
    labels = batch.get("labels")
    return 0 if labels is None else int((labels != IGNORE_INDEX).sum())


def get_token_counts_in_packed_batch(batch: Batch) -> dict[str, int]:
    """Return Composer's two token counts: `total` moves the clock, `loss_generating` weighs a microbatch's loss.

    With `Trainer(accumulate_train_batch_on_tokens=True)` each target then has the same weight, whatever its row and
    rank.
    """
    weight = batch.get("loss_weight")
    return {
        "total": get_num_tokens_in_packed_batch(batch),
        "loss_generating": get_num_targets_in_packed_batch(batch) if weight is None else _total(weight),
    }


def _total(count: int | list[int]) -> int:
    return count if isinstance(count, int) else sum(count)
