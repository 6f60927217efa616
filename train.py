"""Train a language encoder on packed rows: `composer train.py yamls/pretrain.yaml key=value ...`."""

import os
import sys

# Threads that wait must not spin: the packer's thread wants a core too. OpenMP reads this when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from composer import Evaluator, Trainer
from composer.optim import DecoupledAdamW
from composer.utils import dist, get_device, reproducibility

from composer_packing.callbacks import IntervalConsoleLogger, PackingMonitor
from composer_packing.checkpoints import RunIdentity, check_checkpoint, check_save_folder, check_tokenizer
from composer_packing.composer_model import PackedLanguageModel
from composer_packing.config import ConfigError, TrainConfig
from composer_packing.config_file import load
from composer_packing.data.sources import open_source
from composer_packing.dataspec import eval_batches, packed_dataspec, train_batches
from composer_packing.leaving import run
from composer_packing.optim import WarmupStableDecayScheduler, parameter_groups
from composer_packing.policies import Objective
from composer_packing.report import end_lines, start_lines


def main(arguments: list[str]) -> int:
    """Run the command; the exit code is 0, or 2 for what the user can mend."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: composer train.py FILE.yaml [key=value ...]")
        return 0 if arguments else 2
    try:
        train(load(arguments[0], arguments[1:], dist.get_world_size()))
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    return 0


def train(config: TrainConfig) -> None:
    """Build the parts, evaluate, fit, evaluate, and print what happened."""
    if config.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("device=gpu: there is no GPU here; leave the key out or give cpu")
    device = get_device(config.device)
    precision = config.precision_on(device.name)
    if device.name == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // dist.get_local_world_size()))
    dist.initialize_dist(device, timeout=1800.0)  # seconds; one machine may build its data long before another
    reproducibility.seed_all(config.seed)
    check_save_folder(config.save_folder)
    trained_with = None if config.load_path is None else check_checkpoint(config.load_path, config.model)

    data = open_source(config)
    if config.load_path is not None and trained_with is not None:
        check_tokenizer(config.load_path, trained_with, data.tokenizer.text)
    batches = train_batches(data.train.documents, config, data.tokenizer.vocabulary, pin_memory=device.name == "gpu")
    held_out = packed_dataspec(eval_batches(data.val.documents, config, data.tokenizer.vocabulary))
    model, identity = PackedLanguageModel(config.model), RunIdentity(data.tokenizer.text, config.model)
    monitor = PackingMonitor(batches, config.mlm_probability if config.objective == Objective.MLM else None)
    trainer = Trainer(
        model=model,
        train_dataloader=packed_dataspec(batches),
        eval_dataloader=Evaluator(label="eval", dataloader=held_out),
        optimizers=DecoupledAdamW(parameter_groups(model, config.optimizer.weight_decay), **vars(config.optimizer)),
        schedulers=WarmupStableDecayScheduler(**vars(config.scheduler)),
        max_duration=config.max_duration,
        eval_interval=config.eval_interval or config.max_duration,
        accumulate_train_batch_on_tokens=True,
        device_train_microbatch_size=1,  # a row is a microbatch
        device=device,
        precision=precision,
        seed=config.seed,
        run_name=config.run_name,
        callbacks=[monitor, identity],
        loggers=[IntervalConsoleLogger(config.console_log_interval)] if config.log_to_console else [],
        progress_bar=config.progress_bar,
        save_folder=config.save_folder,
        save_interval=config.save_interval or config.max_duration,
        save_overwrite=config.save_overwrite,
        load_path=config.load_path,
        load_weights_only=config.load_weights_only,
    )
    try:
        say(start_lines(config, data, model, device.name, precision, dist.get_world_size()))
        trainer.eval()
        before = eval_loss(trainer)
        trainer.fit()
        after = eval_loss(trainer)
    except FileExistsError as error:
        raise ConfigError(f"save_folder={config.save_folder}: {error}; set run_name or save_overwrite") from error
    finally:
        batches.close()
        trainer.engine.close()  # not trainer.close(), which waits for the other ranks even when this one has failed
    assert monitor.summary is not None
    say(end_lines(monitor.summary, before, after, trainer.saved_checkpoints))


def eval_loss(trainer: Trainer) -> float:
    """Cross entropy per target of the last evaluation, over all ranks; every rank must ask."""
    return float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())


def say(text: str) -> None:
    """Print on the first rank."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    run(main, sys.argv[1:])
