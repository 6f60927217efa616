"""One training run from beginning to end: build its parts, evaluate, fit, evaluate, and say what happened."""

import contextlib
import os
from dataclasses import dataclass

import torch
from composer import Evaluator, Timestamp, Trainer
from composer.optim import DecoupledAdamW
from composer.utils import dist, get_device, reproducibility

from composer_packing.batch.lockstep import Lockstep, Stopped
from composer_packing.checkpointing.identity import RunIdentity
from composer_packing.checkpointing.packed_dataset import PackedDataset, settings_that_must_match
from composer_packing.checkpointing.resumption import Resumption
from composer_packing.checkpointing.run_folder import RunFolder, check_save_folder
from composer_packing.checkpointing.saving import checkpoint_arguments, find_last_saved, shorten_save_errors
from composer_packing.checkpointing.sigterm import EXIT_CODE, StopAtSigterm, UntilStopped
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.data.open_source import TrainingData, open_source
from composer_packing.packing.options import Objective
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.console import IntervalConsoleLogger, print_on_first_rank
from composer_packing.training.dataspec import packed_dataspec
from composer_packing.training.evaluation import eval_batches, eval_loss, evaluate, evaluation_times
from composer_packing.training.monitor import PackingMonitor
from composer_packing.training.optimizer import WarmupStableDecayScheduler, parameter_groups
from composer_packing.training.report import end_lines, finished_line, start_lines, stopped_line

PROCESS_GROUP_TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others: one machine may build its data long before another."""

CLOSE_TIMEOUT_SECONDS = 5.0
"""How long a rank waits for its packing thread at the end. The other ranks wait for this one."""


def train(config: TrainConfig) -> int:
    """Train as a configuration says, and print what happened. Returns the exit code: 0, or 143 after SIGTERM.

    Raises:
        ConfigError: a mistake that the user can fix.
    """
    device, precision = prepare_process(config)
    folder = RunFolder(config)  # holds the lock until this function returns
    config, checkpoint = folder.config, folder.read_checkpoint()
    if checkpoint is not None and checkpoint.is_end_of(config):
        print_on_first_rank(finished_line(config, folder.resumes_own_run))
        return 0
    data = open_source(config)
    if checkpoint is not None:
        checkpoint.check_tokenizer(data.tokenizer.text)
    run = build_run(config, data, device, precision)
    try:
        print_on_first_rank(
            start_lines(config, data, run.model, device, precision, dist.get_world_size(), run.clock.batch.value)
        )
        loss_before = evaluate(run.trainer) if run.clock.batch.value == 0 or run.stopping.owes_evaluation else None
        if run.clock >= config.max_duration:  # the evaluation was all that was left to do
            print_on_first_rank(finished_line(config, folder.resumes_own_run, loss_before))
            return 0
        with contextlib.suppress(Stopped), shorten_save_errors(config):
            run.trainer.fit()
    finally:
        run.close()
    return report_end(run, loss_before)


@dataclass(frozen=True)
class Run:
    """The parts of a run that are asked for after it is built.

    Attributes:
        config: the run, with its durations resolved.
        model: the model to train.
        batches: the packed batches to train on.
        held_out: the packed batches to evaluate on.
        stopping: ends the run at SIGTERM.
        monitor: sums up the fit.
        trainer: Composer's trainer.
    """

    config: TrainConfig
    model: PackedLanguageModel
    batches: Lockstep
    held_out: UntilStopped
    stopping: StopAtSigterm
    monitor: PackingMonitor
    trainer: Trainer

    @property
    def clock(self) -> Timestamp:
        """What has been trained on so far."""
        return self.trainer.state.timestamp

    def close(self) -> None:
        """End the engine and the packing thread."""
        # trainer.close() would wait for the other ranks, also when this rank has failed.
        self.trainer.engine.close()
        self.batches.close(CLOSE_TIMEOUT_SECONDS)


def prepare_process(config: TrainConfig) -> tuple[str, str]:
    """Set up threads, ranks and random numbers, and check where checkpoints go; returns device and precision.

    Raises:
        ConfigError: the device is missing or lacks the precision, or the `save_folder` cannot be written.
    """
    if config.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("device=gpu: this machine has no GPU; leave the key out, or give cpu")
    device = get_device(config.device)
    precision = config.precision_on(device.name)
    if device.name == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // dist.get_local_world_size()))
    dist.initialize_dist(device, timeout=PROCESS_GROUP_TIMEOUT_SECONDS)
    reproducibility.seed_all(config.seed)
    check_save_folder(config.save_folder)
    return device.name, precision


def build_run(config: TrainConfig, data: TrainingData, device: str, precision: str) -> Run:
    """Build batches, model, callbacks and trainer; the trainer loads the checkpoint, if there is one.

    Args:
        config: the run, with its durations resolved.
        data: the documents to train and to evaluate on.
        device: Composer's name of the device, cpu or gpu.
        precision: Composer's name of the precision.

    Raises:
        ConfigError: the packer refuses the settings, the held-out documents have no target, or the data of the
            checkpoint has changed.
    """
    tokenizer, is_masked = data.tokenizer, config.objective == Objective.MLM
    batches = train_batches(data.train.documents, config, tokenizer.vocabulary, pin_memory=device == "gpu")
    settings = settings_that_must_match(config, tokenizer.fingerprint, data.train.documents.fingerprint)
    packed = PackedDataset(batches, settings, config.restart_changed_data)
    held_out = UntilStopped(eval_batches(data.val.documents, config, tokenizer.vocabulary), batches)
    model = PackedLanguageModel(config.model)
    monitor = PackingMonitor(batches, config.mlm_probability if is_masked else None)
    stopping = StopAtSigterm(batches, config.save_interval or config.max_duration, held_out)
    trainer = Trainer(
        model=model,
        train_dataloader=packed_dataspec(packed),
        eval_dataloader=Evaluator(label="eval", dataloader=packed_dataspec(held_out)),
        optimizers=DecoupledAdamW(parameter_groups(model, config.optimizer.weight_decay), **vars(config.optimizer)),
        schedulers=WarmupStableDecayScheduler(**vars(config.scheduler)),
        max_duration=config.max_duration,
        eval_interval=evaluation_times(config.eval_interval or config.max_duration),
        accumulate_train_batch_on_tokens=True,
        device_train_microbatch_size=1,  # a row is a microbatch
        device=device,
        precision=precision,
        seed=config.seed,
        run_name=config.run_name,
        callbacks=[monitor, RunIdentity(tokenizer.text, config), Resumption(packed), stopping],
        loggers=[IntervalConsoleLogger(config.console_log_interval)] if config.log_to_console else [],
        progress_bar=config.progress_bar,
        **checkpoint_arguments(config, stopping.is_to_save),
    )
    return Run(config, model, batches, held_out, stopping, monitor, trainer)


def report_end(run: Run, loss_before: float | None) -> int:
    """Print how the fit ended; returns the exit code.

    Args:
        run: the run, after it was closed.
        loss_before: evaluation loss before the fit, in nats per target; None if the run resumed without an evaluation.
    """
    last = find_last_saved(run.config, run.trainer.saved_checkpoints, run.trainer.state.run_name)
    if run.clock < run.config.max_duration or run.held_out.was_broken_off:
        print_on_first_rank(stopped_line(run.config, run.clock.batch.value, last))
        return EXIT_CODE
    assert run.monitor.summary is not None
    print_on_first_rank(end_lines(run.monitor.summary, loss_before, eval_loss(run.trainer), last))
    return 0
