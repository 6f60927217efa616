"""Schedules of a packer: the rows of a batch and the mask ratio, as functions of what one rank has packed so far.

A schedule counts in the unit of its length: real tokens (`tok`), documents (`sp`) or batches (`ba`). Lengths are given
for all ranks together. Tokens and documents are shared evenly, batches are not: on four ranks, `1000tok` are 250 tokens
of each rank, and `10ba` are ten batches of each rank.

By itself a packer follows the counts of its own rank, as the published one does. A `Lockstep` lets the packer follow
the mean of all ranks, so that every rank changes at the same batch.

`BatchSizeWarmup` and `MaskRatioCooldown` hold the options of the two schedules, under their published names, and every
rule about them. The scheduler classes have the published signatures and compute the values.
"""

import enum
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from composer_packing.common.arguments import check_positive, check_ratio, parse_choice
from composer_packing.common.durations import UNITS, DurationLike, parse_duration


class MaskingSchedule(str, enum.Enum):
    """Shape of the mask-ratio cooldown."""

    LINEAR = "linear"
    """The ratio falls in a straight line from the initial to the final ratio."""
    STAIR = "stair"
    """The ratio falls in steps of equal height and length, and is constant between two steps."""


@dataclass(frozen=True)
class BatchSizeWarmup:
    """Options of a batch-size warmup: the batch size grows from a minimum to the size of the rest of the training.

    Attributes:
        batch_size_warmup_min_size: batch size at the start, at least 1. A packer counts rows, a YAML file counts
            sequences over all ranks.
        batch_size_warmup_tokens: length of the warmup over all ranks, such as `"1000tok"`, `"50sp"` or `"10ba"`; an int
            is a number of tokens.

    Raises:
        ValueError: the minimum is below 1, or the length is not a duration.
        TypeError: the minimum is not an int.
    """

    batch_size_warmup_min_size: int
    batch_size_warmup_tokens: DurationLike

    def __post_init__(self) -> None:
        check_positive(batch_size_warmup_min_size=self.batch_size_warmup_min_size)
        parse_duration("batch_size_warmup_tokens", self.batch_size_warmup_tokens)

    @classmethod
    def from_options(
        cls, batch_size_warmup_min_size: int | None, batch_size_warmup_tokens: DurationLike | None
    ) -> "BatchSizeWarmup | None":
        """The warmup that these options describe, or None if both are None.

        Raises:
            ValueError: only one option is given, or the options are invalid.
        """
        if batch_size_warmup_min_size is None and batch_size_warmup_tokens is None:
            return None
        if batch_size_warmup_tokens is None:
            raise ValueError(f"{batch_size_warmup_min_size=} needs batch_size_warmup_tokens too")
        if batch_size_warmup_min_size is None:
            raise ValueError(f"{batch_size_warmup_tokens=} needs batch_size_warmup_min_size too")
        return cls(batch_size_warmup_min_size, batch_size_warmup_tokens)

    def check_final_size(self, batch_size: int) -> None:
        """Raise ValueError if the warmup starts above the batch size that it leads to."""
        if self.batch_size_warmup_min_size > batch_size:
            raise ValueError(
                f"batch_size_warmup_min_size={self.batch_size_warmup_min_size} must not exceed the batch size after "
                f"the warmup, {batch_size}"
            )

    def in_rows(self, sequences_per_row: int) -> "BatchSizeWarmup":
        """The same warmup with a minimum in rows instead of sequences.

        Raises:
            ValueError: the minimum is not a multiple of `sequences_per_row`.
        """
        rows, rest = divmod(self.batch_size_warmup_min_size, sequences_per_row)
        if rest:
            raise ValueError(
                f"batch_size_warmup_min_size={self.batch_size_warmup_min_size} must be a multiple of "
                f"{sequences_per_row}, the sequences of a row"
            )
        return replace(self, batch_size_warmup_min_size=rows)

    def scheduler(self, batch_size: int, world_size: int) -> "BatchSizeWarmupScheduler":
        """The batch size as a function of what one rank has packed.

        Args:
            batch_size: batch size after the warmup.
            world_size: number of ranks that share the length.

        Raises:
            ValueError: `batch_size` is below the minimum.
        """
        return BatchSizeWarmupScheduler(
            self.batch_size_warmup_min_size, batch_size, self.batch_size_warmup_tokens, world_size
        )


