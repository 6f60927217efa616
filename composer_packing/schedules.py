"""Schedules that follow the tokens a rank has seen: rows per batch and mask ratio.

A schedule is a callable from local tokens seen to a value. Times are global and shared evenly by the
ranks: `warmup_tokens=1000` on four ranks is 250 tokens on each. They are given as int, as a string
such as `"1000tok"`, or as a `composer.Time` in tokens.
"""

import enum
import math
import numbers
from bisect import bisect_right
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from composer import Time

from composer_packing.masking import check_ratio

TokenTime = Union[int, str, "Time[int]"]
"""A number of tokens: an int, a string with its unit, or a `composer.Time` in tokens."""


def local_tokens(name: str, time: TokenTime, world_size: int) -> int:
    """Tokens that each of `world_size` ranks sees while all of them see `time`, rounded up.

    Raises:
        ValueError: `time` is no number of tokens, or negative; or `world_size` is below 1.
    """
    if world_size < 1:
        raise ValueError(f"{world_size=} must be at least 1")
    wanted = f"{name}={time!r} must be a number of tokens such as 1000 or '1000tok'"
    if isinstance(time, bool):
        raise ValueError(wanted)
    if isinstance(time, numbers.Integral):
        tokens = int(time)
    else:
        from composer import Time, TimeUnit  # late: schedules given as ints need no Composer

        try:
            parsed = Time.from_timestring(time) if isinstance(time, str) else time
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(wanted) from error
        if not isinstance(parsed, Time) or parsed.unit != TimeUnit.TOKEN:
            raise ValueError(wanted)
        tokens = int(parsed.value)
    if tokens < 0:
        raise ValueError(f"{name}={time!r} must not be negative")
    return -(-tokens // world_size)


class BatchSizeWarmupScheduler:
    """Rows (or samples) per batch, growing from a minimum to a maximum.

    Every size from `min_batch_size` to `max_batch_size - 1` stays in force for a number of tokens in
    proportion to itself, so each takes about the same number of batches.

    Args:
        min_batch_size: size at the start.
        max_batch_size: size after the warmup.
        warmup_tokens: global length of the warmup.
        world_size: number of ranks that share it.

    Raises:
        ValueError: sizes are not `1 <= min <= max`, or `warmup_tokens` is no number of tokens.
    """

    def __init__(self, min_batch_size: int, max_batch_size: int, warmup_tokens: TokenTime, world_size: int) -> None:
        if not 1 <= min_batch_size <= max_batch_size:
            raise ValueError(f"need 1 <= {min_batch_size=} <= {max_batch_size=}")
        self.min_batch_size = min_batch_size
        self.max_batch_size = max_batch_size
        self.local_warmup_tokens = local_tokens("warmup_tokens", warmup_tokens, world_size)

    def __call__(self, current_tokens: int) -> int:
        """Size in force once this rank has seen `current_tokens` tokens."""
        if current_tokens >= self.local_warmup_tokens:
            return self.max_batch_size
        sizes = range(self.min_batch_size, self.max_batch_size)
        return self.min_batch_size + bisect_right(sizes, current_tokens, key=self._threshold)

    def _threshold(self, size: int) -> int:
        """Local tokens at which `size` gives way to the next one."""
        tokens_per_unit = self.local_warmup_tokens / _sum(self.min_batch_size, self.max_batch_size - 1)
        return math.ceil(tokens_per_unit * _sum(self.min_batch_size, size))


def _sum(first: int, last: int) -> int:
    return (first + last) * (last - first + 1) // 2


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
        cooldown_tokens: global length of the cooldown.
        start_tokens: global tokens before it starts.
        schedule_type: `"linear"` or `"stair"`.
        step_size: height of a stair, above 0 and at most 1; for `"stair"` only, which needs it.
        world_size: number of ranks that share the tokens.

    Raises:
        ValueError: a value is outside the ranges above.
    """

    def __init__(
        self,
        initial_masking_ratio: float,
        final_masking_ratio: float,
        cooldown_tokens: TokenTime,
        start_tokens: TokenTime = 0,
        schedule_type: MaskingSchedule | str = MaskingSchedule.LINEAR,
        step_size: float | None = None,
        world_size: int = 1,
    ) -> None:
        check_ratio("initial_masking_ratio", initial_masking_ratio)
        check_ratio("final_masking_ratio", final_masking_ratio)
        if final_masking_ratio > initial_masking_ratio:
            raise ValueError(f"{final_masking_ratio=} must not exceed {initial_masking_ratio=}")
        self.schedule_type = _check_schedule_type(schedule_type)
        if self.schedule_type is MaskingSchedule.STAIR and not (step_size is not None and 0 < step_size <= 1):
            raise ValueError(f"{step_size=} must be above 0 and at most 1 for schedule_type='stair'")
        if self.schedule_type is MaskingSchedule.LINEAR and step_size is not None:
            raise ValueError(f"{step_size=} is for schedule_type='stair' only")
        self.initial_masking_ratio = initial_masking_ratio
        self.final_masking_ratio = final_masking_ratio
        self.step_size = step_size
        self.local_cooldown_tokens = local_tokens("cooldown_tokens", cooldown_tokens, world_size)
        self.local_start_tokens = local_tokens("start_tokens", start_tokens, world_size)

    def __call__(self, current_tokens: int) -> float:
        """Ratio in force once this rank has seen `current_tokens` tokens."""
        since_start = current_tokens - self.local_start_tokens
        if since_start < 0:
            return self.initial_masking_ratio
        if since_start >= self.local_cooldown_tokens:
            return self.final_masking_ratio
        progress = since_start / self.local_cooldown_tokens
        span = self.initial_masking_ratio - self.final_masking_ratio
        if self.schedule_type is MaskingSchedule.LINEAR:
            ratio = self.initial_masking_ratio - progress * span
        else:
            assert self.step_size is not None
            stairs = math.ceil(span / self.step_size)
            ratio = self.initial_masking_ratio - math.floor(progress * stairs) * self.step_size
        return max(ratio, self.final_masking_ratio)


def _check_schedule_type(schedule_type: MaskingSchedule | str) -> MaskingSchedule:
    if schedule_type not in tuple(MaskingSchedule):
        raise ValueError(f"{schedule_type=} must be 'linear' or 'stair'")
    return MaskingSchedule(schedule_type)


def warmup_from_options(
    out_batch_size: int,
    batch_size_warmup_min_size: int | None,
    batch_size_warmup_tokens: TokenTime | None,
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
    masking_ratio_cooldown_tokens: TokenTime | None,
    masking_ratio_cooldown_start_tokens: TokenTime | None,
    masking_cooldown_schedule_type: MaskingSchedule | str,
    masking_ratio_step_size: float | None,
    world_size: int,
) -> MaskingRatioCooldownScheduler | None:
    """The packer's mask-ratio cooldown, or None where its options are None; ValueError where some are."""
    _check_schedule_type(masking_cooldown_schedule_type)
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
