"""Reading a configuration: a YAML file and `key=value` overrides, merged into the schema by OmegaConf."""

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
    """Read and check the configuration of a run. Its durations come out in `tok`, `sp` or `ba`.

    Args:
        path: YAML file.
        overrides: `key=value`, with dots in the names of nested keys. They win over the file.
        world_size: number of ranks that will train.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or missing, a value has the wrong type or is out of
            range, or values do not go together.
    """
    config = _merge(OmegaConf.structured(TrainConfig), _read_file(path), path)
    for override in overrides:
        config = _merge(config, _parse_override(override), override)
    try:
        run = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error)) from error
    except ValueError as error:  # ModernBertConfig checks itself
        raise ConfigError(f"model.{error}") from error
    assert isinstance(run, TrainConfig)
    run = resolve_durations(run)
    check_config(run, world_size)
    return run


def _read_file(path: str) -> DictConfig:
    try:
        content = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text; give a YAML file") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {join_lines(error)}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: holds no keys; give a YAML file of 'key: value' lines")
    return content


def _parse_override(override: str) -> DictConfig:
    if "=" not in override:
        raise ConfigError(f"{override}: an override is written key=value")
    try:
        return OmegaConf.from_dotlist([override])
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{override}: {join_lines(error)}") from error


def _merge(config: DictConfig, more: DictConfig, origin: str) -> DictConfig:
    """`config` with the values of `more` over its own. Errors name the origin of `more`: a file or an override."""
    try:
        merged = OmegaConf.merge(config, more)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{origin}: {_explain(error)}") from error
    except TypeError as error:  # OmegaConf raises it for a mapping instead of a tuple
        raise ConfigError(f"{origin}: {error}") from error
    assert isinstance(merged, DictConfig)
    return merged


def _explain(error: OmegaConfBaseException) -> str:
    """One line that names the key, says what is wrong, and what would do."""
    key = str(error.full_key or error.key or "")
    if isinstance(error, ConfigKeyError):
        similar = _similar_key(key)
        return f"there is no key {key}" + (f"; did you mean {similar}?" if similar else "")
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is missing; set it in the file or as {key}=VALUE"
    reason = join_lines(str(error.msg or error).split("\n    full_key:")[0])
    if key == "device_train_microbatch_size":
        reason += "; give the number of sequences that one packed row has room for"
    return f"{key}: {reason}" if key else reason


def _similar_key(key: str) -> str | None:
    """The known key that is spelled nearly the same, or the first nested one that ends in it; None if no key does."""
    known = _list_keys(TrainConfig)
    similar = difflib.get_close_matches(key, known, n=1) or [path for path in known if path.endswith(f".{key}")]
    return similar[0] if similar else None


def _list_keys(schema: Any, prefix: str = "") -> list[str]:
    """All keys of a dataclass, with dots in those of nested ones: `data.streaming.streams.NAME.remote`."""
    keys = []
    for name, kind in get_type_hints(schema).items():
        path = prefix + name
        keys.append(path)
        within = f"{path}.NAME." if get_origin(kind) is dict else f"{path}."
        for part in (kind, *get_args(kind)):  # also `Schema | None` and `dict[str, Schema]`
            if is_dataclass(part):
                keys.extend(_list_keys(part, within))
    return keys
