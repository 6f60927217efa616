"""Packed batches in the form that Composer takes: one `DataSpec` for training and one for evaluation."""

from collections.abc import Iterable

import torch
from composer import DataSpec
from torch.utils.data import DataLoader

from composer_packing.batch.contract import Batch, with_counts
from composer_packing.batch.microbatches import (
    get_num_samples_in_packed_batch,
    get_token_counts_in_packed_batch,
    split_packed_batch,
)
from composer_packing.checkpointing.packed_dataset import PackedDataset


def packed_dataspec(batches: Iterable[Batch]) -> DataSpec:
    """Wrap packed batches for Composer: each row is a microbatch; real tokens, documents and targets are counted.

    The counts are taken on the host as plain ints. Counting on the device would wait for it at every microbatch.

    Args:
        batches: gives an epoch of packed batches with `attention_mask` at every `iter()`. Checkpoints keep the position
            in the data of a `Lockstep`; wrap the `Lockstep` in a `PackedDataset` to say which settings must match when
            a run resumes. A step in which no rank has a target is an error in Composer, unless a `Lockstep` gives the
            batches.
    """
    dataset = batches if isinstance(batches, PackedDataset) else PackedDataset(batches)
    # Without a generator of its own, each iteration would draw from PyTorch's global random numbers.
    loader: DataLoader[Batch] = DataLoader(dataset, batch_size=None, generator=torch.Generator())
    return DataSpec(
        loader,
        batch_transforms=with_counts,
        split_batch=split_packed_batch,
        get_num_samples_in_batch=get_num_samples_in_packed_batch,
        get_num_tokens_in_batch=get_token_counts_in_packed_batch,
    )
