"""Going on from a checkpoint under Composer: what it keeps of the data's place, and who may go on from it.

The place of every rank is in the checkpoint, at `["state"]["dataset_state"]["train"]`: `"version"`, `"settings"`, what
batches follow from, and `"ranks"`, the state of each rank's `Lockstep`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from composer import Timestamp
from composer.utils import dist
from torch.utils.data import IterableDataset

from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep
from composer_packing.checkpointing.redealing import has_the_same_shares, redeal, share_of
from composer_packing.common.durations import UNITS
from composer_packing.common.errors import ConfigError
from composer_packing.common.snapshots import differences
from composer_packing.config.schema import TrainConfig
from composer_packing.packing.sequence_packer import VERSION

log = logging.getLogger(__name__)

FOLLOWED = (
    "objective",
    "max_seq_len",
    "global_train_batch_size",
    "device_train_microbatch_size",
    "mlm_probability",
    "seed",
    "train_loader.packing_strategy",
    "train_loader.packing_buffer_size",
    "train_loader.batch_size_warmup_min_size",
    "train_loader.batch_size_warmup_tokens",
    "train_loader.masking_ratio_cooldown_tokens",
    "train_loader.masking_ratio_cooldown_start_tokens",
    "train_loader.final_masking_ratio",
    "train_loader.masking_cooldown_schedule_type",
    "train_loader.masking_ratio_step_size",
)
"""Keys of an experiment that batches follow from."""


def settings_that_must_match(config: TrainConfig, tokenizer: str, data: str) -> dict[str, Any]:
    """What must be the same for batches to be those that the run would have had.

    Args:
        config: the run, its durations resolved.
        tokenizer: fingerprint of the tokenizer.
        data: fingerprint of the documents.
    """
    return {key: attrgetter(key)(config) for key in FOLLOWED} | {"tokenizer": tokenizer, "data": data}


class PackedDataset(IterableDataset[Batch]):
    """Gives the batches of an iterable as they are; what a `DataLoader` needs to take them, and Composer to save them.

    Args:
        batches: gives an epoch of them at every `iter()`. The place of a `Lockstep` is saved and restored.
        settings: what batches follow from; a checkpoint that has others is refused.
        restart_changed: read the data from its start instead.

    Attributes:
        batches: as given.
        is_loaded: a checkpoint has been loaded.
        is_restarted: and the data starts anew, as it cannot go on from there.
    """

    def __init__(
        self, batches: Iterable[Batch], settings: Mapping[str, Any] | None = None, restart_changed: bool = False
    ) -> None:
        self.batches = batches
        self.is_loaded = self.is_restarted = False
        self._placed = batches if isinstance(batches, Lockstep) and batches.has_state else None
        self._settings = {"version": VERSION} | dict(settings or {})
        self._restart_changed = restart_changed

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        """Number of batches; TypeError where it is unknown, as it is in training."""
        return len(self.batches)  # type: ignore[arg-type]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any] | None:
        """The place of all ranks, on the first; every rank must ask. None where batches have none.

        Args:
            num_samples: Composer's count, which says nothing here.
            from_beginning: likewise.
        """
        return None if self._placed is None else {"settings": self._settings, "ranks": self._placed.state_dicts()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint, on these ranks or others.

        Raises:
            ConfigError: it has no place in the data, or one of other settings; or these batches know none.
        """
        self.is_loaded = True
        if self._placed is None:
            raise ConfigError(
                f"the data cannot go on from a checkpoint: batches of a {type(self.batches).__name__} know no place; "
                f"take them from a Lockstep over a packer, or load weights only"
            )
        found = ["it holds no place in the data"] if state is None else differences(state["settings"], self._settings)
        if state is not None and not found:
            self._go_on(state["ranks"])
        elif self._restart_changed:
            log.warning("the data starts anew: %s", "; ".join(found))
            self.is_restarted = True
        else:
            raise ConfigError(
                f"the data of this run cannot go on from its checkpoint: {'; '.join(found)}; give the same, another "
                f"run_name or load_path, or restart_changed_data=true to read the data from its start"
            )

    def start_counting_at(self, timestamp: Timestamp) -> None:
        """Let the schedules of data that starts anew go on where the clock stands."""
        assert self._placed is not None
        state, rank, world_size = self._placed.state_dict(), dist.get_global_rank(), dist.get_world_size()
        local = state["stream"]["source"]["local"]
        for unit, names in UNITS.items():
            total = getattr(timestamp, names.timestamp_name).value
            local[unit] = total if unit == "ba" else share_of(total, rank, world_size)
        self._placed.load_state_dict(state)

    def _go_on(self, ranks: list[dict[str, Any]]) -> None:
        assert self._placed is not None
        rank, world_size = dist.get_global_rank(), dist.get_world_size()
        if has_the_same_shares(ranks, self._placed.state_dict(), world_size):
            self._placed.load_state_dict(ranks[rank])
            return
        try:
            dealt = redeal(ranks, rank, world_size)
        except ValueError as error:
            raise ConfigError(f"the data of this run cannot go on from its checkpoint: it was {error}") from error
        self._placed.load_state_dict(dealt)
