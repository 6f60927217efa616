"""The position of a run in its data: how Composer saves it, and how a run resumes from it.

A checkpoint holds the position of every rank at `["state"]["dataset_state"]["train"]`, as a `DataState`.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypedDict

from composer import Timestamp
from composer.utils import dist
from torch.utils.data import IterableDataset

from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep, LockstepState
from composer_packing.common.errors import ConfigError
from composer_packing.common.resume import Resume, keys_that_are
from composer_packing.common.snapshots import differences, share_of
from composer_packing.config.schema import TrainConfig
from composer_packing.packing.sequence_packer import VERSION

log = logging.getLogger(__name__)


def settings_that_must_match(config: TrainConfig, tokenizer: str, data: str) -> dict[str, Any]:
    """Return the settings from which the batches of a run follow. A checkpoint with other settings is refused.

    Args:
        config: the run, its durations resolved.
        tokenizer: fingerprint of the tokenizer.
        data: fingerprint of the documents.
    """
    settings = {key: attrgetter(key)(config) for key in keys_that_are(TrainConfig, Resume.BATCHES)}
    return settings | {"tokenizer": tokenizer, "data": data}


class DataState(TypedDict):
    """Position of a run in its data, as its checkpoints hold it.

    Attributes:
        settings: version of the state, and the settings from which batches follow.
        ranks: state of the `Lockstep` of each rank, in the order of the ranks.
    """

    settings: dict[str, Any]
    ranks: list[LockstepState]


class PackedDataset(IterableDataset[Batch]):
    """The dataset that Composer trains on. Its items are packed batches, not documents.

    PyTorch calls everything that a `DataLoader` reads a dataset, and Composer saves and restores what the dataset of a
    `DataLoader` gives it. The batches themselves pass through unchanged.

    Args:
        batches: gives the batches of an epoch at every `iter()`. Checkpoints hold the position of a `Lockstep` whose
            source has a state, and no position of other batches.
        settings: settings from which batches follow. A checkpoint with other settings is refused.
        restart_changed: do not refuse such a checkpoint, but read the data from its start.

    Attributes:
        batches: as given.
        is_loaded: a checkpoint has been loaded.
        is_restarted: a checkpoint has been loaded, but the data is read from its start, as the checkpoint has
            other data or settings, or no position.
    """

    def __init__(
        self, batches: Iterable[Batch], settings: Mapping[str, Any] | None = None, restart_changed: bool = False
    ) -> None:
        self.batches = batches
        self.is_loaded = self.is_restarted = False
        self._lockstep = batches if isinstance(batches, Lockstep) and batches.has_state else None
        self._settings = {"version": VERSION} | dict(settings or {})
        self._restart_changed = restart_changed

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def __len__(self) -> int:
        """Return the number of batches; TypeError if it is unknown, as in training."""
        return len(self.batches)  # type: ignore[arg-type]

    def state_dict(self, num_samples: int, from_beginning: bool) -> DataState | None:
        """Return the position of all ranks, or None if the batches have none. Every rank must call this.

        The state is whole on the first rank only, which writes the checkpoint; on other ranks `ranks` is empty.

        Args:
            num_samples: Composer's count of samples. It is not needed.
            from_beginning: Composer's flag. It is not needed.
        """
        return None if self._lockstep is None else {"settings": self._settings, "ranks": self._lockstep.state_dicts()}

    def load_state_dict(self, state: DataState | None) -> None:
        """Resume from the position in a checkpoint, also if other ranks saved it.

        Args:
            state: what `state_dict` returned on the first rank; None if the checkpoint has no position in the data.

        Raises:
            ConfigError: the batches have no position to restore; or the checkpoint has none, or other settings, and
                `restart_changed` is false.
        """
        self.is_loaded = True
        if self._lockstep is None:
            raise ConfigError(
                f"the data cannot resume from a checkpoint: a {type(self.batches).__name__} of batches has no "
                f"position; take the batches from a Lockstep over a packer, or load only the weights"
            )
        found = ["it has no position in the data"] if state is None else differences(state["settings"], self._settings)
        if state is not None and not found:
            self._resume(state["ranks"])
        elif self._restart_changed:
            log.warning("the data is read from its start: %s", "; ".join(found))
            self.is_restarted = True
        else:
            raise ConfigError(
                f"the data of this run cannot resume from its checkpoint: {'; '.join(found)}; give the same, another "
                f"run_name or load_path, or restart_changed_data=true to read the data from its start"
            )

    def start_counting_at(self, timestamp: Timestamp) -> None:
        """Let the schedules of the packer continue from Composer's clock, for data that is read from its start."""
        assert self._lockstep is not None
        rank, world_size = dist.get_global_rank(), dist.get_world_size()
        tokens, documents = timestamp.token.value, timestamp.sample.value
        self._lockstep.start_counting_at(
            tokens=share_of(tokens, rank, world_size),
            documents=share_of(documents, rank, world_size),
            batches=timestamp.batch.value,  # a batch counts on every rank
        )

    def _resume(self, ranks: list[LockstepState]) -> None:
        assert self._lockstep is not None
        rank, world_size = dist.get_global_rank(), dist.get_world_size()
        if len(ranks) == world_size and self._lockstep.has_same_shares(ranks[0]):
            self._lockstep.load_state_dict(ranks[rank])
            return
        try:
            redealt = self._lockstep.redeal(ranks, rank, world_size)
        except ValueError as error:
            raise ConfigError(
                f"the data of this run cannot resume from its checkpoint: {error}; resume on {len(ranks)} ranks, with "
                f"as many per node as then"
            ) from error
        self._lockstep.load_state_dict(redealt)
