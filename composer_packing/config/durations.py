"""The durations of a configuration, resolved against the length of the training."""

import copy

from composer_packing.common.durations import Duration, parse_duration
from composer_packing.common.errors import ConfigError
from composer_packing.config.limits import DurationRange, limited_keys
from composer_packing.config.schedules import check_learning_rate_schedule
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
    warmup, decay = (parse_duration(name, getattr(config.scheduler, name)) for name in ("t_warmup", "t_decay"))
    assert length is not None
    try:
        check_learning_rate_schedule(warmup, decay, length)
    except ValueError as error:
        raise ConfigError(f"scheduler.{error}") from error
    return config
