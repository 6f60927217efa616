"""The schema of an experiment: its keys, their types and defaults, and what must hold between them.

Whatever is wrong is a `ConfigError` of one line that names the key, shows the value and says what would do.
`config_file` reads an experiment file into it.
"""

import copy
from dataclasses import dataclass, field
from operator import attrgetter

from omegaconf import MISSING

from composer_packing.model import ModernBertConfig
from composer_packing.times import Duration, duration_of

SHORTEST_SEQ_LEN = 8
"""[CLS], [SEP] and a few words: below this there is nothing to learn from."""

SMALLEST_VOCAB = 512
"""The special tokens and all 256 bytes, and some room for words."""

LARGEST = 2**32
"""What every number must stay below; a seed is the strictest."""

PRECISIONS = {"cpu": ("fp32",), "gpu": ("amp_bf16", "amp_fp16", "fp32")}
"""What each device can train in, the default first."""


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
    """One training run. Batch sizes are in sequences of `max_seq_len` tokens, durations in any unit of `times`.

    Attributes:
        max_duration: length of the training.
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
            raise ConfigError(f"precision={self.precision}: on the {device} it must be {' or '.join(possible)}")
        return self.precision or possible[0]

    def device_batch_size(self, world_size: int) -> int:
        """Sequences per optimizer step on one rank."""
        return self.global_train_batch_size // world_size

    def buffer_size(self, world_size: int) -> int:
        """Documents that may wait for a row on one rank."""
        size = self.train_loader.packing_buffer_size
        return 10 * self.device_batch_size(world_size) if size is None else size


def check(config: TrainConfig, world_size: int) -> None:
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
        ("data.vocab_size", SMALLEST_VOCAB),
        ("train_loader.packing_prefetch_factor", 1),
        ("optimizer.lr", 0),
        ("optimizer.eps", 0),
        ("optimizer.weight_decay", 0),
        ("scheduler.alpha_f", 0),
    ):
        value = attrgetter(key)(config)
        if not least <= value < LARGEST:  # so that nan is refused too
            raise ConfigError(f"{key}={value}: must be at least {least} and below 2**32")
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
    if config.model.vocab_size < config.data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: must be at least data.vocab_size={config.data.vocab_size}"
        )
    if config.device not in (None, *PRECISIONS):
        raise ConfigError(f"device={config.device}: must be cpu or gpu, or null for the GPU where there is one")
    _check_durations(config)


def resolved(config: TrainConfig) -> TrainConfig:
    """The same run with every duration in `tok`, `sp` or `ba`: shares of the training in its own unit.

    Raises:
        ConfigError: a duration is none, or is 0 where that makes no sense.
    """
    config = copy.deepcopy(config)
    length: Duration | None = None
    for key, least in DURATIONS.items():
        parent, _, name = key.rpartition(".")
        holder = attrgetter(parent)(config) if parent else config
        if getattr(holder, name) is None:
            continue
        try:
            duration = duration_of(key, getattr(holder, name), least, length)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        length = length or duration  # `max_duration` comes first
        setattr(holder, name, str(duration))
    return config


def _check_durations(config: TrainConfig) -> None:
    """What must hold between durations; their units are resolved."""
    whole = duration_of("max_duration", config.max_duration)
    scheduler, loader = config.scheduler, config.train_loader
    warmup, decay = duration_of("t_warmup", scheduler.t_warmup), duration_of("t_decay", scheduler.t_decay)
    if decay.count and decay.unit != whole.unit:
        raise ConfigError(
            f"scheduler.t_decay={decay}: counts back from the end at max_duration={whole}; give {whole.unit} or dur"
        )
    if warmup.unit == whole.unit and warmup.count + decay.count > whole.count:
        both = f"scheduler.t_warmup={warmup}, scheduler.t_decay={decay}"
        raise ConfigError(f"{both}: together they must not exceed max_duration={whole}")
    if loader.masking_ratio_cooldown_tokens is not None:
        cooldown = duration_of("cooldown", loader.masking_ratio_cooldown_tokens)
        start = duration_of("start", loader.masking_ratio_cooldown_start_tokens or 0)
        if start.count and start.unit != cooldown.unit:
            raise ConfigError(
                f"train_loader.masking_ratio_cooldown_start_tokens={start}: give it in {cooldown.unit}, as the cooldown"
            )
