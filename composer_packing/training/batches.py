"""From documents and configuration to the packed batches that a rank trains on."""

from collections.abc import Iterable

from composer.utils import dist

from composer_packing.batch.lockstep import Lockstep
from composer_packing.common.errors import ConfigError
from composer_packing.config.schedules import batch_size_warmup, mask_ratio_cooldown
from composer_packing.config.schema import TrainConfig
from composer_packing.data.document_loader import DocumentLoader, num_workers_of
from composer_packing.data.open_source import Documents
from composer_packing.data.share_sampler import NumberBatches, ShareSampler
from composer_packing.data.streams.documents import StreamedDocuments
from composer_packing.data.streams.sampler import StreamSampler, WantedBatches
from composer_packing.data.tokenizer import Vocabulary
from composer_packing.packing.best_fit import GreedyBestFitSequencePacker
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.options import Objective, OverLong, PackingStrategy, Tail
from composer_packing.packing.sequence_packer import SequencePacker
from composer_packing.packing.settings import BatchShape, DocumentPolicies, LabelSettings, ScheduleSettings
from composer_packing.packing.source_batch import SourceBatch
from composer_packing.packing.subset_sum import SubsetSumSequencePacker

PACKERS: dict[PackingStrategy, type[SequencePacker]] = {
    PackingStrategy.BEST_FIT: GreedyBestFitSequencePacker,
    PackingStrategy.SUBSET_SUM: SubsetSumSequencePacker,
}
"""The packer of each strategy."""


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
    schedules = schedule_settings(config)
    try:
        packer = make_packer(
            document_loader(documents, config),
            config,
            vocabulary,
            mask_prob=config.mlm_probability,
            mask_seed=config.seed,
            tail=Tail.CARRY,
            schedules=schedules,
            pin_memory=pin_memory,
        )
    except ValueError as error:
        raise ConfigError(f"train_loader: {error}") from error
    return Lockstep(packer, config.train_loader.packing_prefetch_factor)


def schedule_settings(config: TrainConfig) -> ScheduleSettings:
    """The schedules of training; the packer of a rank counts its batch size in its own rows.

    Raises:
        ConfigError: the keys of `train_loader` are invalid.
    """
    world_size = dist.get_world_size()
    warmup = batch_size_warmup(config)
    if warmup is not None:
        warmup = warmup.in_rows(world_size * config.device_train_microbatch_size)
    return ScheduleSettings(warmup, mask_ratio_cooldown(config), world_size)


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


def make_packer(
    source: Iterable[SourceBatch],
    config: TrainConfig,
    vocabulary: Vocabulary,
    mask_prob: float,
    mask_seed: int,
    tail: Tail,
    schedules: ScheduleSettings | None = None,
    pin_memory: bool = False,
) -> SequencePacker:
    """The packer of a run, over source batches of one rank."""
    batch_size = config.device_batch_size(dist.get_world_size())
    shape = BatchShape(
        src_batch_size=batch_size,
        out_batch_size=batch_size // config.device_train_microbatch_size,
        out_pseq_len=config.row_len,
        buffer_size=config.buffer_size(dist.get_world_size()),
        max_document_len=config.max_seq_len,
        pin_memory=pin_memory,
    )
    keyed_masking = None
    if config.objective == Objective.MLM:
        keyed_masking = KeyedMasking(mask_seed, vocabulary.size, vocabulary.special_token_ids)
    labels = LabelSettings(
        objective=config.objective,
        pad_token_id=vocabulary.pad_token_id,
        mask_token_id=vocabulary.mask_token_id or 0,
        mask_prob=mask_prob,
        keyed_masking=keyed_masking,
    )
    policies = DocumentPolicies(tail, OverLong.TRUNCATE if config.objective == Objective.SFT else OverLong.SPLIT)
    packer = PACKERS[PackingStrategy(config.train_loader.packing_strategy)]
    return packer(source, shape, labels, schedules or ScheduleSettings(world_size=dist.get_world_size()), policies)
