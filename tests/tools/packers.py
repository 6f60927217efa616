"""Packers from flat options, as the published constructor takes them."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

from composer_packing import BatchShape, DocumentPolicies, LabelSettings, ScheduleSettings, SequencePacker
from composer_packing.packing.schedules import BatchSizeWarmup, MaskRatioCooldown
from composer_packing.packing.source_batch import SourceBatch

Packer = TypeVar("Packer", bound=SequencePacker)

WARMUP = ("batch_size_warmup_min_size", "batch_size_warmup_tokens")
COOLDOWN = {
    "final_masking_ratio": None,
    "masking_ratio_cooldown_tokens": None,
    "masking_ratio_cooldown_start_tokens": None,
    "masking_cooldown_schedule_type": "linear",
    "masking_ratio_step_size": None,
}


def new_packer(
    strategy: type[Packer],
    source: Iterable[SourceBatch],
    src_batch_size: int,
    out_batch_size: int,
    out_pseq_len: int,
    buffer_size: int,
    **options: Any,
) -> Packer:
    """A packer whose rows and batches need not be made of equal sequences, as those of `from_composer` are."""

    def take(group: type[Any]) -> dict[str, Any]:
        return {field.name: options.pop(field.name) for field in fields(group) if field.name in options}

    shape = BatchShape(src_batch_size, out_batch_size, out_pseq_len, buffer_size, **take(BatchShape))
    labels, policies = LabelSettings(**take(LabelSettings)), DocumentPolicies(**take(DocumentPolicies))
    schedules = ScheduleSettings(
        BatchSizeWarmup.from_options(*(options.pop(name, None) for name in WARMUP)),
        MaskRatioCooldown.from_options(*(options.pop(name, default) for name, default in COOLDOWN.items())),
        **take(ScheduleSettings),
    )
    assert not options, f"there are no such options: {options}"
    return strategy(source, shape, labels, schedules, policies)
