"""The lines that a run prints at its start and at its end."""

import math

import torch
from torch import nn

from composer_packing.common.addresses import is_address
from composer_packing.common.durations import UNITS, Duration, parse_duration
from composer_packing.config.schema import TrainConfig
from composer_packing.data.open_source import Split, TrainingData
from composer_packing.model.attention import describe_attention
from composer_packing.packing.options import Objective
from composer_packing.training.monitor import RunSummary


def start_lines(
    config: TrainConfig,
    data: TrainingData,
    model: nn.Module,
    device: str,
    precision: str,
    world_size: int,
    first_batch: int = 0,
) -> str:
    """What the run is about to do, line by line: device, model, data, batches, duration, and schedules.

    Args:
        config: the run, with its durations resolved.
        data: the documents to train and to evaluate on.
        model: the model to train.
        device: Composer's name of the device, cpu or gpu.
        precision: Composer's name of the precision.
        world_size: number of ranks.
        first_batch: batches that were trained on before; above 0 if the run resumes.
    """
    return "\n".join(
        [
            f"device     {world_size} x {device}, {precision}, attention: {_attention_on(device, precision)}",
            f"model      {_model_in_words(config, model)}",
            f"objective  {_objective_in_words(config)}",
            *_checkpoint_lines(config, first_batch),
            f"data       {data.train.summary}",
            f"held out   {_held_out_in_words(config, data.val)}",
            f"batch      {_batch_in_words(config)}",
            f"duration   {_duration_in_words(config, data.train)}",
            f"schedule   {_learning_rate_in_words(config)}",
            *_batch_size_lines(config),
            *_mask_ratio_lines(config),
        ]
    )


def _attention_on(device: str, precision: str) -> str:
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "fp16" in precision else torch.float32
    return describe_attention(torch.device("cuda" if device == "gpu" else "cpu"), dtype)


