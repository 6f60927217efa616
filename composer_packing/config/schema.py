"""The schema of an experiment: its keys, their types and defaults.

Whatever is wrong is a `ConfigError` of one line that names the key, shows the value and says what would do.
`config_file` reads an experiment file into it, `config_check` says what must hold between its values.
"""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from composer_packing.common.errors import ConfigError
from composer_packing.common.resume import Resume, key
from composer_packing.config.sources import DataConfig
from composer_packing.model.config import ModernBertConfig

PRECISIONS = {"cpu": ("fp32",), "gpu": ("amp_bf16", "amp_fp16", "fp32")}
"""What each device can train in, the default first."""


@dataclass
class TrainLoaderConfig:
    """Reading and packing of the training documents.

    Attributes:
        num_workers: processes per rank that read and tokenize; 0 for none, the packing thread reads itself; null for
            none where ids are read from disk as they are, and for a number by the cores otherwise.
        prefetch_factor: source batches that each of them keeps ready.
        packing_strategy: subset_sum, or best_fit as published.
        packing_buffer_size: documents that may wait for a row, per rank; null for ten batches.
        packing_prefetch_factor: packed batches kept ready by the background thread; 0 for no thread.
        batch_size_warmup_min_size: global batch size at the start, in sequences; null for no warmup.
        batch_size_warmup_tokens: length of that warmup.
        masking_ratio_cooldown_tokens: length of the mask-ratio cooldown; null for none.
        masking_ratio_cooldown_start_tokens: when it starts.
        final_masking_ratio: the ratio after it.
        masking_cooldown_schedule_type: linear, or stair.
        masking_ratio_step_size: height of a stair.
    """

    num_workers: int | None = key(None, Resume.FREE)
    prefetch_factor: int = key(2, Resume.FREE)
    packing_strategy: str = key("subset_sum", Resume.BATCHES)
    packing_buffer_size: int | None = key(None, Resume.BATCHES)
    packing_prefetch_factor: int = key(5, Resume.FREE)
    batch_size_warmup_min_size: int | None = key(None, Resume.BATCHES)
    batch_size_warmup_tokens: str | None = key(None, Resume.BATCHES)
    masking_ratio_cooldown_tokens: str | None = key(None, Resume.BATCHES)
    masking_ratio_cooldown_start_tokens: str | None = key(None, Resume.BATCHES)
    final_masking_ratio: float | None = key(None, Resume.BATCHES)
    masking_cooldown_schedule_type: str = key("linear", Resume.BATCHES)
    masking_ratio_step_size: float | None = key(None, Resume.BATCHES)


@dataclass
class EvalLoaderConfig:
    """Evaluation on the held-out documents.

    Attributes:
        mlm_probability: share of tokens to predict, where the objective is mlm.
        max_documents: how many of them at most, evenly over all.
    """

    mlm_probability: float = key(0.15, Resume.FREE)
    max_documents: int = key(10_000, Resume.FREE)


@dataclass
class OptimizerConfig:
    """AdamW with decoupled weight decay.

    Attributes:
        lr: peak learning rate.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: taken off every matrix at each step, times `lr / peak lr`.
    """

    lr: float = key(8e-4, Resume.TRAINING)
    betas: tuple[float, float] = key((0.9, 0.98), Resume.TRAINING)
    eps: float = key(1e-6, Resume.TRAINING)
    weight_decay: float = key(1e-5, Resume.TRAINING)


@dataclass
class SchedulerConfig:
    """Warmup, constant, decay.

    Attributes:
        t_warmup: length of the warmup.
        t_decay: length of the decay at the end.
        alpha_f: share of the peak learning rate at the end.
    """

    t_warmup: str = key("0tok", Resume.FREE)
    t_decay: str = key("0tok", Resume.FREE)
    alpha_f: float = key(0.0, Resume.FREE)


@dataclass
class TrainConfig:
    """One training run. Batch sizes are in sequences of `max_seq_len` tokens, durations in any unit of `times`.

    Attributes:
        max_duration: length of the training.
        objective: mlm, causal or sft; the last two need `model.causal`.
        max_seq_len: longest document in tokens; longer ones come in pieces, examples of fine-tuning cut.
        global_train_batch_size: sequences per optimizer step, over all ranks.
        device_train_microbatch_size: sequences per microbatch, which is one packed row.
        mlm_probability: share of tokens to predict, where the objective is mlm.
        load_path: checkpoint to start from, a path or an address such as s3://bucket/file. To read a checkpoint runs
            the code that it holds (it is a pickle): give only checkpoints that you trust.
        load_weights_only: take only the weights from it; data, clock and optimizer start anew.
        restart_changed_data: where the data of a checkpoint cannot go on, as it or a setting that batches follow from
            has changed, read the data from its start; clock, schedules and optimizer go on.
        autoresume: go on from the last checkpoint in `save_folder`, if there is one, whatever `load_path` says; null
            for true where there is a `run_name` and `save_overwrite` is false.
        run_name: null for a made-up one.
        seed: of weights, order of documents, and masks.
        device: cpu or gpu; null for the GPU where there is one.
        precision: null for amp_bf16 on a GPU and fp32 on a CPU.
        eval_interval: time between evaluations; null for one at the start and one at the end only.
        save_folder: where checkpoints go.
        save_interval: time between checkpoints; null for one at the end only.
        save_overwrite: write over the checkpoints of a run of the same name.
        save_num_checkpoints_to_keep: how many of those that this process has written; -1 for all.
        progress_bar: show one.
        log_to_console: print the metrics.
        console_log_interval: time between two prints.
    """

    objective: str = key("mlm", Resume.BATCHES)
    max_duration: str = key(MISSING, Resume.FREE)
    max_seq_len: int = key(1024, Resume.BATCHES)
    global_train_batch_size: int = key(MISSING, Resume.BATCHES)
    device_train_microbatch_size: int = key(MISSING, Resume.BATCHES)
    mlm_probability: float = key(0.3, Resume.BATCHES)
    load_path: str | None = key(None, Resume.FREE)
    load_weights_only: bool = key(False, Resume.FREE)
    restart_changed_data: bool = key(False, Resume.FREE)
    autoresume: bool | None = key(None, Resume.FREE)
    run_name: str | None = key(None, Resume.FREE)
    seed: int = key(17, Resume.BATCHES)
    device: str | None = key(None, Resume.FREE)
    precision: str | None = key(None, Resume.FREE)
    eval_interval: str | None = key(None, Resume.FREE)
    save_folder: str = key("runs/{run_name}", Resume.FREE)
    save_interval: str | None = key(None, Resume.FREE)
    save_overwrite: bool = key(False, Resume.FREE)
    save_num_checkpoints_to_keep: int = key(-1, Resume.FREE)
    progress_bar: bool = key(True, Resume.FREE)
    log_to_console: bool = key(False, Resume.FREE)
    console_log_interval: str = key("10ba", Resume.FREE)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModernBertConfig = field(default_factory=ModernBertConfig)
    train_loader: TrainLoaderConfig = field(default_factory=TrainLoaderConfig)
    eval_loader: EvalLoaderConfig = field(default_factory=EvalLoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def cache_folder(self) -> Path:
        """Where what is made of the data is kept."""
        return Path(self.data.cache_folder)

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from the last checkpoint in its folder."""
        return (self.run_name is not None and not self.save_overwrite) if self.autoresume is None else self.autoresume

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
