"""The check of everything that resumes from a state: restore at every step, and compare the whole rest."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep


def saved_and_read(state: Any) -> Any:
    """A state as a checkpoint brings it back. It must be so plain that reading it runs no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(one: Any, other: Any) -> None:
    """Assert that two batches, or two lists of batches, are equal bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


def taken(batches: Lockstep, epochs: Sequence[int]) -> tuple[list[tuple[int, Batch]], list[Any]]:
    """The batches of some epochs, each with its epoch; and the states before the first batch and after each."""
    found, states = [], [saved_and_read(batches.state_dict())]
    for epoch in epochs:
        for batch in batches:
            found.append((epoch, batch))
            states.append(saved_and_read(batches.state_dict()))
    batches.close()
    return found, states


def check_resumes_from_every_batch(make: Callable[[], Lockstep], epochs: int = 2) -> list[tuple[int, Batch]]:
    """Stop after every batch of some epochs, and check that the rest is the same as without the stop, bit for bit.

    Args:
        make: makes the batches of a run, as a process does that has just started.
        epochs: number of epochs.

    Returns:
        The batches, each with its epoch.
    """
    undisturbed, states = taken(make(), range(epochs))
    assert len(undisturbed) > epochs
    for number, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        rest, later_states = taken(again, range(state["epoch"], epochs))
        assert_same(rest, undisturbed[number:])
        assert_same(later_states, states[number:])
    return undisturbed
