"""Packers by the parameters of the published constructor, one by one, as `tests/golden/packing.json` has them."""

from collections.abc import Iterable
from typing import Any, TypeVar

from composer_packing import (
    BatchShape,
    BatchSizeWarmup,
    GreedyBestFitSequencePacker,
    LabelSettings,
    MaskRatioCooldown,
    Policies,
    ScheduleSettings,
    SequencePacker,
    SubsetSumSequencePacker,
)

Packer = TypeVar("Packer", bound=SequencePacker)

COOLDOWN = {
    "final_masking_ratio": None,
    "masking_ratio_cooldown_tokens": None,
    "masking_ratio_cooldown_start_tokens": None,
    "masking_cooldown_schedule_type": "linear",
    "masking_ratio_step_size": None,
}


def groups(
    src_batch_size: int,
    src_max_seq_len: int,
    out_batch_size: int,
    out_pseq_len: int,
    buffer_size: int,
    *ids: int,
    max_document_len: int | None = None,
    batch_size_warmup_min_size: int | None = None,
    batch_size_warmup_tokens: Any = None,
    world_size: int = 1,
    pin_memory: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """The constructor's arguments. Nothing follows from `src_max_seq_len`, as published."""
    cooldown = {name: options.pop(name, default) for name, default in COOLDOWN.items()}
    policies = {name: options.pop(name) for name in ("tail", "over_long") if name in options}
    options |= dict(zip(("pad_token_id", "mask_token_id"), ids, strict=False))
    return {
        "shape": BatchShape(src_batch_size, out_batch_size, out_pseq_len, buffer_size, max_document_len),
        "labels": LabelSettings(**options),
        "schedules": ScheduleSettings(
            BatchSizeWarmup.from_options(batch_size_warmup_min_size, batch_size_warmup_tokens),
            MaskRatioCooldown.from_options(**cooldown),
            world_size,
        ),
        "policies": Policies(**policies),
        "pin_memory": pin_memory,
    }


def packer_of(kind: type[Packer], src_iterable: Iterable[Any], *sizes: int, **options: Any) -> Packer:
    """A packer of any kind."""
    return kind(src_iterable, **groups(*sizes, **options))


def best_fit(src_iterable: Iterable[Any], *sizes: int, **options: Any) -> GreedyBestFitSequencePacker:
    """A packer by best fit."""
    return packer_of(GreedyBestFitSequencePacker, src_iterable, *sizes, **options)


def subset_sum(src_iterable: Iterable[Any], *sizes: int, **options: Any) -> SubsetSumSequencePacker:
    """A packer by subset sum."""
    return packer_of(SubsetSumSequencePacker, src_iterable, *sizes, **options)