@dataclass(frozen=True)
class MaskRatioCooldown:
    """Options of a mask-ratio cooldown: the mask ratio falls from its initial to its final value.

    Attributes:
        final_masking_ratio: ratio after the cooldown, 0 to 1.
        masking_ratio_cooldown_tokens: length of the cooldown over all ranks, such as `"1000tok"`, `"50sp"` or `"10ba"`;
            an int is a number of tokens.
        masking_ratio_cooldown_start_tokens: length of the training before the cooldown, in the same unit.
        masking_cooldown_schedule_type: a `MaskingSchedule`, or its value.
        masking_ratio_step_size: height of a step, above 0 and at most 1. Only `"stair"` has steps, and needs it.

    Raises:
        ValueError: a value is out of range, a length is not a duration, or two values do not go together.
    """

    final_masking_ratio: float
    masking_ratio_cooldown_tokens: DurationLike
    masking_ratio_cooldown_start_tokens: DurationLike = 0
    masking_cooldown_schedule_type: MaskingSchedule | str = MaskingSchedule.LINEAR
    masking_ratio_step_size: float | None = None

    def __post_init__(self) -> None:
        check_ratio("final_masking_ratio", self.final_masking_ratio)
        cooldown, start = self.masking_ratio_cooldown_tokens, self.masking_ratio_cooldown_start_tokens
        unit = parse_duration("masking_ratio_cooldown_tokens", cooldown).unit
        before = parse_duration("masking_ratio_cooldown_start_tokens", start)
        if before.count and before.unit != unit:
            raise ValueError(
                f"masking_ratio_cooldown_start_tokens={start!r} must be in {unit}, the unit of "
                f"masking_ratio_cooldown_tokens={cooldown!r}"
            )
        shape = parse_choice(MaskingSchedule, "masking_cooldown_schedule_type", self.masking_cooldown_schedule_type)
        object.__setattr__(self, "masking_cooldown_schedule_type", shape)
        step = self.masking_ratio_step_size
        if shape is MaskingSchedule.STAIR and not (step is not None and 0 < step <= 1):
            raise ValueError(
                f"masking_ratio_step_size={step} must be above 0 and at most 1 with "
                f"masking_cooldown_schedule_type='stair'"
            )
        if shape is MaskingSchedule.LINEAR and step is not None:
            raise ValueError(f"masking_ratio_step_size={step} needs masking_cooldown_schedule_type='stair'")

    @classmethod
    def from_options(
        cls,
        final_masking_ratio: float | None,
        masking_ratio_cooldown_tokens: DurationLike | None,
        masking_ratio_cooldown_start_tokens: DurationLike | None,
        masking_cooldown_schedule_type: MaskingSchedule | str,
        masking_ratio_step_size: float | None,
    ) -> "MaskRatioCooldown | None":
        """The cooldown that these options describe, or None if the schedule type is `"linear"` and the rest is None.

        Raises:
            ValueError: some options are missing, or the options are invalid.
        """
        shape = parse_choice(MaskingSchedule, "masking_cooldown_schedule_type", masking_cooldown_schedule_type)
        if final_masking_ratio is None:
            given = {
                "masking_ratio_cooldown_tokens": masking_ratio_cooldown_tokens,
                "masking_ratio_cooldown_start_tokens": masking_ratio_cooldown_start_tokens,
                "masking_cooldown_schedule_type": None if shape is MaskingSchedule.LINEAR else shape.value,
                "masking_ratio_step_size": masking_ratio_step_size,
            }
            for name, value in given.items():
                if value is not None:
                    raise ValueError(f"{name}={value!r} needs final_masking_ratio too")
            return None
        if masking_ratio_cooldown_tokens is None:
            raise ValueError(f"{final_masking_ratio=} needs masking_ratio_cooldown_tokens too")
        start = 0 if masking_ratio_cooldown_start_tokens is None else masking_ratio_cooldown_start_tokens
        return cls(final_masking_ratio, masking_ratio_cooldown_tokens, start, shape, masking_ratio_step_size)

    def check_initial_ratio(self, mask_ratio: float) -> None:
        """Raise ValueError if the final ratio is above the ratio before the cooldown."""
        if self.final_masking_ratio > mask_ratio:
            raise ValueError(
                f"final_masking_ratio={self.final_masking_ratio} must not exceed the mask ratio before the cooldown, "
                f"{mask_ratio}"
            )

    def scheduler(self, mask_ratio: float, world_size: int) -> "MaskingRatioCooldownScheduler":
        """The mask ratio as a function of what one rank has packed.

        Args:
            mask_ratio: ratio before the cooldown.
            world_size: number of ranks that share the lengths.

        Raises:
            ValueError: `mask_ratio` is below the final ratio.
        """
        return MaskingRatioCooldownScheduler(
            mask_ratio,
            self.final_masking_ratio,
            self.masking_ratio_cooldown_tokens,
            self.masking_ratio_cooldown_start_tokens,
            self.masking_cooldown_schedule_type,
            self.masking_ratio_step_size,
            world_size,
        )


