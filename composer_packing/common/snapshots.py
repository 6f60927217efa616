"""Saved state: the methods by which every stage between documents and batches saves its state and resumes from it.

=======================  ===================================================================================
method                   what it does
=======================  ===================================================================================
`snapshot()`             taken after every batch, costs next to nothing; returns a function
the returned function    called only when a checkpoint is written; returns the state as it was at `snapshot()`
`state_dict()`           the state as it is now: a dict of plain ints, lists, tensors and such dicts
`load_state_dict(state)` sets the state; the next `iter()` resumes from it
=======================  ===================================================================================
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

Snapshot = Callable[[], dict[str, Any]]
"""A function that returns the state as it was when the snapshot was taken, whatever has happened since."""


@runtime_checkable
class Stateful(Protocol):
    """A source of documents that can save and restore its position, such as our `DocumentLoader`.

    torchdata's `StatefulDataLoader` is one too. Streaming's `StreamingDataLoader` has the methods but does not count
    documents: it counts the length of a batch's first value, or of its first document. A packer refuses its state.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position right after the last source batch. A packer asks for it after every packed batch."""

    def load_state_dict(self, state: Any) -> None:
        """Set the position at which the next `iter()` starts: in the next epoch if the saved epoch was read fully."""


def snapshot_of(iterable: object) -> Snapshot | None:
    """Return the snapshot of an iterable as it is now, or None if the iterable has no `snapshot` method."""
    take = getattr(iterable, "snapshot", None)
    return None if take is None else take()


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return where two sets of settings differ, each as `name was SAVED, is CURRENT`, sorted by name."""
    return [
        f"{name} was {saved.get(name)}, is {current.get(name)}"
        for name in sorted({*saved, *current})
        if saved.get(name) != current.get(name)
    ]


def share_of(total: int, rank: int, world_size: int) -> int:
    """One rank's part of a count. The parts of all ranks add up to the count."""
    return total // world_size + (rank < total % world_size)
