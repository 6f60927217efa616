"""What must hold in an experiment: the range of each value, and which of them go together."""

from operator import attrgetter

from composer_packing.common.errors import ConfigError
from composer_packing.config.schedules import check_schedules
from composer_packing.config.schema import PRECISIONS, EvalLoaderConfig, TrainConfig
from composer_packing.config.sources import (
    BYTES_DTYPES,
    DocsConfig,
    MdsConfig,
    StreamingConfig,
    TextsConfig,
)
from composer_packing.packing.options import Objective, PackingStrategy

SHORTEST_SEQ_LEN = 8
"""[CLS], [SEP] and a few words: below this there is nothing to learn from."""

SMALLEST_VOCAB = 512
"""The special tokens and all 256 bytes, and some room for words."""

MOST_WORKERS = 256
"""Worker processes of a rank: more are a slip of the pen."""

LARGEST = 2**32
"""What the numbers that `check` bounds must stay below; a seed is the strictest."""


def check_config(config: TrainConfig, world_size: int) -> None:
    """Raise ConfigError where values are out of range or do not go together.

    What is checked here is what can be said in the keys' own words; the packer checks the rest.

    Args:
        config: what was read.
        world_size: ranks that will train.
    """
    for key, least in (
        ("seed", 0),
        ("max_seq_len", SHORTEST_SEQ_LEN),
        ("device_train_microbatch_size", 1),
        ("train_loader.prefetch_factor", 1),
        ("train_loader.packing_prefetch_factor", 0),
        ("eval_loader.max_documents", 1),
        ("optimizer.lr", 0),
        ("optimizer.eps", 0),
        ("optimizer.weight_decay", 0),
        ("scheduler.alpha_f", 0),
    ):
        value = attrgetter(key)(config)
        if not least <= value < LARGEST:  # so that nan is refused too
            raise ConfigError(f"{key}={value}: must be at least {least} and below 2**32")
    if config.seed + world_size > LARGEST:
        raise ConfigError(
            f"seed={config.seed}: {world_size} ranks add up to {world_size - 1}; stay below 2**32 with that"
        )
    micro = config.device_train_microbatch_size
    for key in ("global_train_batch_size", "train_loader.batch_size_warmup_min_size"):
        size = attrgetter(key)(config)
        if size is not None and (size < 1 or size % (micro * world_size)):
            raise ConfigError(
                f"{key}={size}: must be a positive multiple of {micro * world_size}, which is {world_size} ranks "
                f"times device_train_microbatch_size={micro}"
            )
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(f"optimizer.betas={list(config.optimizer.betas)}: each must be at least 0 and below 1")
    if config.buffer_size(world_size) <= config.device_batch_size(world_size):
        raise ConfigError(
            f"train_loader.packing_buffer_size={config.train_loader.packing_buffer_size}: must exceed the "
            f"{config.device_batch_size(world_size)} sequences of one rank's batch"
        )
    for key in ("mlm_probability", "eval_loader.mlm_probability", "train_loader.final_masking_ratio"):
        ratio = attrgetter(key)(config)
        if ratio is not None and not 0 < ratio <= 1:
            raise ConfigError(f"{key}={ratio}: must lie above 0, or there is nothing to learn, and not above 1")
    strategy = config.train_loader.packing_strategy
    if strategy not in tuple(PackingStrategy):
        raise ConfigError(f"train_loader.packing_strategy={strategy}: must be subset_sum or best_fit")
    workers = config.train_loader.num_workers
    if workers is not None and not 0 <= workers <= MOST_WORKERS:
        raise ConfigError(f"train_loader.num_workers={workers}: must lie between 0 and {MOST_WORKERS}, or be null")
    _check_objective(config)
    _check_load_path(config)
    check_schedules(config)
    _check_data(config)
    if config.device not in (None, *PRECISIONS):
        raise ConfigError(f"device={config.device}: must be cpu or gpu, or null for the GPU where there is one")


