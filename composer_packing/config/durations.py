"""The durations of a configuration: read, resolved against the length of the training, and compared."""

import copy

from composer_packing.common.durations import Duration, parse_duration
from composer_packing.common.errors import ConfigError
from composer_packing.config.limits import DurationRange, limited_keys
from composer_packing.config.schema import TrainConfig


def resolve_durations(config: TrainConfig) -> TrainConfig:
    """Copy a configuration with every duration in `tok`, `sp` or `ba`.

    A share of the training, such as `0.1dur`, becomes a number in the unit of `max_duration`.

    Raises:
        ConfigError: a value is not a duration, is too short for its key, or does not go together with another one.
    """
    config = copy.deepcopy(config)
    length: Duration | None = None
    for key in sorted(limited_keys(config), key=lambda key: key.path != "max_duration"):  # shares need its length
        if not isinstance(key.limit, DurationRange) or key.value is None:
            continue
        try:
            duration = parse_duration(key.path, key.value, key.limit.at_least, length)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        length = length or duration
        setattr(key.holder, key.name, str(duration))
    _check(config)
    return config


def _check(config: TrainConfig) -> None:
    """Raise ConfigError if durations do not fit into each other, or cannot be compared."""
    whole = parse_duration("max_duration", config.max_duration)
    scheduler, loader = config.scheduler, config.train_loader
    warmup, decay = parse_duration("t_warmup", scheduler.t_warmup), parse_duration("t_decay", scheduler.t_decay)
    if decay.count and decay.unit != whole.unit:
        raise ConfigError(
            f"scheduler.t_decay={decay}: counts back from the end at max_duration={whole}; give {whole.unit} or dur"
        )
    if warmup.unit == whole.unit and warmup.count + decay.count > whole.count:
        both = f"scheduler.t_warmup={warmup}, scheduler.t_decay={decay}"
        raise ConfigError(f"{both}: together they must not exceed max_duration={whole}")
    if loader.masking_ratio_cooldown_tokens is not None:
        cooldown = parse_duration("cooldown", loader.masking_ratio_cooldown_tokens)
        start = parse_duration("start", loader.masking_ratio_cooldown_start_tokens or 0)
        if start.count and start.unit != cooldown.unit:
            raise ConfigError(
                f"train_loader.masking_ratio_cooldown_start_tokens={start}: give it in {cooldown.unit}, as the cooldown"
            )
