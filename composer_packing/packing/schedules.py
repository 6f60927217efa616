"""Schedules that follow what a rank has seen: rows per batch and mask ratio.

A schedule is a callable from a local count to a value. It counts in the unit of its duration: real tokens,
documents or batches. Durations are global and shared evenly by the ranks: `warmup_tokens=1000` on four
ranks is 250 tokens on each; a batch is one on every rank.
"""

import enum
import math
from bisect import bisect_right

from composer_packing.common.arguments import check_ratio, parse_choice
from composer_packing.common.durations import UNITS, DurationLike, parse_duration


class BatchSizeWarmupScheduler:
    """Rows per batch, growing from a minimum to a maximum.

    Every size from `min_batch_size` to `max_batch_size - 1` takes about the same number of batches: it stays in
    force for a number of tokens or documents in proportion to itself, or, counted in batches, for an equal part.

    Args:
        min_batch_size: size at the start.
        max_batch_size: size after the warmup.
        warmup_tokens: global length of the warmup, in any unit of `times`.
        world_size: number of ranks that share it.

    Raises:
        ValueError: sizes are not `1 <= min <= max`, or `warmup_tokens` is no duration.

    Attributes:
        unit: what it counts: `"tok"`, `"sp"` or `"ba"`.
    """

    def __init__(self, min_batch_size: int, max_batch_size: int, warmup_tokens: DurationLike, world_size: int) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ValueError(f"need 1 <= {min_batch_size=} <= {max_batch_size=}")
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        duration = parse_duration("warmup_tokens", warmup_tokens)
        self.unit = duration.unit
        self.local_warmup = duration.local(world_size)

    def __call__(self, current_tokens: int) -> int:
        """Size in force once this rank has seen `current_tokens` tokens, or what else `unit` says."""
        if current_tokens >= self.local_warmup:
            return self.max_batch_size
        sizes = range(self.min_batch_size, self.max_batch_size)
        return self.min_batch_size + bisect_right(sizes, current_tokens, key=self._threshold)

    def _threshold(self, size: int) -> int:
        """Local count at which `size` gives way to the next one."""
        per_weight = self.local_warmup / self._weight_up_to(self.max_batch_size - 1)
        return math.ceil(per_weight * self._weight_up_to(size))

    def _weight_up_to(self, size: int) -> int:
        """What the sizes from the first to this one share the warmup by: themselves, or in batches one each."""
        sizes = size - self.min_batch_size + 1
        return sizes if self.unit == "ba" else (self.min_batch_size + size) * sizes // 2


class MaskingSchedule(str, enum.Enum):
    """Shape of the mask-ratio cooldown."""

    LINEAR = "linear"
    """A straight line from the initial to the final ratio."""
    STAIR = "stair"
    """Equal stretches of constant ratio, `step_size` apart."""


class MaskingRatioCooldownScheduler:
    """Mask ratio: constant, then down to a final ratio, then constant again.

    Args:
        initial_masking_ratio: ratio until the cooldown starts, 0 to 1.
        final_masking_ratio: ratio once it is over, 0 to 1, at most the initial one.
        cooldown_tokens: global length of the cooldown, in any unit of `times`.
        start_tokens: what comes before it, in the same unit.
        schedule_type: `"linear"` or `"stair"`.
        step_size: height of a stair, above 0 and at most 1; for `"stair"` only, which needs it.
        world_size: number of ranks that share the tokens.

    Raises:
        ValueError: a value is outside the ranges above, or the two durations are in different units.

    Attributes:
        unit: what it counts: `"tok"`, `"sp"` or `"ba"`.
    """

    def __init__(
        self,
        initial_masking_ratio: float,
        final_masking_ratio: float,
        cooldown_tokens: DurationLike,
        start_tokens: DurationLike = 0,
        schedule_type: MaskingSchedule | str = MaskingSchedule.LINEAR,
        step_size: float | None = None,
        world_size: int = 1,
    ) -> None:
        check_ratio("initial_masking_ratio", initial_masking_ratio)
        check_ratio("final_masking_ratio", final_masking_ratio)
        if final_masking_ratio > initial_masking_ratio:
            raise ValueError(f"{final_masking_ratio=} must not exceed {initial_masking_ratio=}")
        self.schedule_type = parse_choice(MaskingSchedule, "schedule_type", schedule_type)
        if self.schedule_type is MaskingSchedule.STAIR and not (step_size is not None and 0 < step_size <= 1):
            raise ValueError(f"{step_size=} must be above 0 and at most 1 for schedule_type='stair'")
        if self.schedule_type is MaskingSchedule.LINEAR and step_size is not None:
            raise ValueError(f"{step_size=} is for schedule_type='stair' only")
        self.initial_masking_ratio = initial_masking_ratio
        self.final_masking_ratio = final_masking_ratio
        self.step_size = step_size
        cooldown = parse_duration("cooldown_tokens", cooldown_tokens)
        start = parse_duration("start_tokens", start_tokens)
        if start.count and start.unit != cooldown.unit:
            raise ValueError(f"{start_tokens=} and {cooldown_tokens=} must have the same unit")
        self.unit = cooldown.unit
        self.local_cooldown = cooldown.local(world_size)
        self.local_start = start.local(world_size)

    def __call__(self, current_tokens: int) -> float:
        """Ratio in force once this rank has seen `current_tokens` tokens, or what else `unit` says."""
        since_start = current_tokens - self.local_start
        if since_start < 0:
            return self.initial_masking_ratio
        if since_start >= self.local_cooldown:
            return self.final_masking_ratio
        progress = since_start / self.local_cooldown
        span = self.initial_masking_ratio - self.final_masking_ratio
        if self.schedule_type is MaskingSchedule.LINEAR:
            ratio = self.initial_masking_ratio - progress * span
        else:
            assert self.step_size is not None
            stairs = math.ceil(span / self.step_size)
            ratio = self.initial_masking_ratio - math.floor(progress * stairs) * self.step_size
        return max(ratio, self.final_masking_ratio)


