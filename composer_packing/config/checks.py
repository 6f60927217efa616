"""Which values of a configuration go together. `limits` checks the range of each value by itself."""

from operator import attrgetter

from composer_packing.common.addresses import is_address
from composer_packing.common.errors import ConfigError
from composer_packing.config.limits import LARGEST, check_limits
from composer_packing.config.schedules import check_schedules
from composer_packing.config.schema import EvalLoaderConfig, TrainConfig
from composer_packing.config.sources import (
    DocsConfig,
    StreamingConfig,
    TextsConfig,
)
from composer_packing.packing.options import Objective

SMALLEST_VOCAB = 512
"""Entries of the smallest tokenizer: the special tokens, all 256 bytes, and some words."""


def check_config(config: TrainConfig, world_size: int) -> None:
    """Raise ConfigError if a value is out of range, or does not go together with another one.

    Args:
        config: the run, with its durations resolved.
        world_size: number of ranks that will train.
    """
    check_limits(config)
    if config.seed + world_size > LARGEST:
        raise ConfigError(
            f"seed={config.seed}: {world_size} ranks add up to {world_size - 1} to it; the sum must stay below 2**32"
        )
    _check_batch_sizes(config, world_size)
    _check_objective(config)
    _check_checkpoints(config)
    check_schedules(config)
    _check_data(config)


def _check_batch_sizes(config: TrainConfig, world_size: int) -> None:
    micro, loader = config.device_train_microbatch_size, config.train_loader
    for key in ("global_train_batch_size", "train_loader.batch_size_warmup_min_size"):
        size = attrgetter(key)(config)
        if size is not None and (size < 1 or size % (micro * world_size)):
            raise ConfigError(
                f"{key}={size}: must be a positive multiple of {micro * world_size}, which is {world_size} ranks "
                f"times device_train_microbatch_size={micro}"
            )
    if config.buffer_size(world_size) <= config.device_batch_size(world_size):
        raise ConfigError(
            f"train_loader.packing_buffer_size={loader.packing_buffer_size}: must exceed the "
            f"{config.device_batch_size(world_size)} sequences of one rank's batch"
        )


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
    if isinstance(source, TextsConfig) and (not source.train or source.val == []):
        raise ConfigError(f"data.{kind}.{'val' if source.train else 'train'}=[]: give at least one file or folder")
    if isinstance(source, StreamingConfig):
        _check_streams(source)


def _check_streams(source: StreamingConfig) -> None:
    if not source.streams:
        raise ConfigError("data.streaming.streams={}: give at least one, as {mine: {remote: s3://bucket/folder}}")
    for name, stream in source.streams.items():
        if stream.remote is None and stream.local is None:
            raise ConfigError(f"data.streaming.streams.{name}: give remote, local, or both")


def _check_objective(config: TrainConfig) -> None:
    objective = config.objective
    if objective == Objective.MLM:
        return
    if not config.model.causal:
        raise ConfigError(
            f"model.causal={config.model.causal}: with objective={objective} each token would see the token that it "
            f"must predict; set model.causal=true"
        )
    for key, default in (
        ("mlm_probability", TrainConfig.mlm_probability),
        ("eval_loader.mlm_probability", EvalLoaderConfig.mlm_probability),
        ("train_loader.masking_ratio_cooldown_tokens", None),
    ):
        value = attrgetter(key)(config)
        if value != default:
            raise ConfigError(f"{key}={value}: with objective={objective} nothing is masked; leave it out")


def _check_checkpoints(config: TrainConfig) -> None:
    if config.load_path is None and config.load_weights_only:
        raise ConfigError("load_weights_only=true: needs load_path, the checkpoint with the weights")
    if config.autoresume and config.run_name is None:
        raise ConfigError("autoresume=true: needs run_name, by which the next start finds the checkpoints of this run")
    keep = config.save_num_checkpoints_to_keep
    if keep == 0 or keep < -1:
        raise ConfigError(f"save_num_checkpoints_to_keep={keep}: must be at least 1, or -1 for all")
    if keep != -1 and is_address(config.save_folder):
        raise ConfigError(
            f"save_num_checkpoints_to_keep={keep}: in an object store all checkpoints are kept; leave the key out"
        )
