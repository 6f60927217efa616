"""Schedules of the packer: how many rows the next batch has, and which share of its tokens is masked.

A schedule is a function from a count to a value. The count is what one rank has packed so far, in the unit of the
schedule's duration: real tokens, documents or batches. Durations are global, and ranks share them evenly:
`warmup_tokens=1000` on four ranks is 250 tokens on each rank. A batch counts once on every rank.

`BatchSizeWarmup` and `MaskRatioCooldown` are the options as a user gives them, and hold every rule about them. The
schedulers compute the values.
"""

import enum
import math
from bisect import bisect_right
from dataclasses import dataclass

from composer_packing.common.arguments import check_ratio, parse_choice
from composer_packing.common.durations import UNITS, DurationLike, parse_duration


class MaskingSchedule(str, enum.Enum):
    """Shape of the mask-ratio cooldown."""

    LINEAR = "linear"
    """A straight line from the initial ratio to the final ratio."""
    STAIR = "stair"
    """Steps of equal length. From one step to the next the ratio falls by the step size."""


@dataclass(frozen=True)
class BatchSizeWarmup:
    """The options of a batch-size warmup, under their published names.

    Attributes:
        batch_size_warmup_min_size: size of the first batches, at least 1.
        batch_size_warmup_tokens: global length of the warmup: a duration, or an int for tokens.

    Raises:
        ValueError: an option is out of range. The message begins with the option's name and value.
    """

    batch_size_warmup_min_size: int
    batch_size_warmup_tokens: DurationLike

    def __post_init__(self) -> None:
        if self.batch_size_warmup_min_size < 1:
            raise ValueError(f"batch_size_warmup_min_size={self.batch_size_warmup_min_size}: must be at least 1")
        parse_duration("batch_size_warmup_tokens", self.batch_size_warmup_tokens)

    @classmethod
    def from_options(
        cls, batch_size_warmup_min_size: int | None, batch_size_warmup_tokens: DurationLike | None
    ) -> "BatchSizeWarmup | None":
        """The warmup, or None if both options are None. ValueError if only one of them is."""
        size, tokens = batch_size_warmup_min_size, batch_size_warmup_tokens
        if size is None and tokens is None:
            return None
        if size is None:
            raise ValueError(f"batch_size_warmup_tokens={tokens}: needs batch_size_warmup_min_size too")
        if tokens is None:
            raise ValueError(f"batch_size_warmup_min_size={size}: needs batch_size_warmup_tokens too")
        return cls(size, tokens)

    def check_maximum(self, name: str, size: int) -> None:
        """Raise ValueError if the first size exceeds the size after the warmup.

        Args:
            name: the option that holds the size after the warmup.
            size: that size, in the unit of the first size: rows or sequences.
        """
        if self.batch_size_warmup_min_size > size:
            raise ValueError(
                f"batch_size_warmup_min_size={self.batch_size_warmup_min_size}: must not exceed {name}={size}"
            )