class BatchSizeWarmupScheduler:
    """Batch size, growing from a minimum to a maximum.

    Every size from `min_batch_size` to `max_batch_size - 1` is in force for about the same number of batches. A warmup
    in tokens or documents gives each size a part in proportion to the size, a warmup in batches gives equal parts.

    Args:
        min_batch_size: size at the start.
        max_batch_size: size after the warmup.
        warmup_tokens: length of the warmup over all ranks, such as `"1000tok"`, `"50sp"` or `"10ba"`; an int is a
            number of tokens.
        world_size: number of ranks that share the length.

    Raises:
        ValueError: the rules of `BatchSizeWarmup` do not hold; the error has the option names of that class.

    Attributes:
        unit: what the schedule counts: `"tok"`, `"sp"` or `"ba"`.
    """

    def __init__(self, min_batch_size: int, max_batch_size: int, warmup_tokens: DurationLike, world_size: int) -> None:
        BatchSizeWarmup(min_batch_size, warmup_tokens).check_final_size(max_batch_size)
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        duration = parse_duration("batch_size_warmup_tokens", warmup_tokens)
        self.unit = duration.unit
        self.local_warmup = duration.local(world_size)

    @property
    def local_end(self) -> int:
        """What a rank has packed, counted in `unit`, when the size is final."""
        return self.local_warmup

    def __call__(self, current_tokens: int) -> int:
        """Size in force after this rank has packed `current_tokens`, counted in `unit`."""
        if current_tokens >= self.local_warmup:
            return self.max_batch_size
        sizes = range(self.min_batch_size, self.max_batch_size)
        return self.min_batch_size + bisect_right(sizes, current_tokens, key=self._end_of)

    def _end_of(self, size: int) -> int:
        """Local count at which `size` gives way to the next size."""
        per_weight = self.local_warmup / self._weight_up_to(self.max_batch_size - 1)
        return math.ceil(per_weight * self._weight_up_to(size))

    def _weight_up_to(self, size: int) -> int:
        """Weight of all sizes up to `size`: each weighs as much as itself, or 1 in a warmup in batches."""
        sizes = size - self.min_batch_size + 1
        return sizes if self.unit == "ba" else (self.min_batch_size + size) * sizes // 2


