"""What a saved state of a packer is, and whether a packer may go on from one."""

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch.utils.data.distributed import DistributedSampler

from composer_packing.schedules import PackingSchedules
from composer_packing.state import Snapshot, Stateful, differences
from composer_packing.waiting import WaitingBuffer

log = logging.getLogger(__name__)

VERSION = 1
"""Of the state; raise it when an older one must not be loaded any more."""

COUNTS = ("epoch", "seqs_consumed", "seqs_emitted", "source_batches", "source_ended")
"""Attributes of a packer that are kept as they are."""

LASTING = ("out_pseq_len", "pad_token_id", "mask_token_id", "ignore_token_id", "mask_prob", "seed", "tail", "over_long")
"""Attributes that must be the same when it goes on, besides its objective and its masks. Sizes of a rank's batch and
buffer, and schedules, which are counted per rank, are not among them: they follow the number of ranks.
"""

STREAMING_PLACE = "sample_in_epoch"
"""What says that a place is a `StreamingDataset`'s."""


def lasting_settings(packer: Any) -> dict[str, Any]:
    """The settings of a packer that go into its state, as plain values."""
    values = {name: getattr(packer, name) for name in (*LASTING, "objective")}
    masking = packer.keyed_masking
    keyed = None if masking is None else [masking.seed, masking.vocab_size, *sorted(masking.special_token_ids)]
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    return plain | {"packer": type(packer).__name__, "keyed_masking": keyed}


def check_state(state: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless a packer of these settings may go on from the state."""
    if state.get("version") != VERSION:
        raise ValueError(f"the state of a packer is of version {state.get('version')}; this packer reads {VERSION}")
    if found := differences(state["settings"], settings):
        raise ValueError(f"the state is of a packer with other settings: {'; '.join(found)}")


def tell_epoch(source: object, epoch: int) -> None:
    """Tell the sampler of a source the epoch, if it is one that wants to know."""
    sampler = getattr(source, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def snapshot_of_packer(
    packer: Any, schedules: PackingSchedules, rng: np.random.Generator, waiting: WaitingBuffer
) -> Snapshot:
    """The state of a packer and its parts as they are now.

    Args:
        packer: it.
        schedules: its.
        rng: what draws masks that are not keyed.
        waiting: what waits.
    """
    source = packer.src_iterable
    counts: dict[str, Any] = {name: getattr(packer, name) for name in COUNTS} | {
        "local": schedules.local.copy(),
        "rng": rng.bit_generator.state,
        "source": source.state_dict() if isinstance(source, Stateful) else None,
    }
    of_waiting = waiting.snapshot()
    return lambda: {"version": VERSION, "settings": lasting_settings(packer)} | counts | {"waiting": of_waiting()}


def load_packer(
    packer: Any,
    state: Mapping[str, Any],
    schedules: PackingSchedules,
    rng: np.random.Generator,
    waiting: WaitingBuffer,
) -> bool:
    """Put a packer and its parts into a state, and say whether its source goes on by itself.

    Args:
        packer: it.
        state: what a snapshot of one with the same settings gave.
        schedules: its.
        rng: what draws masks that are not keyed.
        waiting: what waits.

    Raises:
        ValueError: the state is of a packer with other settings, or of another version.
    """
    check_state(state, lasting_settings(packer))
    source, place = packer.src_iterable, state["source"]
    if isinstance(place, Mapping) and STREAMING_PLACE in place:
        raise ValueError("a StreamingDataLoader does not count documents, so that its place is not where it stopped")
    for name in COUNTS:
        setattr(packer, name, state[name])
    schedules.local = dict(state["local"])
    rng.bit_generator.state = state["rng"]
    waiting.load_state_dict(state["waiting"])
    if isinstance(source, Stateful) and place is not None:
        tell_epoch(source, max(packer.epoch, 0))  # at once: asked for its state, it may begin to read
        source.load_state_dict(place)
        return True
    if packer.source_batches and not packer.source_ended:
        log.warning("the source knows no place of its own: %d source batches are read again", packer.source_batches)
    return False