def _check_data(config: TrainConfig) -> None:
    sources = config.data.sources
    if len(sources) != 1:
        known = "docs, text, jsonl, parquet, huggingface, mds or streaming"
        raise ConfigError(
            f"data: names {len(sources)} sources{': ' * bool(sources)}{', '.join(sources)}; it must be one of {known}"
        )
    ((kind, source),) = sources.items()
    if config.objective == Objective.SFT and kind not in ("docs", "mds"):
        raise ConfigError(
            f"objective=sft: data.{kind} has no loss masks; prepare examples by python -m composer_packing.prepare "
            f"--examples, and give their folder as data.mds"
        )
    if isinstance(source, DocsConfig) and not SMALLEST_VOCAB <= source.vocab_size <= config.model.vocab_size:
        raise ConfigError(
            f"data.docs.vocab_size={source.vocab_size}: must be at least {SMALLEST_VOCAB} and not exceed "
            f"model.vocab_size={config.model.vocab_size}"
        )
    if isinstance(source, TextsConfig):
        if not source.train or source.val == []:
            raise ConfigError(f"data.{kind}.{'val' if source.train else 'train'}=[]: give at least one file or folder")
        try:
            source.prepare_config()
        except ConfigError as error:
            raise ConfigError(f"data.{kind}.{error}") from error
    if isinstance(source, (MdsConfig, StreamingConfig)) and source.bytes_dtype not in BYTES_DTYPES:
        raise ConfigError(
            f"data.{kind}.bytes_dtype={source.bytes_dtype}: must be an integer type, one of {', '.join(BYTES_DTYPES)}"
        )
    if isinstance(source, StreamingConfig):
        _check_streams(source)


def _check_streams(source: StreamingConfig) -> None:
    if not source.streams:
        raise ConfigError("data.streaming.streams={}: give at least one, as {mine: {remote: s3://bucket/folder}}")
    for name, stream in source.streams.items():
        if stream.remote is None and stream.local is None:
            raise ConfigError(f"data.streaming.streams.{name}: give remote, local, or both")
        for key in ("proportion", "repeat", "choose"):
            weight = getattr(stream, key)
            if weight is not None and not 0 < weight < LARGEST:
                raise ConfigError(f"data.streaming.streams.{name}.{key}={weight}: must be above 0 and below 2**32")


def _check_objective(config: TrainConfig) -> None:
    objective = config.objective
    if objective not in tuple(Objective):
        raise ConfigError(f"objective={objective}: must be mlm, causal or sft")
    if objective == Objective.MLM:
        return
    if not config.model.causal:
        raise ConfigError(
            f"model.causal={config.model.causal}: with objective={objective} each token would see the one it is to "
            f"predict; set model.causal=true"
        )
    for key, default in (
        ("mlm_probability", TrainConfig.mlm_probability),
        ("eval_loader.mlm_probability", EvalLoaderConfig.mlm_probability),
        ("train_loader.masking_ratio_cooldown_tokens", None),
    ):
        value = attrgetter(key)(config)
        if value != default:
            raise ConfigError(f"{key}={value}: with objective={objective} nothing is masked; leave it out")


def _check_load_path(config: TrainConfig) -> None:
    if config.load_path is None and config.load_weights_only:
        raise ConfigError("load_weights_only=true: needs load_path, the checkpoint whose weights to take")
    if config.autoresume and config.run_name is None:
        raise ConfigError("autoresume=true: needs run_name, by which the next start finds the checkpoints of this one")
    keep = config.save_num_checkpoints_to_keep
    if keep == 0 or keep < -1:
        raise ConfigError(f"save_num_checkpoints_to_keep={keep}: must be at least 1, or -1 for all")
    if keep != -1 and "://" in config.save_folder:
        raise ConfigError(f"save_num_checkpoints_to_keep={keep}: an object store keeps all; leave it out")