def _model_in_words(config: TrainConfig, model: nn.Module) -> str:
    """Size, and the loss of a model that knows nothing."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{num_parameters:,} parameters, ln(vocabulary) = {math.log(config.model.vocab_size):.2f}"


def _objective_in_words(config: TrainConfig) -> str:
    return {
        Objective.MLM: f"mlm, predict {config.mlm_probability:.0%} of the tokens",
        Objective.CAUSAL: "causal, predict the token after each",
        Objective.SFT: "sft, predict the tokens of each response",
    }[Objective(config.objective)]


def _checkpoint_lines(config: TrainConfig, first_batch: int) -> list[str]:
    """Where the run starts from, if it is not the beginning."""
    if first_batch:
        return [f"resumed    after batch {first_batch:,}, from {config.load_path}"]
    if config.load_path is None:
        return []
    return [f"weights    from {config.load_path}; data, clock and optimizer start from the beginning"]


def _held_out_in_words(config: TrainConfig, val: Split) -> str:
    held_out = len(val.documents)
    return f"{min(held_out, config.eval_loader.max_documents):,} of {held_out:,} documents to evaluate on"


def _batch_in_words(config: TrainConfig) -> str:
    rows = config.global_train_batch_size // config.device_train_microbatch_size
    return f"{rows} rows of {config.row_len} slots = {_slots_per_batch(config):,} slots"


def _slots_per_batch(config: TrainConfig) -> int:
    return config.global_train_batch_size * config.max_seq_len


def _duration_in_words(config: TrainConfig, train: Split) -> str:
    """Length of the training, and how many batches and epochs it comes to."""
    duration, slots = parse_duration("max_duration", config.max_duration), _slots_per_batch(config)
    tokens_each = {"tok": 1.0, "ba": float(slots), "sp": train.num_tokens / train.per_epoch}[duration.unit]
    tokens = duration.count * tokens_each
    batches, epochs = tokens / slots, tokens / train.num_tokens
    return f"{_in_words(duration)} = about {batches:,.0f} full batches = {epochs:.2f} epochs"


def _learning_rate_in_words(config: TrainConfig) -> str:
    warmup = parse_duration("t_warmup", config.scheduler.t_warmup)
    decay = parse_duration("t_decay", config.scheduler.t_decay)
    up = f"rises over {_in_words(warmup)}" if warmup.count else "is constant"
    return f"learning rate {up}" + (f", falls over the last {_in_words(decay)}" if decay.count else "")


def _batch_size_lines(config: TrainConfig) -> list[str]:
    """The batch-size warmup, if there is one."""
    loader = config.train_loader
    if loader.batch_size_warmup_tokens is None:
        return []
    end = parse_duration("batch_size_warmup_tokens", loader.batch_size_warmup_tokens)
    sizes = f"{loader.batch_size_warmup_min_size} -> {config.global_train_batch_size} sequences"
    return [f"schedule   batch size {sizes} by {_end_in_words(end, config)}"]


def _mask_ratio_lines(config: TrainConfig) -> list[str]:
    """The mask-ratio cooldown, if there is one."""
    loader = config.train_loader
    if loader.masking_ratio_cooldown_tokens is None:
        return []
    start = parse_duration("start", loader.masking_ratio_cooldown_start_tokens or 0)
    cooldown = parse_duration("cooldown", loader.masking_ratio_cooldown_tokens)
    end = Duration(start.count + cooldown.count, cooldown.unit)
    ratios = f"{config.mlm_probability} -> {loader.final_masking_ratio}"
    return [f"schedule   mask ratio {ratios} from {start.count:,} to {_end_in_words(end, config)}"]


def _end_in_words(end: Duration, config: TrainConfig) -> str:
    """Where a schedule ends, and whether the training ends before."""
    whole = parse_duration("max_duration", config.max_duration)
    is_too_late = end.unit == whole.unit and end.count > whole.count
    return _in_words(end) + (", which is after the end of this run" if is_too_late else "")


def _in_words(duration: Duration) -> str:
    return f"{duration.count:,} {UNITS[duration.unit].word}"


def finished_line(config: TrainConfig, resumes_own_run: bool, loss: float | None = None) -> str:
    """Say that there is nothing left to do, and what the user can do instead.

    Args:
        config: the run; its `load_path` is the checkpoint that it started from.
        resumes_own_run: the checkpoint is the last one of this run, and not one that the user named.
        loss: evaluation loss, in nats per target, if the evaluation was all that was left to do.
    """
    evaluated = "" if loss is None else f"evaluation loss      {loss:.3f}\n"
    if not resumes_own_run:
        other = "a longer max_duration continues from there, load_weights_only=true starts again with its weights"
    elif is_address(config.save_folder):
        other = "another run_name trains from the beginning"
    else:
        other = "another run_name or save_overwrite=true trains from the beginning"
    return f"{evaluated}finished   {config.load_path} has reached max_duration={config.max_duration}; {other}"


def stopped_line(config: TrainConfig, batch: int, checkpoint: str | None) -> str:
    """Say after which batch SIGTERM ended the run, and how to resume it.

    Args:
        config: the run.
        batch: batches trained on.
        checkpoint: path or object-store address of the last checkpoint; None if there is none.
    """
    stopped = f"stopped    by SIGTERM after batch {batch:,}"
    if checkpoint is None:
        return f"{stopped}; there is no checkpoint yet"
    if config.resumes:
        return f"{stopped}; the same command resumes from {checkpoint}"
    name = "another run_name and " if is_address(config.save_folder) else ""
    return f"{stopped}; resume with {name}load_path={checkpoint}"


def end_lines(summary: RunSummary, loss_before: float | None, loss_after: float, checkpoint: str | None) -> str:
    """What the run trained on, how well it packed, how fast it was and what it learned.

    Args:
        summary: figures of the fit.
        loss_before: evaluation loss at the start, in nats per target; None if the run resumed without an evaluation.
        loss_after: evaluation loss at the end.
        checkpoint: path or object-store address of the last checkpoint; None if there is none.
    """
    return "\n".join(
        [
            f"trained on           {summary.num_documents:,} documents and pieces, {summary.num_tokens:,} tokens, "
            f"{summary.num_batches:,} batches",
            f"packing efficiency   {summary.packing_efficiency:.4f} of the slots held a token",
            f"order of the data    documents moved past {summary.mean_displacement:.0f} others on average and waited "
            f"{summary.longest_wait_batches} batches at most",
            f"tokens per second    {summary.tokens_per_second:,.0f}",
            f"waiting for data     {summary.data_wait_share:.2%} of the time",
            f"evaluation loss      {'' if loss_before is None else f'{loss_before:.3f} -> '}{loss_after:.3f}",
            f"checkpoint           {checkpoint or 'none'}",
        ]
    )
