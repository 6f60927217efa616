"""What Composer's optimizers and schedulers lack: warmup-stable-decay, and parameters without weight decay."""

from typing import Any

from composer import State
from composer.optim import ComposerScheduler
from torch import nn

from composer_packing.common.durations import Duration, parse_duration
from composer_packing.config.schedules import check_learning_rate_schedule


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Sort a model's parameters into two groups for an optimizer: matrices decay, norms and biases do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


class WarmupStableDecayScheduler(ComposerScheduler):
    """Multiplier of the learning rate: rises in a straight line, stays at 1, and falls by one minus a square root.

    ::

        first t_warmup    t / t_warmup
        between           1
        last t_decay      1 - (1 - alpha_f) * sqrt(p), where p rises from 0 to 1

    The decay takes the last `t_decay` of the training (Hägele et al., 2024). Composer sets the rate of a step before it
    counts the previous batch. The rate is therefore one batch behind the clock, and the first two steps of a warmup
    have a rate of 0.

    Args:
        t_warmup: length of the warmup, such as `1000tok`, `50sp` or `10ba`; `0tok` for no warmup.
        t_decay: length of the decay, in the unit of `max_duration`; `0tok` for no decay.
        alpha_f: multiplier at the end of the training.

    Raises:
        ValueError: a time is not a duration. A call raises it if warmup and decay do not fit into `max_duration`.
    """

    def __init__(self, t_warmup: str, t_decay: str, alpha_f: float = 0.0) -> None:
        self.warmup = parse_duration("t_warmup", t_warmup)
        self.decay = parse_duration("t_decay", t_decay)
        self.alpha_f = alpha_f

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Multiplier at `state.timestamp`; `ssr` scales the end from which the decay counts back, not the warmup."""
        assert state.max_duration is not None
        unit = state.max_duration.unit
        check_learning_rate_schedule(self.warmup, self.decay, Duration(state.max_duration.value, unit.value))
        since_start = state.timestamp.get(self.warmup.unit).value
        if since_start < self.warmup.count:
            return float(since_start / self.warmup.count)
        before_end = state.max_duration.value * ssr - state.timestamp.get(unit).value
        if before_end > self.decay.count or self.decay.count == 0:
            return 1.0
        progress = min(1.0, 1.0 - before_end / self.decay.count)
        return float(1.0 - (1.0 - self.alpha_f) * progress**0.5)