class MaskingRatioCooldownScheduler:
    """Mask ratio: constant, then falling to a final ratio, then constant again.

    Args:
        initial_masking_ratio: ratio before the cooldown, 0 to 1.
        final_masking_ratio: ratio after the cooldown, 0 to 1, at most the initial ratio.
        cooldown_tokens: length of the cooldown over all ranks, such as `"1000tok"`, `"50sp"` or `"10ba"`; an int is a
            number of tokens.
        start_tokens: length of the training before the cooldown, in the same unit.
        schedule_type: `"linear"` or `"stair"`.
        step_size: height of a step, above 0 and at most 1. Only `"stair"` has steps, and needs it.
        world_size: number of ranks that share the lengths.

    Raises:
        ValueError: the rules of `MaskRatioCooldown` do not hold, or the initial ratio is not between 0 and 1. The error
            has the option names of that class.

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
        options.check_initial_ratio(initial_masking_ratio)
        self.initial_masking_ratio = initial_masking_ratio
        self.final_masking_ratio = final_masking_ratio
        self.schedule_type = options.masking_cooldown_schedule_type
        self.step_size = step_size
        cooldown = parse_duration("masking_ratio_cooldown_tokens", cooldown_tokens)
        self.unit = cooldown.unit
        self.local_cooldown = cooldown.local(world_size)
        self.local_start = parse_duration("masking_ratio_cooldown_start_tokens", start_tokens).local(world_size)

    @property
    def local_end(self) -> int:
        """What a rank has packed, counted in `unit`, when the ratio is final."""
        return self.local_start + self.local_cooldown

    def __call__(self, current_tokens: int) -> float:
        """Ratio in force after this rank has packed `current_tokens`, counted in `unit`."""
        since_start = current_tokens - self.local_start
        if since_start < 0:
            return self.initial_masking_ratio
        if since_start >= self.local_cooldown:
            return self.final_masking_ratio
        progress = since_start / self.local_cooldown
        span = self.initial_masking_ratio - self.final_masking_ratio
        if self.step_size is None:
            ratio = self.initial_masking_ratio - progress * span
        else:
            stairs = math.ceil(span / self.step_size)
            ratio = self.initial_masking_ratio - math.floor(progress * stairs) * self.step_size
        return max(ratio, self.final_masking_ratio)


class PackingSchedules:
    """Rows and mask ratio of the next batch of one rank.

    Args:
        rows: rows of every batch if there is no warmup.
        mask_prob: mask ratio of every batch if there is no cooldown.
        warmup: schedule of the rows, or None.
        cooldown: schedule of the mask ratio, or None.

    Attributes:
        local: what this rank has packed so far, by unit: real tokens, documents and batches.
        followed: counts of one rank that the schedules follow instead of `local`; None to follow `local`.
    """

    def __init__(
        self,
        rows: int,
        mask_prob: float,
        warmup: BatchSizeWarmupScheduler | None,
        cooldown: MaskingRatioCooldownScheduler | None,
    ) -> None:
        self._rows = rows
        self._mask_prob = mask_prob
        self._warmup = warmup
        self._cooldown = cooldown
        self.local = dict.fromkeys(UNITS, 0)
        self.followed: Mapping[str, int] | None = None

    @property
    def _counts(self) -> Mapping[str, int]:
        return self.local if self.followed is None else self.followed

    @property
    def rows(self) -> int:
        """Rows of the next batch."""
        return self._rows if self._warmup is None else self._warmup(self._counts[self._warmup.unit])

    @property
    def mask_ratio(self) -> float:
        """Mask ratio of the next batch."""
        return self._mask_prob if self._cooldown is None else self._cooldown(self._counts[self._cooldown.unit])

    @property
    def changes_mask_ratio(self) -> bool:
        """Whether there is a cooldown."""
        return self._cooldown is not None

    @property
    def are_over(self) -> bool:
        """Whether rows and mask ratio have their final values."""
        return all(
            schedule is None or self._counts[schedule.unit] >= schedule.local_end
            for schedule in (self._warmup, self._cooldown)
        )

    def advance(self, tokens: int, documents: int) -> None:
        """Count a batch that was packed."""
        self.local["tok"] += tokens
        self.local["sp"] += documents
        self.local["ba"] += 1