@dataclass(frozen=True)
class MaskRatioCooldown:
    """The options of a mask-ratio cooldown, under their published names.

    Attributes:
        final_masking_ratio: mask ratio after the cooldown, 0 to 1.
        masking_ratio_cooldown_tokens: global length of the cooldown: a duration, or an int for tokens.
        masking_ratio_cooldown_start_tokens: global time before the cooldown, in the same unit.
        masking_cooldown_schedule_type: `"linear"` or `"stair"`.
        masking_ratio_step_size: fall of the ratio at each step of a stair, above 0 and at most 1. None for `"linear"`.

    Raises:
        ValueError: an option is out of range, or options do not fit each other. The message begins with the option's
            name and value.
    """

    final_masking_ratio: float
    masking_ratio_cooldown_tokens: DurationLike
    masking_ratio_cooldown_start_tokens: DurationLike = 0
    masking_cooldown_schedule_type: MaskingSchedule | str = MaskingSchedule.LINEAR
    masking_ratio_step_size: float | None = None

    def __post_init__(self) -> None:
        check_ratio("final_masking_ratio", self.final_masking_ratio)
        cooldown = parse_duration("masking_ratio_cooldown_tokens", self.masking_ratio_cooldown_tokens)
        start = parse_duration("masking_ratio_cooldown_start_tokens", self.masking_ratio_cooldown_start_tokens)
        if start.count and start.unit != cooldown.unit:
            raise ValueError(
                f"masking_ratio_cooldown_start_tokens={start}: must be in {cooldown.unit}, as "
                f"masking_ratio_cooldown_tokens={cooldown}"
            )
        step_size = self.masking_ratio_step_size
        if self.shape is MaskingSchedule.LINEAR and step_size is not None:
            raise ValueError(f"masking_ratio_step_size={step_size}: is for a stair only; leave it out")
        if self.shape is MaskingSchedule.STAIR and not (step_size is not None and 0 < step_size <= 1):
            raise ValueError(f"masking_ratio_step_size={step_size}: a stair needs a value above 0 and at most 1")

    @property
    def shape(self) -> MaskingSchedule:
        """The shape of the cooldown."""
        return parse_choice(MaskingSchedule, "masking_cooldown_schedule_type", self.masking_cooldown_schedule_type)

    @classmethod
    def from_options(
        cls,
        final_masking_ratio: float | None,
        masking_ratio_cooldown_tokens: DurationLike | None,
        masking_ratio_cooldown_start_tokens: DurationLike | None,
        masking_cooldown_schedule_type: MaskingSchedule | str,
        masking_ratio_step_size: float | None,
    ) -> "MaskRatioCooldown | None":
        """The cooldown, or None if every option is None or the default. ValueError if some are missing."""
        shape = parse_choice(MaskingSchedule, "masking_cooldown_schedule_type", masking_cooldown_schedule_type)
        if final_masking_ratio is not None and masking_ratio_cooldown_tokens is not None:
            start = masking_ratio_cooldown_start_tokens
            tokens, step_size = masking_ratio_cooldown_tokens, masking_ratio_step_size
            return cls(final_masking_ratio, tokens, 0 if start is None else start, shape, step_size)
        given = {
            "final_masking_ratio": final_masking_ratio,
            "masking_ratio_cooldown_tokens": masking_ratio_cooldown_tokens,
            "masking_ratio_cooldown_start_tokens": masking_ratio_cooldown_start_tokens,
            "masking_cooldown_schedule_type": None if shape is MaskingSchedule.LINEAR else shape.value,
            "masking_ratio_step_size": masking_ratio_step_size,
        }
        missing = [name for name in ("final_masking_ratio", "masking_ratio_cooldown_tokens") if given[name] is None]
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name}={value}: needs {' and '.join(missing)} too")
        return None

    def check_initial(self, name: str, ratio: float) -> None:
        """Raise ValueError if the final ratio exceeds the initial one.

        Args:
            name: the option that holds the initial ratio.
            ratio: that ratio.
        """
        if self.final_masking_ratio > ratio:
            raise ValueError(f"final_masking_ratio={self.final_masking_ratio}: must not exceed {name}={ratio}")


