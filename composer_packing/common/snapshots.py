"""Saving a place and going on from it: the verbs that every stage between documents and batches has in common.

`snapshot()` is taken behind every batch and costs next to nothing; what it gives is called only when something is
saved, and gives the `state_dict()`: plain ints, lists and tensors, in dicts. `load_state_dict` takes it back, and the
next `iter()` goes on from there.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

Snapshot = Callable[[], dict[str, Any]]
"""Gives the state as it was when the snapshot was taken, whatever has happened since."""


@runtime_checkable
class Stateful(Protocol):
    """A source that knows its own place, as our `DocumentLoader`, or torchdata's `StatefulDataLoader`.

    `StreamingDataLoader` is none, for all that it has the methods: it counts documents by the length of the first value
    of a batch, or of its first document.
    """

    def state_dict(self) -> dict[str, Any]:
        """Where it is, just behind the source batch that it gave last; asked for behind every packed batch and kept."""

    def load_state_dict(self, state: Any) -> None:
        """Start there at the next `iter()`; where nothing was left, that one is the next epoch's."""


def snapshot_of(iterable: object) -> Snapshot | None:
    """What it has for one; None where it has none."""
    take = getattr(iterable, "snapshot", None)
    return None if take is None else take()


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is not the same in two sets of settings, each as `name was this, is that`."""
    return [
        f"{name} was {there.get(name)}, is {here.get(name)}"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    ]


def share_of(total: int, rank: int, world_size: int) -> int:
    """One rank's part of a count. The parts of all ranks add up to the count."""
    return total // world_size + (rank < total % world_size)
