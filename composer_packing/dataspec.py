"""Packed batches as Composer takes them: a `DataSpec` for training and one for evaluation."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from composer import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_packing.batch import (
    IGNORE_INDEX,
    Batch,
    get_num_samples_in_packed_batch,
    get_num_targets_in_packed_batch,
    get_token_counts_in_packed_batch,
    split_packed_batch,
    with_counts,
)
from composer_packing.best_fit_packer import GreedyBestFitSequencePacker
from composer_packing.config import ConfigError, TrainConfig
from composer_packing.data.loader import DocumentLoader, num_workers_of
from composer_packing.data.sampler import NumberBatches, ShareSampler
from composer_packing.data.sources import Documents
from composer_packing.data.stream_sampler import StreamSampler, WantedBatches
from composer_packing.data.streamed import StreamedDocuments
from composer_packing.data.tokenizer import Vocabulary
from composer_packing.keyed_masking import KeyedMasking
from composer_packing.lockstep import Lockstep
from composer_packing.policies import Objective, OverLong, PackingStrategy, Tail
from composer_packing.resuming import PackedDataset
from composer_packing.sequence_packer import SequencePacker
from composer_packing.source_batch import SourceBatch
from composer_packing.subset_sum_packer import SubsetSumSequencePacker

PACKERS: dict[PackingStrategy, type[SequencePacker]] = {
    PackingStrategy.BEST_FIT: GreedyBestFitSequencePacker,
    PackingStrategy.SUBSET_SUM: SubsetSumSequencePacker,
}
"""The packer of each strategy."""

EVAL_SEED = 0
"""Evaluation masks do not follow the seed of a run, so that runs compare."""


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


def train_batches(
    documents: Documents, config: TrainConfig, vocabulary: Vocabulary, pin_memory: bool = False
) -> Lockstep:
    """This rank's share of the documents, shuffled anew each epoch, packed on a background thread.

    Worker processes are started here, before that thread is.

    Args:
        documents: what all ranks share.
        config: the run, its durations resolved.
        vocabulary: of their tokenizer.
        pin_memory: put batches into pinned memory, for a GPU.

    Raises:
        ConfigError: the packer does not take the settings.
    """
    world_size = dist.get_world_size()
    settings = config.train_loader
    minimum = settings.batch_size_warmup_min_size
    try:
        packer = _packer(
            document_loader(documents, config),
            config,
            vocabulary,
            mask_prob=config.mlm_probability,
            mask_seed=config.seed,
            tail=Tail.CARRY,
            pin_memory=pin_memory,
            batch_size_warmup_min_size=None if minimum is None else minimum // world_size,
            batch_size_warmup_tokens=settings.batch_size_warmup_tokens,
            masking_ratio_cooldown_tokens=settings.masking_ratio_cooldown_tokens,
            masking_ratio_cooldown_start_tokens=settings.masking_ratio_cooldown_start_tokens,
            final_masking_ratio=settings.final_masking_ratio,
            masking_cooldown_schedule_type=settings.masking_cooldown_schedule_type,
            masking_ratio_step_size=settings.masking_ratio_step_size,
        )
    except ValueError as error:
        raise ConfigError(f"train_loader: {error}") from error
    return Lockstep(packer, settings.packing_prefetch_factor)


def document_loader(documents: Documents, config: TrainConfig) -> DocumentLoader:
    """What reads this rank's share of the documents; its worker processes are started here, if it has any."""
    rank, world_size, ranks_of_node = dist.get_global_rank(), dist.get_world_size(), dist.get_local_world_size()
    batch_size, settings = config.device_batch_size(world_size), config.train_loader
    batches: NumberBatches | WantedBatches
    if is_streamed := isinstance(documents, StreamedDocuments):
        sampler: ShareSampler = StreamSampler(documents, world_size, rank, ranks_of_node, config.seed)
        batches = WantedBatches(sampler, documents, batch_size)
    else:
        sampler = ShareSampler(documents, world_size, rank, config.seed)
        batches = NumberBatches(sampler, batch_size)
    num_workers = num_workers_of(settings.num_workers, documents.are_texts, is_streamed, ranks_of_node)
    return DocumentLoader(documents, sampler, batches, num_workers, settings.prefetch_factor)


def eval_batches(documents: Documents, config: TrainConfig, vocabulary: Vocabulary) -> list[Batch]:
    """This rank's share of the documents in batches, with masks made once.

    Every document is in exactly one batch, up to `eval_loader.max_documents` of them, evenly over all; its masks depend
    on nothing but its place in the dataset. Ranks get equally many batches: those that have fewer are given rows of
    padding, which weigh nothing.

    Args:
        documents: what all ranks share.
        config: the run.
        vocabulary: of their tokenizer.

    Raises:
        ConfigError: there is no target to evaluate.
    """
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    count = min(len(documents), config.eval_loader.max_documents)
    share = np.linspace(0, len(documents), count, endpoint=False).astype(np.int64)[rank::world_size]
    step = config.device_batch_size(world_size)
    source = [documents.__getitems__(share[at : at + step]) for at in range(0, len(share), step)]
    packer = _packer(source, config, vocabulary, config.eval_loader.mlm_probability, EVAL_SEED, Tail.EMIT)
    batches = [with_counts(batch) for batch in packer]  # once, not at every evaluation
    assert packer.token_account.read == packer.token_account.emitted
    targets = sum(get_num_targets_in_packed_batch(batch) for batch in batches)
    ranks = dist.all_gather_object((len(batches), targets))
    if not any(targets for _, targets in ranks):
        of_mlm = config.objective == Objective.MLM
        mlm_probability = config.eval_loader.mlm_probability
        what = f"eval_loader.{mlm_probability=}: raise it, or" if of_mlm else f"objective={config.objective}:"
        raise ConfigError(f"{what} give more documents: no token of {count} that are held out is a target")
    most = max(count for count, _ in ranks)
    padding = with_counts(_row_of_padding(config.row_len, vocabulary.pad_token_id))
    return batches + [padding] * (most - len(batches))


def _packer(
    source: Iterable[SourceBatch],
    config: TrainConfig,
    vocabulary: Vocabulary,
    mask_prob: float,
    mask_seed: int,
    tail: Tail,
    **more: Any,
) -> SequencePacker:
    world_size = dist.get_world_size()
    keyed_masking = None
    if config.objective == Objective.MLM:
        keyed_masking = KeyedMasking(mask_seed, vocabulary.size, vocabulary.special_token_ids)
    packer = PACKERS[PackingStrategy(config.train_loader.packing_strategy)]
    return packer.from_composer(
        source,
        batch_size=config.device_batch_size(world_size),
        micro_batch_size=config.device_train_microbatch_size,
        max_seq_len=config.max_seq_len,
        buffer_size=config.buffer_size(world_size),
        pad_token_id=vocabulary.pad_token_id,
        mask_token_id=vocabulary.mask_token_id or 0,
        mask_prob=mask_prob,
        world_size=world_size,
        tail=tail,
        over_long=OverLong.ERROR if config.objective == Objective.SFT else OverLong.SPLIT,
        max_document_len=config.max_seq_len,
        objective=config.objective,
        keyed_masking=keyed_masking,
        **more,
    )


def _row_of_padding(row_len: int, pad_token_id: int) -> Batch:
    return {
        "input_ids": torch.full((1, row_len), pad_token_id),
        "labels": torch.full((1, row_len), IGNORE_INDEX),
        "cu_seqlens": [torch.tensor([0, row_len], dtype=torch.int32)],
        "max_seqlen": [row_len],
        "attention_mask": torch.zeros((1, row_len), dtype=torch.int64),
    }
