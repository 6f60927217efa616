"""Reading an experiment: a YAML file and `key=value` overrides, merged into the schema of `config`."""

import difflib
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from composer_packing.common.errors import ConfigError, join_lines
from composer_packing.config.checks import check_config
from composer_packing.config.durations import resolve_durations
from composer_packing.config.schema import TrainConfig


def load_config(path: str, overrides: Sequence[str], world_size: int) -> TrainConfig:
    """Read an experiment file; its durations come out in `tok`, `sp` or `ba`.

    Args:
        path: YAML file.
        overrides: `key=value`, nested keys with dots; they win over the file.
        world_size: ranks that will train.

    Raises:
        ConfigError: a file that cannot be read, a key that is unknown or missing, a value of the wrong type,
            or values that do not go together.
    """
    config = _merged(OmegaConf.structured(TrainConfig), _read(path), path)
    for override in overrides:
        config = _merged(config, _parsed(override), override)
    try:
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    except ValueError as error:  # from the one dataclass that checks itself
        raise ConfigError(f"model.{error}") from error
    assert isinstance(made, TrainConfig)
    made = resolve_durations(made)
    check_config(made, world_size)
    return made


def _read(path: str) -> DictConfig:
    try:
        read = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text; give a YAML file") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {join_lines(error)}") from error
    if not isinstance(read, DictConfig):
        raise ConfigError(f"{path}: holds no keys; give a YAML file of 'key: value' lines")
    return read


def _parsed(override: str) -> DictConfig:
    if "=" not in override:
        raise ConfigError(f"{override}: an override is written key=value")
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{override}: {join_lines(error)}") from error


def _merged(config: DictConfig, more: DictConfig, where: str) -> DictConfig:
    """`config` with `more` laid over it; errors name `where` that came from."""
    try:
        merged = OmegaConf.merge(config, more)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {_one_line(error)}") from error
    except TypeError as error:  # OmegaConf's own, for a mapping in the place of a tuple
        raise ConfigError(f"{where}: {error}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _one_line(error: OmegaConfBaseException) -> str:
    """Key, what is wrong and what would do."""
    key = str(error.full_key or error.key or "")
    if isinstance(error, ConfigKeyError):
        known = _keys(TrainConfig)
        near = difflib.get_close_matches(key, known, n=1) or [k for k in known if k.endswith(f".{key}")][:1]
        return f"there is no key {key}" + (f"; did you mean {near[0]}?" if near else "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is missing; set it in the file or as {key}=VALUE"
    reason = join_lines(str(error.msg or error).split("\n    full_key:")[0])
    if key == "device_train_microbatch_size":
        reason += "; give the number of sequences that one packed row has room for"
    return f"{key}: {reason}" if key else reason


def _keys(schema: Any, prefix: str = "") -> list[str]:
    """All keys of a dataclass, nested ones with dots."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        keys.append(prefix + name)
        within = f"{prefix}{name}.NAME." if get_origin(kind) is dict else f"{prefix}{name}."
        for part in (kind, *get_args(kind)):  # `Schema | None` and `dict[str, Schema]` too
            if is_dataclass(part):
                keys.extend(_keys(part, within))
    return keys
