"""Packed batches as Composer takes them: a `DataSpec` for training and one for evaluation."""

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
    """A `DataSpec` that splits batches into rows and counts real tokens, documents and targets.

    The device only ever sees counts that were taken on the host, as plain ints.

    Args:
        batches: gives packed batches with `attention_mask`, an epoch of them at every `iter()`. A step in which no
            rank has a target is an error in Composer, unless a `Lockstep` gives the batches. Checkpoints keep the
            place of a `Lockstep`; a `PackedDataset` around it says when another run may go on from there.
    """
    dataset = batches if isinstance(batches, PackedDataset) else PackedDataset(batches)
    # With a generator of its own, or to iterate would change PyTorch's global random numbers.
    loader: DataLoader[Batch] = DataLoader(dataset, batch_size=None, generator=torch.Generator())
    return DataSpec(
        loader,
        batch_transforms=with_counts,
        split_batch=split_packed_batch,
        get_num_samples_in_batch=get_num_samples_in_packed_batch,
        get_num_tokens_in_batch=get_token_counts_in_packed_batch,
    )
