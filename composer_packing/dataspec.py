"""Packed batches as Composer takes them: a `DataSpec` for training and one for evaluation."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from composer import DataSpec
from composer.utils import dist
from torch.utils.data import DataLoader, IterableDataset

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
from composer_packing.data.corpus import MASK_TOKEN_ID, PAD_TOKEN_ID, SPECIAL_TOKEN_IDS, Corpus, open_or_build
from composer_packing.data.dataset import DocumentDataset
from composer_packing.data.sampler import ShareSampler
from composer_packing.keyed_masking import KeyedMasking
from composer_packing.lockstep import Lockstep
from composer_packing.policies import Objective, PackingStrategy, Tail
from composer_packing.sequence_packer import SequencePacker
from composer_packing.source_batch import FlatSourceBatch, SourceBatch
from composer_packing.subset_sum_packer import SubsetSumSequencePacker

PACKERS: dict[PackingStrategy, type[SequencePacker]] = {
    PackingStrategy.BEST_FIT: GreedyBestFitSequencePacker,
    PackingStrategy.SUBSET_SUM: SubsetSumSequencePacker,
}
"""The packer of each strategy."""

EVAL_SEED = 0
"""Evaluation masks do not follow the seed of a run, so that runs compare."""


class PackedDataset(IterableDataset[Batch]):
    """Gives the batches of an iterable as they are; what a `DataLoader` needs to take them."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        """Number of batches; TypeError where it is unknown, as it is in training."""
        return len(self.batches)  # type: ignore[arg-type]


def packed_dataspec(batches: Iterable[Batch]) -> DataSpec:
    """A `DataSpec` that splits batches into rows and counts real tokens, documents and targets.

    The device only ever sees counts that were taken on the host, as plain ints.

    Args:
        batches: gives packed batches with `attention_mask`, an epoch of them at every `iter()`. A step in which no
            rank has a target is an error in Composer, unless a `Lockstep` gives the batches.
    """
    loader: DataLoader[Batch] = DataLoader(PackedDataset(batches), batch_size=None)
    return DataSpec(
        loader,
        batch_transforms=with_counts,
        split_batch=split_packed_batch,
        get_num_samples_in_batch=get_num_samples_in_packed_batch,
        get_num_tokens_in_batch=get_token_counts_in_packed_batch,
    )


def open_corpus(config: TrainConfig) -> Corpus:
    """The corpus, built by the first rank of this machine while the others wait.

    Raises:
        ConfigError: the cache folder cannot be read or written.
    """
    with dist.run_local_rank_zero_first():
        try:
            return open_or_build(
                Path(config.data.cache_folder), config.data.vocab_size, config.objective == Objective.SFT
            )
        except OSError as error:
            raise ConfigError(
                f"data.cache_folder={config.data.cache_folder}: {error.strerror or error}: {error.filename}; "
                f"give a folder that can be written"
            ) from error


def train_batches(
    documents: DocumentDataset, config: TrainConfig, vocab_size: int, pin_memory: bool = False
) -> Lockstep:
    """This rank's share of the documents, shuffled anew each epoch, packed on a background thread.

    Args:
        documents: what all ranks share.
        config: the run, its durations resolved.
        vocab_size: random words are drawn below it.
        pin_memory: put batches into pinned memory, for a GPU.

    Raises:
        ConfigError: the packer does not take the settings.
    """
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    sampler = ShareSampler(documents, world_size, rank, config.seed)
    loader = DataLoader(
        documents,
        config.device_batch_size(world_size),
        sampler=sampler,
        collate_fn=_as_it_is,  # type: ignore[arg-type] # a dataset that has `__getitems__` need not give a list
        # Or each epoch would draw from PyTorch's global generator, on the packing thread, at any time in the training.
        generator=torch.Generator(),
    )
    settings = config.train_loader
    minimum = settings.batch_size_warmup_min_size
    try:
        packer = _packer(
            loader,
            config,
            mask_prob=config.mlm_probability,
            mask_seed=config.seed,
            vocab_size=vocab_size,
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


def eval_batches(documents: DocumentDataset, config: TrainConfig, vocab_size: int) -> list[Batch]:
    """This rank's share of the documents in batches, with masks made once.

    Every document is in exactly one batch, and its masks depend on nothing but its place in the dataset. Ranks
    get equally many batches: those that have fewer are given rows of padding, which weigh nothing.

    Args:
        documents: what all ranks share.
        config: the run.
        vocab_size: random words are drawn below it.

    Raises:
        ConfigError: there is no target to evaluate.
    """
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    share = range(rank, len(documents), world_size)
    step = config.device_batch_size(world_size)
    source = [documents.__getitems__(share[at : at + step]) for at in range(0, len(share), step)]
    packer = _packer(source, config, config.eval_loader.mlm_probability, EVAL_SEED, vocab_size, Tail.EMIT)
    batches = [with_counts(batch) for batch in packer]  # once, not at every evaluation
    assert packer.seqs_emitted == len(share)
    targets = sum(get_num_targets_in_packed_batch(batch) for batch in batches)
    ranks = dist.all_gather_object((len(batches), targets))
    if not any(targets for _, targets in ranks):
        of_mlm = config.objective == Objective.MLM
        mlm_probability = config.eval_loader.mlm_probability
        what = f"eval_loader.{mlm_probability=}: raise it, or" if of_mlm else f"objective={config.objective}:"
        raise ConfigError(f"{what} give more documents: no token of {len(documents)} that are held out is a target")
    most = max(count for count, _ in ranks)
    return batches + [with_counts(_row_of_padding(config.row_len))] * (most - len(batches))


def _packer(
    source: Iterable[SourceBatch],
    config: TrainConfig,
    mask_prob: float,
    mask_seed: int,
    vocab_size: int,
    tail: Tail,
    **more: Any,
) -> SequencePacker:
    world_size = dist.get_world_size()
    hides = config.objective == Objective.MLM
    packer = PACKERS[PackingStrategy(config.train_loader.packing_strategy)]
    return packer.from_composer(
        source,
        batch_size=config.device_batch_size(world_size),
        micro_batch_size=config.device_train_microbatch_size,
        max_seq_len=config.max_seq_len,
        buffer_size=config.buffer_size(world_size),
        pad_token_id=PAD_TOKEN_ID,
        mask_token_id=MASK_TOKEN_ID,
        mask_prob=mask_prob,
        world_size=world_size,
        tail=tail,
        objective=config.objective,
        keyed_masking=KeyedMasking(mask_seed, vocab_size, SPECIAL_TOKEN_IDS) if hides else None,
        **more,
    )


def _row_of_padding(row_len: int) -> Batch:
    return {
        "input_ids": torch.full((1, row_len), PAD_TOKEN_ID),
        "labels": torch.full((1, row_len), IGNORE_INDEX),
        "cu_seqlens": [torch.tensor([0, row_len], dtype=torch.int32)],
        "max_seqlen": [row_len],
        "attention_mask": torch.zeros((1, row_len), dtype=torch.int64),
    }


def _as_it_is(documents: FlatSourceBatch) -> FlatSourceBatch:
    return documents
