"""Sequence packing for pretraining language encoders under MosaicML Composer.

Documents of any length are laid end to end in rows, so that nearly every slot of a batch holds a token.
Four padded sequences, and the same documents packed::

    aaaaaaa.........        aaaaaaaddddddddd
    bbbbbbbbbbbbbb..        bbbbbbbbbbbbbbcc
    cc..............
    ddddddddd.......

The package has eight rooms. In the order in which data passes through them:

=============  =======================================================================================
room           what happens there
=============  =======================================================================================
config         the YAML file of a run is read and checked
data           texts, chats, MDS shards or streams are read, and each rank gets its documents as token ids
packing        documents are split if too long and laid into rows; masks are drawn and labels made
batch          batches are packed ahead on a thread, kept in step on all ranks, and split into microbatches
model          ModernBERT and its attention map one packed row to logits and a loss
training       the parts are built and Composer trains; learning rate, metrics, evaluation, console
checkpointing  checkpoints are found, checked and resumed from; SIGTERM ends a run with a checkpoint
common         what all rooms use: errors, durations, saved state, file locks, processes
=============  =======================================================================================

`GreedyBestFitSequencePacker` and `SubsetSumSequencePacker` pack and mask. `BufferedIterable` runs a packer on a
background thread, and `Lockstep` lets the epochs of several ranks end together. `split_packed_batch` and the counting
functions tell Composer what a batch holds. `pack_sequences` packs the samples of a fine-tuning set all at once.
"""

from composer_packing.batch.background import BufferedIterable
from composer_packing.batch.lockstep import Lockstep
from composer_packing.batch.microbatches import (
    get_num_samples_in_packed_batch,
    get_num_tokens_in_packed_batch,
    split_packed_batch,
)
from composer_packing.packing.best_fit import GreedyBestFitSequencePacker, find_best_fit
from composer_packing.packing.blocks import PackedBlocks, pack_blocks, pack_sequences
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.labels.published_mlm import mlm_masking
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.schedules import (
    BatchSizeWarmup,
    BatchSizeWarmupScheduler,
    MaskingRatioCooldownScheduler,
    MaskingSchedule,
    MaskRatioCooldown,
)
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.settings import BatchShape, DocumentPolicies, LabelSettings, ScheduleSettings
from composer_packing.packing.source_batch import FlatSourceBatch, flat_source_batch
from composer_packing.packing.subset_sum import SubsetSumSequencePacker
from composer_packing.packing.token_account import TokenAccount

__all__ = [
    "BatchShape",
    "BatchSizeWarmup",
    "BatchSizeWarmupScheduler",
    "BufferedIterable",
    "DocumentPolicies",
    "FlatSourceBatch",
    "GreedyBestFitSequencePacker",
    "KeyedMasking",
    "LabelSettings",
    "Lockstep",
    "MaskRatioCooldown",
    "MaskingRatioCooldownScheduler",
    "MaskingSchedule",
    "Objective",
    "OverLong",
    "PackedBlocks",
    "ScheduleSettings",
    "SequencePacker",
    "SubsetSumSequencePacker",
    "Tail",
    "TokenAccount",
    "find_best_fit",
    "flat_source_batch",
    "get_num_samples_in_packed_batch",
    "get_num_tokens_in_packed_batch",
    "mlm_masking",
    "pack_blocks",
    "pack_sequences",
    "split_packed_batch",
]
