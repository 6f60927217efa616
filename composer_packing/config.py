"""The schema of an experiment: its keys, their types and defaults, and what must hold between them.

Whatever is wrong is a `ConfigError` of one line that names the key, shows the value and says what would do.
`config_file` reads an experiment file into it.
"""

from dataclasses import dataclass, field
from operator import attrgetter

from omegaconf import MISSING

from composer_packing.model import ModernBertConfig
from composer_packing.policies import PackingStrategy
from composer_packing.schedules import MaskingSchedule

SHORTEST_SEQ_LEN = 8
"""[CLS], [SEP] and a few words: below this there is nothing to learn from."""

SMALLEST_VOCAB = 512
"""The special tokens and all 256 bytes, and some room for words."""

LARGEST = 2**32
"""What the numbers that `check` bounds must stay below; a seed is the strictest."""

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
        packing_strategy: subset_sum, or best_fit as published.
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

    packing_strategy: str = "subset_sum"
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
    strategy = config.train_loader.packing_strategy
    if strategy not in tuple(PackingStrategy):
        raise ConfigError(f"train_loader.packing_strategy={strategy}: must be subset_sum or best_fit")
    _check_schedules(config)
    if config.model.vocab_size < config.data.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}: must be at least data.vocab_size={config.data.vocab_size}"
        )
    if config.device not in (None, *PRECISIONS):
        raise ConfigError(f"device={config.device}: must be cpu or gpu, or null for the GPU where there is one")


def _check_schedules(config: TrainConfig) -> None:
    """What the packer would refuse too, but under the names of its own arguments."""
    loader = config.train_loader
    for one, other in (
        ("batch_size_warmup_min_size", "batch_size_warmup_tokens"),
        ("final_masking_ratio", "masking_ratio_cooldown_tokens"),
    ):
        if (getattr(loader, one) is None) != (getattr(loader, other) is None):
            missing, given = (one, other) if getattr(loader, one) is None else (other, one)
            raise ConfigError(f"train_loader.{given}={getattr(loader, given)}: needs train_loader.{missing} too")
    final, step = loader.final_masking_ratio, loader.masking_ratio_step_size
    for key in ("masking_ratio_cooldown_start_tokens", "masking_ratio_step_size"):
        if getattr(loader, key) is not None and final is None:
            raise ConfigError(f"train_loader.{key}={getattr(loader, key)}: needs train_loader.final_masking_ratio too")
    if final is not None and final > config.mlm_probability:
        raise ConfigError(
            f"train_loader.final_masking_ratio={final}: must not exceed mlm_probability={config.mlm_probability}"
        )
    shape = loader.masking_cooldown_schedule_type
    if shape not in tuple(MaskingSchedule):
        raise ConfigError(f"train_loader.masking_cooldown_schedule_type={shape}: must be linear or stair")
    if final is not None and (step is not None) != (shape == MaskingSchedule.STAIR):
        raise ConfigError(f"train_loader.masking_ratio_step_size={step}: stair needs it, linear does without")
    if step is not None and not 0 < step <= 1:
        raise ConfigError(f"train_loader.masking_ratio_step_size={step}: must lie above 0 and not above 1")
