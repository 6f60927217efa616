"""What Composer leaves to others when a run resumes in the middle of an epoch: random numbers, and the clock."""

import logging
import warnings
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist, reproducibility

from composer_packing.checkpointing.packed_dataset import PackedDataset

log = logging.getLogger(__name__)


class Resumption(Callback):
    """What Composer leaves to others when a run goes on in the middle of an epoch.

    It restores random numbers only at the start of an epoch, or where it replays batches. They are restored here, just
    before the first batch, so that dropout is what it would have been; on other ranks they start anew.

    Args:
        data: what the trainer takes its batches from.
    """

    def __init__(self, data: PackedDataset) -> None:
        self._data = data
        self._random: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Random numbers of all ranks."""
        return {"random": reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep them until the first batch."""
        self._random = state["random"]

    def after_load(self, state: State, logger: Logger) -> None:
        """See to it that the data goes on with the clock, or starts anew and is asked to."""
        if state.timestamp.batch.value and not self._data.is_loaded:
            self._data.load_state_dict(None)
            state.dataset_resumption["train"] = True  # or Composer would replay batches
        # Composer's, of a run that goes on behind the last batch of an epoch.
        warnings.filterwarnings("ignore", message="No batches were trained for global rank")
        if self._data.is_restarted:
            self._data.start_counting_at(state.timestamp)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Restore the random numbers, once."""
        random, self._random = self._random, None
        if random is not None and len(random) == dist.get_world_size():
            reproducibility.load_rng_state(random)
