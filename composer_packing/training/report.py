"""The lines a run prints: what it is about to do, and what it did."""

import math

import torch
from torch import nn

from composer_packing.checkpointing.object_store import is_in_store
from composer_packing.common.durations import UNITS, Duration, parse_duration
from composer_packing.config.schema import TrainConfig
from composer_packing.data.open_source import TrainingData
from composer_packing.model.attention import describe_attention
from composer_packing.packing.options import Objective
from composer_packing.training.monitor import RunSummary

OBJECTIVES = {
    Objective.MLM: "mlm, {config.mlm_probability:.0%} of the tokens",
    Objective.CAUSAL: "causal, the next token of each",
    Objective.SFT: "sft, the next token where it is of a response",
}
"""What is predicted, in words."""


def start_lines(
    config: TrainConfig,
    data: TrainingData,
    model: nn.Module,
    device: str,
    precision: str,
    world_size: int,
    first_batch: int = 0,
) -> str:
    """Device, model, data, how many batches and epochs the duration comes to, and what is scheduled when.

    Args:
        config: the run.
        data: what is read.
        model: what is trained.
        device: Composer's name of it, cpu or gpu.
        precision: Composer's name of it.
        world_size: ranks.
        first_batch: batches trained on before, where a run goes on.
    """
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "fp16" in precision else torch.float32
    attention = describe_attention(torch.device("cuda" if device == "gpu" else "cpu"), dtype)
    duration = parse_duration("max_duration", config.max_duration)
    slots = config.global_train_batch_size * config.max_seq_len
    rows = config.global_train_batch_size // config.device_train_microbatch_size
    tokens_each = {"tok": 1.0, "ba": float(slots), "sp": data.train.num_tokens / data.train.per_epoch}[duration.unit]
    tokens = duration.count * tokens_each
    loader, scheduler, held_out = config.train_loader, config.scheduler, len(data.val.documents)
    warmup, decay = parse_duration("t_warmup", scheduler.t_warmup), parse_duration("t_decay", scheduler.t_decay)
    up = f"up over {_words(warmup)}" if warmup.count else "constant"
    schedules = [f"learning rate {up}" + (f", down over the last {_words(decay)}" if decay.count else "")]
    if loader.batch_size_warmup_tokens is not None:
        end = parse_duration("batch_size_warmup_tokens", loader.batch_size_warmup_tokens)
        schedules.append(
            f"batch size {loader.batch_size_warmup_min_size} -> {config.global_train_batch_size} sequences"
            + _until(end, duration)
        )
    if loader.masking_ratio_cooldown_tokens is not None:
        start = parse_duration("start", loader.masking_ratio_cooldown_start_tokens or 0)
        cooldown = parse_duration("cooldown", loader.masking_ratio_cooldown_tokens)
        schedules.append(
            f"mask ratio {config.mlm_probability} -> {loader.final_masking_ratio} from {start.count:,}"
            + _until(Duration(start.count + cooldown.count, cooldown.unit), duration)
        )
    return "\n".join(
        [
            f"device     {world_size} x {device}, {precision}, attention: {attention}",
            f"model      {num_parameters:,} parameters, ln(vocabulary) = {math.log(config.model.vocab_size):.2f}",
            f"objective  {OBJECTIVES[Objective(config.objective)].format(config=config)}",
            *_origin(config, first_batch),
            f"data       {data.train.summary}",
            f"held out   {min(held_out, config.eval_loader.max_documents):,} of {held_out:,} documents to evaluate on",
            f"batch      {rows} rows of {config.row_len} slots = {slots:,} slots",
            f"duration   {_words(duration)} = about {tokens / slots:,.0f} full batches "
            f"= {tokens / data.train.num_tokens:.2f} epochs",
            *(f"schedule   {schedule}" for schedule in schedules),
        ]
    )


def _origin(config: TrainConfig, first_batch: int) -> list[str]:
    if first_batch:
        return [f"resumed    behind batch {first_batch:,}, from {config.load_path}"]
    if config.load_path is None:
        return []
    return [f"weights    of {config.load_path}; data, clock and optimizer start anew"]


def finished_line(config: TrainConfig, goes_on: bool, loss: float | None = None) -> str:
    """That there is nothing left to do.

    Args:
        config: the run, from a checkpoint.
        goes_on: it is the run's own last one, not one that was named.
        loss: of the evaluation that was left to do.
    """
    evaluated = "" if loss is None else f"evaluation loss      {loss:.3f}\n"
    if not goes_on:
        more = "a longer max_duration goes on, load_weights_only=true trains anew"
    elif is_in_store(config.save_folder):
        more = "another run_name trains anew"
    else:
        more = "another run_name trains anew, as does a start with save_overwrite=true"
    return f"{evaluated}finished   {config.load_path} is the end of {config.max_duration}; {more}"


def stopped_line(config: TrainConfig, batch: int, checkpoint: str | None) -> str:
    """Where SIGTERM has ended a run.

    Args:
        config: the run.
        batch: batches trained on.
        checkpoint: path of the last one, or address in an object store; None where there is none.
    """
    if checkpoint is None:
        return f"stopped    by SIGTERM behind batch {batch:,}; there is no checkpoint yet"
    other = "another run_name goes on" if is_in_store(config.save_folder) else "goes on"
    how = "the same command goes on from " if config.resumes else f"{other} with load_path="
    return f"stopped    by SIGTERM behind batch {batch:,}; {how}{checkpoint}"


def _words(duration: Duration) -> str:
    return f"{duration.count:,} {UNITS[duration.unit].word}"


def _until(end: Duration, whole: Duration) -> str:
    after = end.unit == whole.unit and end.count > whole.count
    return f" to {_words(end)}" + (", which is after the end of this run" if after else "")


def end_lines(summary: RunSummary, loss_before: float | None, loss_after: float, checkpoint: str | None) -> str:
    """What the run trained on, how well it packed, how fast it was and what it learned.

    Args:
        summary: figures of the fit.
        loss_before: evaluation loss at the start, nats per target; None where the run went on without one.
        loss_after: the same at the end.
        checkpoint: path of the last one, or address in an object store.
    """
    return "\n".join(
        [
            f"trained on           {summary.num_documents:,} documents and pieces, {summary.num_tokens:,} tokens, "
            f"{summary.num_batches:,} batches",
            f"packing efficiency   {summary.packing_efficiency:.4f} of the slots held a token",
            f"order of the data    documents moved {summary.mean_displacement:.0f} places on average and waited "
            f"{summary.longest_wait_batches} batches at most",
            f"tokens per second    {summary.tokens_per_second:,.0f}",
            f"waiting for data     {summary.data_wait_share:.2%} of the time",
            f"evaluation loss      {'' if loss_before is None else f'{loss_before:.3f} -> '}{loss_after:.3f}",
            f"checkpoint           {checkpoint or 'none'}",
        ]
    )
