"""What Composer leaves out when a run resumes in the middle of an epoch: random numbers, and data that has changed."""

import warnings
from typing import Any

from composer import Callback, Logger, State
from composer.utils import dist, reproducibility

from composer_packing.checkpointing.packed_dataset import PackedDataset


class Resumption(Callback):
    """Restores random numbers, and makes sure that the data resumes together with the clock.

    Composer restores random numbers only at the start of an epoch, or when it replays the batches of an epoch. This
    callback restores them right before the first batch, so that dropout is the same as without the stop. If the number
    of ranks has changed, random numbers start from the seed.

    Args:
        data: what the trainer takes its batches from.
    """

    def __init__(self, data: PackedDataset) -> None:
        self._data = data
        self._random: list[dict[str, Any]] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the random numbers of all ranks."""
        return {"random": reproducibility.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of the random numbers until the first batch."""
        self._random = state["random"]

    def after_load(self, state: State, logger: Logger) -> None:
        """Let the data resume with the clock, or start from the beginning if the user has asked for that.

        Composer does not call the dataset for a checkpoint without a position in the data: it would replay batches.

        Raises:
            ConfigError: the checkpoint has no position in the data, and `restart_changed_data` is false.
        """
        if state.timestamp.batch.value and not self._data.is_loaded:
            self._data.load_state_dict(None)
            state.dataset_resumption["train"] = True  # so that Composer replays no batches
        # Composer warns like this when a run resumes after the last batch of an epoch.
        warnings.filterwarnings("ignore", message="No batches were trained for global rank")
        if self._data.is_restarted:
            self._data.start_counting_at(state.timestamp)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Restore the random numbers before the first batch."""
        random, self._random = self._random, None
        if random is not None and len(random) == dist.get_world_size():
            reproducibility.load_rng_state(random)
