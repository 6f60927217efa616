"""The schedules of an experiment, made from the keys of its YAML file."""

from composer_packing.common.durations import Duration
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.packing.schedules import BatchSizeWarmup, MaskRatioCooldown


def batch_size_warmup(config: TrainConfig) -> BatchSizeWarmup | None:
    """The batch-size warmup, with its minimum in sequences over all ranks; None without a warmup.

    Args:
        config: the experiment, with resolved durations.

    Raises:
        ConfigError: the keys of `train_loader` are invalid.
    """
    loader = config.train_loader
    try:
        warmup = BatchSizeWarmup.from_options(loader.batch_size_warmup_min_size, loader.batch_size_warmup_tokens)
        if warmup is not None:
            warmup.check_final_size(config.global_train_batch_size)
    except ValueError as error:
        raise ConfigError(f"train_loader.{error}") from error
    return warmup


def mask_ratio_cooldown(config: TrainConfig) -> MaskRatioCooldown | None:
    """The mask-ratio cooldown; None without a cooldown.

    Args:
        config: the experiment, with resolved durations.

    Raises:
        ConfigError: the keys of `train_loader` are invalid.
    """
    loader = config.train_loader
    try:
        cooldown = MaskRatioCooldown.from_options(
            loader.final_masking_ratio,
            loader.masking_ratio_cooldown_tokens,
            loader.masking_ratio_cooldown_start_tokens,
            loader.masking_cooldown_schedule_type,
            loader.masking_ratio_step_size,
        )
        if cooldown is not None:
            cooldown.check_initial_ratio(config.mlm_probability)
    except ValueError as error:
        raise ConfigError(f"train_loader.{error}") from error
    return cooldown


def check_schedules(config: TrainConfig) -> None:
    """Raise ConfigError if a schedule of the packer is invalid."""
    batch_size_warmup(config)
    mask_ratio_cooldown(config)


def check_learning_rate_schedule(warmup: Duration, decay: Duration, max_duration: Duration) -> None:
    """Raise ValueError unless warmup and decay of the learning rate fit into the training.

    Args:
        warmup: length of the warmup, `t_warmup`.
        decay: length of the decay at the end of the training, `t_decay`.
        max_duration: length of the training.
    """
    if decay.count and decay.unit != max_duration.unit:
        raise ValueError(f"t_decay={decay} must be in {max_duration.unit}: it counts back from {max_duration=!s}")
    if warmup.unit == max_duration.unit and warmup.count + decay.count > max_duration.count:
        raise ValueError(f"t_warmup={warmup} and t_decay={decay} together must not exceed {max_duration=!s}")
