"""From documents to the packed batches that a rank trains on.

::

    documents -> DocumentLoader -> source batches -> packer -> batches -> Lockstep -> trainer
"""

from collections.abc import Iterable

from composer.utils import dist

from composer_packing.batch.lockstep import Lockstep
from composer_packing.common.errors import ConfigError
from composer_packing.config.schedules import batch_size_warmup, mask_ratio_cooldown
from composer_packing.config.schema import TrainConfig
from composer_packing.data.document_loader import DocumentLoader, choose_num_workers
from composer_packing.data.open_source import Documents
from composer_packing.data.share_sampler import ShareSampler
from composer_packing.data.streams.documents import StreamedDocuments
from composer_packing.data.streams.sampler import StreamSampler
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
    """Pack this rank's share of the documents on a background thread, in another order each epoch.

    Worker processes start here, before the thread does.

    Args:
        documents: the documents of all ranks.
        config: the run, with its durations resolved.
        vocabulary: of their tokenizer.
        pin_memory: put batches into pinned memory, for a GPU.

    Raises:
        ConfigError: the packer refuses the settings.
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
    """Loader of this rank's share of the documents. Its worker processes, if it has any, start here."""
    rank, world_size, ranks_of_node = dist.get_global_rank(), dist.get_world_size(), dist.get_local_world_size()
    batch_size, settings = config.device_batch_size(world_size), config.train_loader
    if is_streamed := isinstance(documents, StreamedDocuments):
        sampler: ShareSampler = StreamSampler(documents, world_size, rank, ranks_of_node, config.seed)
    else:
        sampler = ShareSampler(documents, world_size, rank, config.seed)
    num_workers = choose_num_workers(settings.num_workers, documents.are_texts, is_streamed, ranks_of_node)
    return DocumentLoader(documents, sampler, batch_size, num_workers, settings.prefetch_factor)


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
    """Make the packer that the configuration asks for.

    Args:
        source: gives source batches of this rank.
        config: the run, with its durations resolved.
        vocabulary: of the tokenizer.
        mask_prob: share of the tokens to predict, if the objective is mlm.
        mask_seed: seed of the masks.
        tail: what becomes of the documents that are left at the end of an epoch.
        schedules: what changes during the training; None for constant sizes and masks.
        pin_memory: put batches into pinned memory, for a GPU.

    Raises:
        ValueError: the packer refuses the settings.
    """
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
