"""The keys of a run: names, types, defaults, and which values each may have.

A duration is a number and a unit: `1000tok` real tokens, `50sp` documents, `10ba` batches, or `0.1dur`, a tenth of the
training. Tokens and documents are counted over all ranks. A sequence is room for `max_seq_len` tokens.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from omegaconf import MISSING

from composer_packing.common.errors import ConfigError
from composer_packing.common.resume import Resume, key
from composer_packing.config.limits import LARGEST, DurationRange, OneOf, Range
from composer_packing.config.sources import DataConfig
from composer_packing.model.config import ModernBertConfig
from composer_packing.packing.options import Objective, PackingStrategy

PRECISIONS = {"cpu": ("fp32",), "gpu": ("amp_bf16", "amp_fp16", "fp32")}
"""The precisions that each device can train in. The first is the default."""

SHORTEST_SEQ_LEN = 8
"""Room for [CLS], [SEP] and a few words. Shorter sequences hold nothing to learn from."""

MOST_WORKERS = 256
"""Worker processes of a rank. A larger number is taken for a typing mistake."""

Count = Annotated[int, Range(at_least=1, below=LARGEST)]
NotNegative = Annotated[float, Range(at_least=0, below=LARGEST)]
Ratio = Annotated[float, Range(above=0, at_most=1)]
PositiveDuration = Annotated[str, DurationRange(at_least=1)]
DurationOrZero = Annotated[str, DurationRange(at_least=0)]


@dataclass
class TrainLoaderConfig:
    """How the training documents are read and packed.

    Attributes:
        num_workers: processes per rank that read and tokenize documents. 0: the packing thread reads them itself. null:
            0 if token ids are read from disk as they are, otherwise a number that depends on the cores.
        prefetch_factor: source batches that each worker keeps ready.
        packing_strategy: how documents find their row. subset_sum fills rows to the last slot and nearly keeps the
            order of the data; best_fit is the published way.
        packing_buffer_size: documents per rank that may wait for a row. It must exceed the sequences of one rank's
            batch. null: ten times those.
        packing_prefetch_factor: packed batches per rank that a background thread keeps ready. 0: no thread. On several
            ranks it is one batch until batch-size warmup and mask-ratio cooldown are over.
        batch_size_warmup_min_size: sequences per optimizer step at the start, over all ranks. The size grows to
            `global_train_batch_size`. null: no warmup.
        batch_size_warmup_tokens: duration of the batch-size warmup. null: no warmup.
        masking_ratio_cooldown_tokens: duration of the mask-ratio cooldown, in which the ratio falls from
            `mlm_probability` to `final_masking_ratio`. null: no cooldown.
        masking_ratio_cooldown_start_tokens: duration before the cooldown, in the same unit. null: 0.
        final_masking_ratio: mask ratio after the cooldown, above 0 and at most `mlm_probability`. null: no cooldown.
        masking_cooldown_schedule_type: shape of the cooldown: linear, or stair.
        masking_ratio_step_size: height of one stair, above 0 and at most 1. null: the cooldown is linear.
    """

    num_workers: Annotated[int, Range(at_least=0, at_most=MOST_WORKERS)] | None = key(None, Resume.FREE)
    prefetch_factor: Count = key(2, Resume.FREE)
    packing_strategy: Annotated[str, OneOf(tuple(PackingStrategy))] = key("subset_sum", Resume.BATCHES)
    packing_buffer_size: int | None = key(None, Resume.BATCHES)
    packing_prefetch_factor: Annotated[int, Range(at_least=0, below=LARGEST)] = key(5, Resume.FREE)
    batch_size_warmup_min_size: int | None = key(None, Resume.BATCHES)
    batch_size_warmup_tokens: PositiveDuration | None = key(None, Resume.BATCHES)
    masking_ratio_cooldown_tokens: PositiveDuration | None = key(None, Resume.BATCHES)
    masking_ratio_cooldown_start_tokens: DurationOrZero | None = key(None, Resume.BATCHES)
    final_masking_ratio: Ratio | None = key(None, Resume.BATCHES)
    masking_cooldown_schedule_type: str = key("linear", Resume.BATCHES)
    masking_ratio_step_size: float | None = key(None, Resume.BATCHES)


@dataclass
class EvalLoaderConfig:
    """How the held-out documents are evaluated.

    Attributes:
        mlm_probability: share of the tokens to predict if the objective is mlm, above 0 and at most 1.
        max_documents: number of documents to evaluate at most. They are spread evenly over all held-out documents.
    """

    mlm_probability: Ratio = key(0.15, Resume.FREE)
    max_documents: Count = key(10_000, Resume.FREE)


@dataclass
class OptimizerConfig:
    """Composer's AdamW with decoupled weight decay.

    Attributes:
        lr: peak learning rate.
        betas: decay rates of the first and the second moment, each at least 0 and below 1.
        eps: term that is added to the denominator of the update.
        weight_decay: share that each step takes off every matrix, times the learning rate as a share of its peak. Norms
            and biases do not decay.
    """

    lr: NotNegative = key(8e-4, Resume.TRAINING)
    betas: Annotated[tuple[float, float], Range(at_least=0, below=1)] = key((0.9, 0.98), Resume.TRAINING)
    eps: NotNegative = key(1e-6, Resume.TRAINING)
    weight_decay: NotNegative = key(1e-5, Resume.TRAINING)


@dataclass
class SchedulerConfig:
    """The learning rate: a straight line up, then constant, then down by one minus a square root.

    Attributes:
        t_warmup: duration of the rise at the start of the training. 0tok: no rise.
        t_decay: duration of the fall at the end of the training, in `dur` or the unit of `max_duration`. 0tok: no fall.
        alpha_f: learning rate at the end, as a share of its peak.
    """

    t_warmup: DurationOrZero = key("0tok", Resume.FREE)
    t_decay: DurationOrZero = key("0tok", Resume.FREE)
    alpha_f: NotNegative = key(0.0, Resume.FREE)


@dataclass
class TrainConfig:
    """One training run.

    Attributes:
        objective: what the model learns. mlm: hidden tokens from both sides. causal: each next token. sft: each next
            token of a response. causal and sft need `model.causal: true`.
        max_duration: length of the training, in tok, sp or ba. Required.
        max_seq_len: longest document in tokens, at least 8. Longer documents come in pieces; longer examples of
            fine-tuning are cut.
        global_train_batch_size: sequences per optimizer step, over all ranks. It must be a multiple of the ranks times
            `device_train_microbatch_size`. Required.
        device_train_microbatch_size: sequences that one packed row has room for. A row is a microbatch. Required.
        mlm_probability: share of the training tokens to predict if the objective is mlm, above 0 and at most 1.
        load_path: checkpoint to start from, a path or an object-store address. null: start from the beginning. A
            checkpoint is a pickle, and reading it runs the code that it holds: give only checkpoints that you trust.
        load_weights_only: take only the weights from `load_path`. Data, clock and optimizer start from the beginning.
        restart_changed_data: if the data or a key that batches follow from has changed since the checkpoint, read the
            data from its start. Clock, schedules and optimizer still resume. false: such a change is an error.
        autoresume: resume from the last checkpoint in `save_folder`, if there is one, and ignore `load_path`. It needs
            a `run_name`. null: true if there is a `run_name` and `save_overwrite` is false.
        run_name: name of the run. null: Composer makes one up, and the run does not resume by itself.
        seed: seed of the initial weights, the order of the documents, and the masks; at least 0 and below 2**32.
        device: cpu or gpu. null: the GPU, if the machine has one.
        precision: fp32, or on a GPU also amp_bf16 or amp_fp16. null: amp_bf16 on a GPU, fp32 on a CPU.
        eval_interval: duration between evaluations. null: evaluate only at the start and at the end.
        save_folder: folder or object-store address for checkpoints. `{run_name}` stands for the name of the run.
        save_interval: duration between checkpoints. null: write one at the end only.
        save_overwrite: train from the beginning and write over checkpoints of an earlier run with the same name.
        save_num_checkpoints_to_keep: number of checkpoints that stay, of those that this process has written. -1: all.
        progress_bar: show a progress bar.
        log_to_console: print the metrics to standard error.
        console_log_interval: duration between two prints of the metrics.
        data: where the documents come from.
        model: shape of the encoder.
        train_loader: how the training documents are read and packed.
        eval_loader: how the held-out documents are evaluated.
        optimizer: settings of AdamW.
        scheduler: the learning rate over the training.
    """

    objective: Annotated[str, OneOf(tuple(Objective))] = key("mlm", Resume.BATCHES)
    max_duration: PositiveDuration = key(MISSING, Resume.FREE)
    max_seq_len: Annotated[int, Range(at_least=SHORTEST_SEQ_LEN, below=LARGEST)] = key(1024, Resume.BATCHES)
    global_train_batch_size: int = key(MISSING, Resume.BATCHES)
    device_train_microbatch_size: Count = key(MISSING, Resume.BATCHES)
    mlm_probability: Ratio = key(0.3, Resume.BATCHES)
    load_path: str | None = key(None, Resume.FREE)
    load_weights_only: bool = key(False, Resume.FREE)
    restart_changed_data: bool = key(False, Resume.FREE)
    autoresume: bool | None = key(None, Resume.FREE)
    run_name: str | None = key(None, Resume.FREE)
    seed: Annotated[int, Range(at_least=0, below=LARGEST)] = key(17, Resume.BATCHES)
    device: Annotated[str, OneOf(tuple(PRECISIONS))] | None = key(None, Resume.FREE)
    precision: str | None = key(None, Resume.FREE)
    eval_interval: PositiveDuration | None = key(None, Resume.FREE)
    save_folder: str = key("runs/{run_name}", Resume.FREE)
    save_interval: PositiveDuration | None = key(None, Resume.FREE)
    save_overwrite: bool = key(False, Resume.FREE)
    save_num_checkpoints_to_keep: int = key(-1, Resume.FREE)
    progress_bar: bool = key(True, Resume.FREE)
    log_to_console: bool = key(False, Resume.FREE)
    console_log_interval: PositiveDuration = key("10ba", Resume.FREE)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModernBertConfig = field(default_factory=ModernBertConfig)
    train_loader: TrainLoaderConfig = field(default_factory=TrainLoaderConfig)
    eval_loader: EvalLoaderConfig = field(default_factory=EvalLoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def cache_folder(self) -> Path:
        """Folder for what is made of the data: tokenized texts and downloads."""
        return Path(self.data.cache_folder)

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from the last checkpoint in its folder, if there is one."""
        return (self.run_name is not None and not self.save_overwrite) if self.autoresume is None else self.autoresume

    @property
    def row_len(self) -> int:
        """Slots per packed row."""
        return self.device_train_microbatch_size * self.max_seq_len

    def precision_on(self, device: str) -> str:
        """The precision to train in on a device, cpu or gpu.

        Raises:
            ConfigError: the device does not have the precision that the configuration asks for.
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