class PackingSchedules:
    """Rows per batch and mask ratio in force, from what one rank has packed so far.

    Args:
        rows: per batch where there is no warmup.
        mask_prob: ratio where there is no cooldown.
        warmup: of the rows, or None.
        cooldown: of the ratio, or None.

    Attributes:
        local: real tokens, documents and batches packed so far, by unit.
    """

    def __init__(
        self,
        rows: int,
        mask_prob: float,
        warmup: BatchSizeWarmupScheduler | None,
        cooldown: MaskingRatioCooldownScheduler | None,
    ) -> None:
        check_ratio("mask_prob", mask_prob)
        self._rows = rows
        self._mask_prob = mask_prob
        self._warmup = warmup
        self._cooldown = cooldown
        self.local = dict.fromkeys(UNITS, 0)

    @property
    def rows(self) -> int:
        """Of the batch that is packed next."""
        return self._rows if self._warmup is None else self._warmup(self.local[self._warmup.unit])

    @property
    def mask_ratio(self) -> float:
        """Of the batch that is packed next."""
        return self._mask_prob if self._cooldown is None else self._cooldown(self.local[self._cooldown.unit])

    @property
    def changes_mask_ratio(self) -> bool:
        """Whether there is a cooldown."""
        return self._cooldown is not None

    def advance(self, tokens: int, documents: int) -> None:
        """Count a batch."""
        self.local["tok"] += tokens
        self.local["sp"] += documents
        self.local["ba"] += 1


def warmup_from_options(
    out_batch_size: int,
    batch_size_warmup_min_size: int | None,
    batch_size_warmup_tokens: DurationLike | None,
    world_size: int,
) -> BatchSizeWarmupScheduler | None:
    """The packer's batch-size warmup, or None where its options are None; ValueError where one is."""
    if batch_size_warmup_min_size is None and batch_size_warmup_tokens is None:
        return None
    if batch_size_warmup_min_size is None or batch_size_warmup_tokens is None:
        raise ValueError(f"{batch_size_warmup_min_size=} and {batch_size_warmup_tokens=} need each other")
    return BatchSizeWarmupScheduler(batch_size_warmup_min_size, out_batch_size, batch_size_warmup_tokens, world_size)


def cooldown_from_options(
    mask_prob: float,
    final_masking_ratio: float | None,
    masking_ratio_cooldown_tokens: DurationLike | None,
    masking_ratio_cooldown_start_tokens: DurationLike | None,
    masking_cooldown_schedule_type: MaskingSchedule | str,
    masking_ratio_step_size: float | None,
    world_size: int,
) -> MaskingRatioCooldownScheduler | None:
    """The packer's mask-ratio cooldown, or None where its options are None; ValueError where some are."""
    parse_choice(MaskingSchedule, "schedule_type", masking_cooldown_schedule_type)
    given = (
        final_masking_ratio,
        masking_ratio_cooldown_tokens,
        masking_ratio_cooldown_start_tokens,
        masking_ratio_step_size,
    )
    if all(option is None for option in given):
        return None
    if final_masking_ratio is None or masking_ratio_cooldown_tokens is None:
        raise ValueError(
            f"a mask-ratio cooldown needs both {final_masking_ratio=} and {masking_ratio_cooldown_tokens=}"
        )
    return MaskingRatioCooldownScheduler(
        mask_prob,
        final_masking_ratio,
        masking_ratio_cooldown_tokens,
        masking_ratio_cooldown_start_tokens or 0,
        masking_cooldown_schedule_type,
        masking_ratio_step_size,
        world_size,
    )


def schedules_from_options(
    out_batch_size: int,
    mask_prob: float,
    world_size: int,
    warmup: tuple[int | None, DurationLike | None],
    cooldown: tuple[float | None, DurationLike | None, DurationLike | None, MaskingSchedule | str, float | None],
) -> PackingSchedules:
    """The packer's schedules.

    Args:
        out_batch_size: rows per batch in the end.
        mask_prob: ratio at the start.
        world_size: ranks that share durations.
        warmup: options of `warmup_from_options` between the first and the last.
        cooldown: options of `cooldown_from_options` likewise.

    Raises:
        ValueError: some are missing, or out of range.
    """
    return PackingSchedules(
        out_batch_size,
        mask_prob,
        warmup_from_options(out_batch_size, *warmup, world_size),
        cooldown_from_options(mask_prob, *cooldown, world_size),
    )
