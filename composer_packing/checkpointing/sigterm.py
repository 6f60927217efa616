"""SIGTERM ends a run with a checkpoint. A scheduler sends SIGTERM when the time of a job is up.

1. A rank gets SIGTERM and wants to stop.
2. After the batch in hand all ranks agree to stop.
3. They write a checkpoint.
4. The trainer asks for the next batch, which raises `Stopped`. The run ends with exit code 143.

Until the fit starts, SIGTERM ends the process without a checkpoint.
"""

import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from composer import Callback, Event, Logger, State
from composer.utils import create_interval_scheduler

from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep

log = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""Exit code by which shells say that SIGTERM has ended a process."""

GRACE_SECONDS = 25
"""How long the batch in hand may take before the run ends without a checkpoint. Schedulers kill after 30 seconds."""


class StopAtSigterm(Callback):
    """Ends the training of all ranks after SIGTERM to any of them, with a checkpoint.

    After each batch the ranks agree whether one of them wants to stop. If so, a checkpoint is written. A rank that is
    stuck cannot come to that point: `GRACE_SECONDS` after the signal it prints where it is stuck and ends without a
    checkpoint. A rank that has begun to write its checkpoint may finish.

    A thread waits for the signal, because the main thread may be stuck in code that runs no Python.

    Args:
        batches: the batches on which the trainer trains.
        interval: time between checkpoints, as a duration. The last batch of the training has a checkpoint too.
        held_out: the batches on which the trainer evaluates.

    Attributes:
        owes_evaluation: whether the run that wrote the loaded checkpoint had to break off its last evaluation.
    """

    def __init__(self, batches: Lockstep, interval: str, held_out: "UntilStopped") -> None:
        self.owes_evaluation = False
        self._batches = batches
        self._held_out = held_out
        self._is_due = create_interval_scheduler(interval)
        self._is_saving = False
        self._lock = threading.Lock()  # so that no timer starts right after `is_to_save` has stopped it

    def state_dict(self) -> dict[str, Any]:
        """Return whether the last evaluation was broken off."""
        return {"owes_evaluation": self._held_out.was_broken_off}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember whether the evaluation of the checkpoint was broken off."""
        self.owes_evaluation = state["owes_evaluation"]

    def is_to_save(self, state: State, event: Event) -> bool:
        """Return whether to write a checkpoint now. Composer asks on all ranks, after each batch and each epoch."""
        is_saving = self._batches.agree_to_stop() or self._is_due(state, event)
        with self._lock:
            self._is_saving = is_saving
            if is_saving:
                faulthandler.cancel_dump_traceback_later()
        return is_saving

    def fit_start(self, state: State, logger: Logger) -> None:
        """Take over SIGTERM.

        From now on neither this thread nor a process that it starts receives SIGTERM. So Composer's uploads of
        checkpoints, which run in processes, can finish when a scheduler sends SIGTERM to every process. One process for
        uploads has been started earlier and has to protect itself: see the end of `train.py`.
        """
        from_handler, to_thread = os.pipe()
        os.set_blocking(to_thread, False)
        threading.Thread(target=self._wait_for_signal, args=(from_handler,), name=__name__, daemon=True).start()
        signal.set_wakeup_fd(to_thread, warn_on_full_buffer=False)  # first, or a signal could get lost
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so the other thread gets it

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Start the timer for the next batch, if the signal came while a checkpoint was written."""
        with self._lock:
            self._is_saving = False
            if self._batches.stop_wanted and not self._batches.is_last:
                faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)

    def _wait_for_signal(self, from_handler: int) -> None:
        while numbers := os.read(from_handler, 1):
            if signal.SIGTERM in numbers:
                with self._lock:
                    if not (self._batches.stop_wanted or self._is_saving):
                        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)
                    self._batches.stop_wanted = True


class UntilStopped(Iterable[Batch]):
    """Batches to evaluate on that end early when the training is to stop.

    A scheduler does not wait until an evaluation is over.

    Args:
        held_out: the batches, equally many on every rank.
        training: the batches to train on, on which the ranks agree to stop.

    Attributes:
        was_broken_off: whether the last iteration ended early.
    """

    def __init__(self, held_out: Sequence[Batch], training: Lockstep) -> None:
        self.was_broken_off = False
        self._held_out = held_out
        self._training = training

    def __len__(self) -> int:
        """Return the number of batches of a whole evaluation."""
        return len(self._held_out)

    def __iter__(self) -> Iterator[Batch]:
        self.was_broken_off = False
        for number, batch in enumerate(self._held_out):
            if self._training.agree_to_stop():
                self.was_broken_off = True
                what = "SIGTERM: evaluated on only %d of %d batches; the run evaluates again when it resumes"
                log.warning(what, number, len(self))
                return
            yield batch
