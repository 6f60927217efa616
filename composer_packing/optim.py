"""What Composer's optimizers and schedulers lack: warmup-stable-decay, and groups without weight decay."""

from typing import Any

from composer import State, Time, TimeUnit
from composer.optim import ComposerScheduler
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class WarmupStableDecayScheduler(ComposerScheduler):
    """Learning-rate multiplier: up in a straight line, constant, then down by one minus a square root.

    The decay takes the last `t_decay` of the training (Hägele et al., 2024). Times are in the unit of
    `max_duration`, or in `dur`. Composer sets the rate of a step before it counts the batch before it: the
    rate is one batch behind the clock, and the first two steps of a warmup have a rate of 0.

    Args:
        t_warmup: length of the warmup; the multiplier is `t / t_warmup`.
        t_decay: length of the decay at the end of `max_duration`.
        alpha_f: multiplier at the end.

    Raises:
        ValueError: when called, if a time is in another unit than `max_duration`.
    """

    def __init__(self, t_warmup: str, t_decay: str, alpha_f: float = 0.0) -> None:
        self.t_warmup = t_warmup
        self.t_decay = t_decay
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Multiplier at `state.timestamp`; `ssr` stretches the decay's place, not the warmup."""
        assert state.max_duration is not None
        duration = state.max_duration.value * ssr
        warmup, decay = (_in_unit_of(state.max_duration, time) for time in (self.t_warmup, self.t_decay))
        now = float(state.timestamp.get(state.max_duration.unit).value)
        if now < warmup:
            return now / warmup
        if now < duration - decay or decay == 0:
            return 1.0
        progress = min(1.0, (now - (duration - decay)) / decay)
        return float(1.0 - (1.0 - self.alpha_f) * progress**0.5)


def _in_unit_of(duration: "Time[int]", text: str) -> float:
    time = Time.from_timestring(text)
    if time.unit == TimeUnit.DURATION:
        return float(time.value * duration.value)
    if time.unit != duration.unit:
        raise ValueError(f"a time of {text!r} does not go with max_duration={duration.to_timestring()!r}: use its unit")
    return float(time.value)
