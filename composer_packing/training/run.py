"""One run: its parts are built, it evaluates, fits, evaluates again, and says what happened."""

import contextlib
import os

import torch
from composer import Evaluator, Trainer
from composer.optim import DecoupledAdamW
from composer.utils import dist, get_device, reproducibility

from composer_packing.batch.lockstep import Stopped
from composer_packing.checkpointing.identity import RunIdentity
from composer_packing.checkpointing.packed_dataset import PackedDataset, settings_that_must_match
from composer_packing.checkpointing.resumption import Resumption
from composer_packing.checkpointing.run_folder import RunFolder, check_save_folder
from composer_packing.checkpointing.sigterm import EXIT_CODE, StopAtSigterm, UntilStopped
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.data.open_source import open_source
from composer_packing.packing.options import Objective
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.console import IntervalConsoleLogger, print_once
from composer_packing.training.dataspec import packed_dataspec
from composer_packing.training.evaluation import eval_batches, eval_loss, evaluate, evaluation_times
from composer_packing.training.monitor import PackingMonitor
from composer_packing.training.optimizer import WarmupStableDecayScheduler, parameter_groups
from composer_packing.training.report import end_lines, finished_line, start_lines, stopped_line


def train(config: TrainConfig) -> int:
    """Build the parts, evaluate unless a run goes on, fit, evaluate, and print what happened."""
    if config.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("device=gpu: there is no GPU here; leave the key out or give cpu")
    device = get_device(config.device)
    precision = config.precision_on(device.name)
    if device.name == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // dist.get_local_world_size()))
    dist.initialize_dist(device, timeout=1800.0)  # seconds; one machine may build its data long before another
    reproducibility.seed_all(config.seed)
    check_save_folder(config.save_folder)
    folder = RunFolder(config)
    config, checkpoint = folder.config, folder.read_checkpoint()
    if checkpoint is not None and checkpoint.is_end_of(config):
        print_once(finished_line(config, folder.goes_on))
        return 0

    data = open_source(config)
    if checkpoint is not None:
        checkpoint.check_tokenizer(data.tokenizer.text)
    batches = train_batches(data.train.documents, config, data.tokenizer.vocabulary, pin_memory=device.name == "gpu")
    settings = settings_that_must_match(config, data.tokenizer.fingerprint, data.train.documents.fingerprint)
    packed = PackedDataset(batches, settings, config.restart_changed_data)
    held_out = UntilStopped(eval_batches(data.val.documents, config, data.tokenizer.vocabulary), batches)
    model, identity = PackedLanguageModel(config.model), RunIdentity(data.tokenizer.text, config)
    stopping = StopAtSigterm(batches, config.save_interval or config.max_duration, held_out)
    monitor = PackingMonitor(batches, config.mlm_probability if config.objective == Objective.MLM else None)
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
        callbacks=[monitor, identity, Resumption(packed), stopping],
        loggers=[IntervalConsoleLogger(config.console_log_interval)] if config.log_to_console else [],
        progress_bar=config.progress_bar,
        **folder.trainer_settings(stopping),
    )
    clock = trainer.state.timestamp
    try:
        print_once(start_lines(config, data, model, device.name, precision, dist.get_world_size(), clock.batch.value))
        before = evaluate(trainer) if clock.batch.value == 0 or stopping.owes_evaluation else None
        if clock >= config.max_duration:  # the evaluation was left to do
            print_once(finished_line(config, folder.goes_on, before))
            return 0
        with contextlib.suppress(Stopped), folder.errors_in_a_line():
            trainer.fit()
    finally:
        trainer.engine.close()  # not trainer.close(), which waits for the other ranks even when this one has failed
        batches.close(timeout=5.0)  # seconds; a source that is stuck must not keep this rank, for which others wait
    clock, last = trainer.state.timestamp, folder.last_written(trainer.saved_checkpoints, trainer.state.run_name)
    if clock < config.max_duration or held_out.was_broken_off:
        print_once(stopped_line(config, clock.batch.value, last))
        return EXIT_CODE
    assert monitor.summary is not None
    print_once(end_lines(monitor.summary, before, eval_loss(trainer), last))
    return 0