class BatchSizeWarmupScheduler:
    """Rows per batch, growing from a minimum to a maximum.

    Every size from `min_batch_size` to `max_batch_size - 1` stays in force for about the same number of batches. If the
    duration counts tokens or documents, each size gets a part of them that is proportional to the size.

    Args:
        min_batch_size: size at the start.
        max_batch_size: size after the warmup.
        warmup_tokens: global length of the warmup: a duration, or an int for tokens.
        world_size: number of ranks that share the duration.

    Raises:
        ValueError: the sizes are not `1 <= min <= max`, or `warmup_tokens` is not a duration.

    Attributes:
        unit: what the schedule counts: `"tok"`, `"sp"` or `"ba"`.
    """

    def __init__(self, min_batch_size: int, max_batch_size: int, warmup_tokens: DurationLike, world_size: int) -> None:
        BatchSizeWarmup(min_batch_size, warmup_tokens).check_maximum("max_batch_size", max_batch_size)
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        duration = parse_duration("warmup_tokens", warmup_tokens)
        self.unit = duration.unit
        self.local_warmup = duration.local(world_size)

    def __call__(self, current_tokens: int) -> int:
        """Size in force after this rank has packed `current_tokens` tokens, or documents or batches (see `unit`)."""
        if current_tokens >= self.local_warmup:
            return self.max_batch_size
        sizes = range(self.min_batch_size, self.max_batch_size)
        return self.min_batch_size + bisect_right(sizes, current_tokens, key=self._threshold)

    def _threshold(self, size: int) -> int:
        """Local count from which `size` is no longer in force."""
        per_weight = self.local_warmup / self._weight_up_to(self.max_batch_size - 1)
        return math.ceil(per_weight * self._weight_up_to(size))

    def _weight_up_to(self, size: int) -> int:
        """Sum of the weights of all sizes up to this one. The weight of a size is the size, or 1 if batches count."""
        sizes = size - self.min_batch_size + 1
        return sizes if self.unit == "ba" else (self.min_batch_size + size) * sizes // 2


class MaskingRatioCooldownScheduler:
    """Mask ratio: constant, then falling to a final ratio, then constant again.

    Args:
        initial_masking_ratio: ratio until the cooldown starts, 0 to 1.
        final_masking_ratio: ratio after the cooldown, 0 to 1, at most the initial ratio.
        cooldown_tokens: global length of the cooldown: a duration, or an int for tokens.
        start_tokens: global time before the cooldown, in the same unit.
        schedule_type: `"linear"` or `"stair"`.
        step_size: fall of the ratio at each step of a stair, above 0 and at most 1. None for `"linear"`.
        world_size: number of ranks that share the durations.

    Raises:
        ValueError: a value is out of range, or the two durations have different units.

    Attributes:
        unit: what the schedule counts: `"tok"`, `"sp"` or `"ba"`.
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
        options = MaskRatioCooldown(final_masking_ratio, cooldown_tokens, start_tokens, schedule_type, step_size)
        options.check_initial("initial_masking_ratio", initial_masking_ratio)
        self.schedule_type = options.shape
        self.initial_masking_ratio = initial_masking_ratio
        self.final_masking_ratio = final_masking_ratio
        self.step_size = step_size
        cooldown = parse_duration("cooldown_tokens", cooldown_tokens)
        self.unit = cooldown.unit
        self.local_cooldown = cooldown.local(world_size)
        self.local_start = parse_duration("start_tokens", start_tokens).local(world_size)

    def __call__(self, current_tokens: int) -> float:
        """Ratio in force after this rank has packed `current_tokens` tokens, or documents or batches (see `unit`)."""
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
    """Rows per batch and mask ratio in force, by what one rank has packed so far.

    Args:
        rows: rows per batch without a warmup.
        mask_prob: mask ratio without a cooldown, 0 to 1.
        warmup: schedule of the rows, or None.
        cooldown: schedule of the mask ratio, or None.

    Raises:
        ValueError: `mask_prob` is out of range.

    Attributes:
        local: real tokens, documents and batches that this rank has packed, by unit.
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
        """Rows of the next batch."""
        return self._rows if self._warmup is None else self._warmup(self.local[self._warmup.unit])

    @property
    def mask_ratio(self) -> float:
        """Mask ratio of the next batch."""
        return self._mask_prob if self._cooldown is None else self._cooldown(self.local[self._cooldown.unit])

    @property
    def changes_mask_ratio(self) -> bool:
        """Whether there is a cooldown."""
        return self._cooldown is not None

    def advance(self, tokens: int, documents: int) -> None:
        """Count a batch with so many real tokens and documents."""
        self.local["tok"] += tokens
        self.local["sp"] += documents
        self.local["ba"] += 1
