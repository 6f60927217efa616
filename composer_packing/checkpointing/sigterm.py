"""SIGTERM, by which a scheduler says that time is up, ends a run with a checkpoint."""

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
"""What shells make of a process that SIGTERM has ended."""

GRACE_SECONDS = 25
"""How long the batch in hand may take before the run ends without a checkpoint: schedulers kill after thirty."""


class StopAtSigterm(Callback):
    """From the start of the fit on, SIGTERM to any rank ends the training of all: behind the batch in hand.

    Ranks agree behind each batch whether one of them has been told to end. Then a checkpoint is written, and the next
    batch that the trainer asks for is `Stopped`. A rank that does not come so far in `GRACE_SECONDS` says where it is,
    and ends without; one that has begun to write may finish. A thread waits for the signal, as the main one may hang.

    Args:
        batches: what the trainer takes its batches from.
        interval: between checkpoints, in any unit of `times`; there is one at the end of the training too.
        held_out: what it evaluates on.

    Attributes:
        owes_evaluation: the run that wrote the checkpoint had to break one off.
    """

    def __init__(self, batches: Lockstep, interval: str, held_out: "UntilStopped") -> None:
        self.owes_evaluation = False
        self._batches = batches
        self._held_out = held_out
        self._is_due = create_interval_scheduler(interval)
        self._is_saving = False
        self._lock = threading.Lock()  # or the clock might be started behind the check that stops it

    def state_dict(self) -> dict[str, Any]:
        """Whether the last evaluation was broken off."""
        return {"owes_evaluation": self._held_out.was_broken_off}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember it."""
        self.owes_evaluation = state["owes_evaluation"]

    def is_to_save(self, state: State, event: Event) -> bool:
        """Whether Composer is to write a checkpoint; it asks on all ranks, behind each batch and each epoch."""
        is_saving = self._batches.agree_to_stop() or self._is_due(state, event)
        with self._lock:
            self._is_saving = is_saving
            if is_saving:
                faulthandler.cancel_dump_traceback_later()
        return is_saving

    def fit_start(self, state: State, logger: Logger) -> None:
        """Take over the signal.

        This thread does not get it any more, nor do processes that it starts from now on: those in which Composer
        uploads checkpoints have to end their work where a scheduler sends it to all. One for them that Composer's
        trainer has started before has to see to that itself, as at the end of `train.py`.
        """
        from_handler, to_thread = os.pipe()
        os.set_blocking(to_thread, False)
        threading.Thread(target=self._wait, args=(from_handler,), name=__name__, daemon=True).start()
        signal.set_wakeup_fd(to_thread, warn_on_full_buffer=False)  # first: one that comes meanwhile must not be lost
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the other thread gets it

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Give the next batch its time, where the signal came while the last one's checkpoint was written."""
        with self._lock:
            self._is_saving = False
            if self._batches.stop_wanted and not self._batches.is_last:
                faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)

    def _wait(self, from_handler: int) -> None:
        while numbers := os.read(from_handler, 1):
            if signal.SIGTERM in numbers:
                with self._lock:
                    if not (self._batches.stop_wanted or self._is_saving):
                        faulthandler.dump_traceback_later(GRACE_SECONDS, exit=True)
                    self._batches.stop_wanted = True


class UntilStopped(Iterable[Batch]):
    """Batches to evaluate on, which end early where training is to stop, so that it need not wait for all of them.

    Args:
        held_out: as many on every rank.
        training: tells when to stop.

    Attributes:
        was_broken_off: the last iteration ended early.
    """

    def __init__(self, held_out: Sequence[Batch], training: Lockstep) -> None:
        self.was_broken_off = False
        self._held_out = held_out
        self._training = training

    def __len__(self) -> int:
        """How many there are, if nothing stops them."""
        return len(self._held_out)

    def __iter__(self) -> Iterator[Batch]:
        self.was_broken_off = False
        for number, batch in enumerate(self._held_out):
            if self._training.agree_to_stop():
                self.was_broken_off = True
                log.warning("SIGTERM: evaluated on %d of %d batches only; again when it goes on", number, len(self))
                return
            yield batch
