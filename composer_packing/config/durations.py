"""The durations of an experiment: which keys hold one, read, resolved and compared with each other."""

import copy
from operator import attrgetter

from composer_packing.common.durations import Duration, parse_duration
from composer_packing.common.errors import ConfigError
from composer_packing.config.schedules import check_learning_rate_schedule
from composer_packing.config.schema import TrainConfig

DURATIONS = {
    "max_duration": 1,
    "eval_interval": 1,
    "save_interval": 1,
    "console_log_interval": 1,
    "scheduler.t_warmup": 0,
    "scheduler.t_decay": 0,
    "train_loader.batch_size_warmup_tokens": 1,
    "train_loader.masking_ratio_cooldown_tokens": 1,
    "train_loader.masking_ratio_cooldown_start_tokens": 0,
}
"""Every key that holds a duration, and the smallest one that makes sense there."""


def resolve_durations(config: TrainConfig) -> TrainConfig:
    """The same run with every duration in `tok`, `sp` or `ba`: shares of the training in its own unit.

    Raises:
        ConfigError: a duration is none, or is 0 where that makes no sense, or some do not go together.
    """
    config = copy.deepcopy(config)
    length: Duration | None = None
    for key, least in DURATIONS.items():
        parent, _, name = key.rpartition(".")
        holder = attrgetter(parent)(config) if parent else config
        if getattr(holder, name) is None:
            continue
        try:
            duration = parse_duration(key, getattr(holder, name), least, length)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        length = length or duration  # `max_duration` comes first
        setattr(holder, name, str(duration))
    scheduler = config.scheduler
    warmup, decay = parse_duration("t_warmup", scheduler.t_warmup), parse_duration("t_decay", scheduler.t_decay)
    assert length is not None
    try:
        check_learning_rate_schedule(warmup, decay, length)
    except ValueError as error:
        raise ConfigError(f"scheduler.{error}") from error
    return config
