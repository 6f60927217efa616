"""The experiment file: its keys, their types and defaults, and what must hold between them.

`load` merges a YAML file and `key=value` overrides into `TrainConfig`. Whatever is wrong with them is a
`ConfigError` of one line that names the key, shows the value and says what would do.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_packing.model import ModernBertConfig
from composer_packing.schedules import local_tokens

SHORTEST_SEQ_LEN = 8
"""[CLS], [SEP] and a few words: below this there is nothing to learn from."""

SMALLEST_VOCAB = 512
"""The special tokens and all 256 bytes, and some room for words."""

PRECISIONS = {"cpu": ("fp32",), "gpu": ("amp_bf16", "amp_fp16", "fp32")}
"""What each device can train in, the default first."""


class ConfigError(ValueError):
    """Something the user can mend, in one line."""


@dataclass
class DataConfig:
    """The built-in corpus: the documentation of the installed Python packages.

    Attributes:
        cache_folder: where the tokenized corpus is kept.
        vocab_size: size of the tokenizer that is trained on it.
    """

    cache_folder: str = ".cache"
    vocab_size: int = 8192


@dataclass
class TrainLoaderConfig:
    """Packing of the training documents.

    Attributes:
        packing_buffer_size: documents that may wait for a row, per rank; null for ten batches.
        packing_prefetch_factor: packed batches kept ready by the background thread.
        batch_size_warmup_min_size: global batch size at the start, in sequences; null for no warmup.
        batch_size_warmup_tokens: length of that warmup.
        masking_ratio_cooldown_tokens: length of the mask-ratio cooldown; null for none.
        masking_ratio_cooldown_start_tokens: when it starts.
        final_masking_ratio: the ratio after it.
        masking_cooldown_schedule_type: linear, or stair.
        masking_ratio_step_size: height of a stair.
    """

    packing_buffer_size: int | None = None
    packing_prefetch_factor: int = 5
    batch_size_warmup_min_size: int | None = None
    batch_size_warmup_tokens: str | None = None
    masking_ratio_cooldown_tokens: str | None = None
    masking_ratio_cooldown_start_tokens: str | None = None
    final_masking_ratio: float | None = None
    masking_cooldown_schedule_type: str = "linear"
    masking_ratio_step_size: float | None = None


@dataclass
class EvalLoaderConfig:
    """Evaluation on the held-out documents.

    Attributes:
        mlm_probability: share of tokens to predict.
    """

    mlm_probability: float = 0.15


@dataclass
class OptimizerConfig:
    """AdamW with decoupled weight decay.

    Attributes:
        lr: peak learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: taken off every matrix at each step, times `lr / peak lr`.
    """

    lr: float = 8e-4
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    weight_decay: float = 1e-5


@dataclass
class SchedulerConfig:
    """Warmup, constant, decay.

    Attributes:
        t_warmup: length of the warmup.
        t_decay: length of the decay at the end.
        alpha_f: share of the peak learning rate at the end.
    """

    t_warmup: str = "0tok"
    t_decay: str = "0tok"
    alpha_f: float = 0.0


@dataclass
class TrainConfig:
    """One training run. Batch sizes are counted in sequences of `max_seq_len` tokens.

    Attributes:
        max_duration: length of the training, in real tokens over all ranks.
        max_seq_len: longest document in tokens; longer ones come in pieces.
        global_train_batch_size: sequences per optimizer step, over all ranks.
        device_train_microbatch_size: sequences per microbatch, which is one packed row.
        mlm_probability: share of tokens to predict.
        run_name: null for a made-up one.
        seed: of weights, order of documents, and masks.
        device: cpu or gpu; null for the GPU where there is one.
        precision: null for amp_bf16 on a GPU and fp32 on a CPU.
        eval_interval: time between evaluations; null for one at the start and one at the end only.
        save_folder: where checkpoints go.
        save_interval: time between checkpoints; null for one at the end only.
        save_overwrite: write over the checkpoints of a run of the same name.
        progress_bar: show one.
        log_to_console: print the metrics.
        console_log_interval: time between two prints.
    """

    max_duration: str = MISSING
    max_seq_len: int = 1024
    global_train_batch_size: int = MISSING
    device_train_microbatch_size: int = MISSING
    mlm_probability: float = 0.3
    run_name: str | None = None
    seed: int = 17
    device: str | None = None
    precision: str | None = None
    eval_interval: str | None = None
    save_folder: str = "runs/{run_name}"
    save_interval: str | None = None
    save_overwrite: bool = False
    progress_bar: bool = True
    log_to_console: bool = False
    console_log_interval: str = "10ba"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModernBertConfig = field(default_factory=ModernBertConfig)
    train_loader: TrainLoaderConfig = field(default_factory=TrainLoaderConfig)
    eval_loader: EvalLoaderConfig = field(default_factory=EvalLoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def row_len(self) -> int:
        """Slots per packed row."""
        return self.device_train_microbatch_size * self.max_seq_len

    def precision_on(self, device: str) -> str:
        """The precision to train in on a device, cpu or gpu.

        Raises:
            ConfigError: the device cannot.
        """
        possible = PRECISIONS[device]
        if self.precision not in (None, *possible):
            raise ConfigError(
                f"precision={self.precision}: on the {device} it must be {' or '.join(possible)}"
            )
        return self.precision or possible[0]

    def device_batch_size(self, world_size: int) -> int:
        """Sequences per optimizer step on one rank."""
        return self.global_train_batch_size // world_size

    def buffer_size(self, world_size: int) -> int:
        """Documents that may wait for a row on one rank."""
        return self.train_loader.packing_buffer_size or 10 * self.device_batch_size(world_size)


def load(path: str, overrides: Sequence[str], world_size: int) -> TrainConfig:
    """Read an experiment file.

    Args:
        path: YAML file.
        overrides: `key=value`, nested keys with dots; they win over the file.
        world_size: ranks that will train.

    Raises:
        ConfigError: as this module says.
    """
    config = OmegaConf.structured(TrainConfig)
    try:
        config = OmegaConf.merge(config, _read(path), _parse_overrides(overrides))
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    assert isinstance(made, TrainConfig)
    _check(made, world_size)
    return made


def _read(path: str) -> DictConfig:
    try:
        read = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text; give a YAML file") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(read, DictConfig):
        raise ConfigError(f"{path}: holds no keys; give a YAML file of 'key: value' lines")
    return read


def _parse_overrides(overrides: Sequence[str]) -> DictConfig:
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override}: an override is written key=value")
    return OmegaConf.from_dotlist(list(overrides))


def _one_line(error: OmegaConfBaseException) -> str:
    """Key, what is wrong and what would do."""
    key = str(error.full_key or error.key or "")
    if type(error).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        known = _keys(TrainConfig)
        near = difflib.get_close_matches(key, known, n=1) or [k for k in known if k.endswith(f".{key}")][:1]
        return f"{key}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")
    if type(error).__name__ == "MissingMandatoryValue":
        return f"{key}: is missing; set it in the file or as {key}=VALUE"
    reason = str(error.msg or error).split("\n")[0]
    return f"{key}: {reason}"


def _keys(schema: Any, prefix: str = "") -> list[str]:
    """All keys of a dataclass, nested ones with dots."""
    keys = []
    for each in fields(schema):
        keys.append(prefix + each.name)
        if is_dataclass(each.type):
            keys.extend(_keys(each.type, f"{prefix}{each.name}."))
    return keys


def _check(config: TrainConfig, world_size: int) -> None:
    """What must hold between the keys; what concerns packing alone is the packer's to check."""
    for key, least in (
        ("max_seq_len", SHORTEST_SEQ_LEN),
        ("device_train_microbatch_size", 1),
        ("data.vocab_size", SMALLEST_VOCAB),
        ("train_loader.packing_prefetch_factor", 1),
        ("optimizer.weight_decay", 0),
        ("scheduler.alpha_f", 0),
    ):
        if attrgetter(key)(config) < least:
            raise ConfigError(f"{key}={attrgetter(key)(config)}: must be at least {least}")
    micro = config.device_train_microbatch_size
    for key in ("global_train_batch_size", "train_loader.batch_size_warmup_min_size"):
        size = attrgetter(key)(config)
        if size is not None and (size < 1 or size % (micro * world_size)):
            raise ConfigError(
                f"{key}={size}: must be a multiple of {micro * world_size}, which is {world_size} ranks "
                f"times device_train_microbatch_size={micro}"
            )
    minimum = config.train_loader.batch_size_warmup_min_size
    if minimum is not None and minimum > config.global_train_batch_size:
        raise ConfigError(
            f"train_loader.batch_size_warmup_min_size={minimum}: must not exceed "
            f"global_train_batch_size={config.global_train_batch_size}"
        )
    for key in ("mlm_probability", "eval_loader.mlm_probability"):
        if not 0 < attrgetter(key)(config) <= 1:
            raise ConfigError(f"{key}={attrgetter(key)(config)}: must lie above 0 and not above 1")
    if config.model.vocab_size < config.data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: must be at least "
            f"data.vocab_size={config.data.vocab_size}"
        )
    if config.device not in (None, *PRECISIONS):
        raise ConfigError(
            f"device={config.device}: must be cpu or gpu, or null for the GPU where there is one"
        )
    for key in ("eval_interval", "save_interval", "console_log_interval"):
        if attrgetter(key)(config) is not None:
            _check_interval(key, attrgetter(key)(config))
    _check_times(config)


def _check_interval(key: str, interval: str) -> None:
    from composer import Time, TimeUnit  # late, as in schedules

    try:
        time = Time.from_timestring(interval)
    except (ValueError, TypeError, OverflowError):
        time = Time(0, TimeUnit.TOKEN)
    if time.value <= 0 or time.unit not in (TimeUnit.TOKEN, TimeUnit.SAMPLE, TimeUnit.BATCH):
        raise ConfigError(f"{key}={interval}: give a time such as 1000000tok, 1000sp or 100ba")


def _check_times(config: TrainConfig) -> None:
    """The clock of a run is its real tokens."""
    try:
        duration, warmup, decay = (
            local_tokens(key, attrgetter(key)(config), world_size=1)
            for key in ("max_duration", "scheduler.t_warmup", "scheduler.t_decay")
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if duration == 0:
        raise ConfigError(
            f"max_duration={config.max_duration}: give the tokens to train on, such as 4000000tok"
        )
    if warmup + decay > duration:
        raise ConfigError(
            f"scheduler.t_warmup={config.scheduler.t_warmup}, scheduler.t_decay={config.scheduler.t_decay}: "
            f"together they must not exceed max_duration={config.max_duration}"
        )
