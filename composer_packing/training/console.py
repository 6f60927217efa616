"""What a run prints while it trains. Only the first rank prints."""

import sys
from typing import Any

from composer import Event, Logger, State
from composer.loggers import ConsoleLogger, LoggerDestination
from composer.utils import create_interval_scheduler, dist


class IntervalConsoleLogger(LoggerDestination):
    """Composer's console logger with an interval in tokens, documents or batches.

    Composer's own takes an interval in batches or epochs only.

    Args:
        interval: time between two prints, such as `1000tok`, `50sp` or `10ba`.
    """

    def __init__(self, interval: str) -> None:
        self._console = ConsoleLogger(log_interval="1ba", stream=sys.stderr)
        self._is_due = create_interval_scheduler(interval, include_end_of_training=False, checkpoint_events=False)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Keep the metrics until the next print."""
        self._console.log_metrics(metrics, step)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep the hyperparameters until the next print."""
        self._console.log_hyperparameters(hyperparameters)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Print after the first batch, after every interval, and at all events but batches at which Composer prints."""
        if event is not Event.BATCH_END or self._console.last_logged_batch == 0 or self._is_due(state, event):
            self._console.run_event(event, state, logger)


def print_on_first_rank(text: str) -> None:
    """Print a text on the first rank; the other ranks print nothing."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)
