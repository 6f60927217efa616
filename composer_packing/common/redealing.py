"""Redealing: how a run resumes when its ranks are no longer those that saved the checkpoint.

Two ranks shared the documents `a` to `j` of an epoch and stopped in the middle of the epoch. Three ranks resume. The
documents that waited for a row are dealt out to them, and so are the documents that no rank has read::

                    packed   waiting   not read
    saved  rank 0   a c      e g       i
           rank 1   b d      f         h j

    resumed rank 0           e         h
            rank 1           f         i
            rank 2           g         j

So every document of the epoch is packed once. If one rank was an epoch ahead, the rest of the earlier epoch comes
first, then the rest of the later one. Counts of tokens and documents are shared out so that their sums stay the same.

Each stage (`Lockstep`, a packer, its buffer, its source) redeals its own keys and asks the stage below for the rest.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Redealable(Protocol):
    """A stage whose state can be dealt out again to other ranks."""

    def has_same_shares(self, state: Any) -> bool:
        """Whether the documents were dealt out to the saved ranks as they are to those that resume.

        Args:
            state: of any rank that saved. The caller makes sure that as many ranks saved as resume.
        """

    def redeal(self, states: Sequence[Any], rank: int, world_size: int) -> Any:
        """The state with which one of the ranks that resume begins.

        Args:
            states: of all ranks that saved, in the order of the ranks.
            rank: the rank that resumes.
            world_size: number of ranks that resume.

        Raises:
            ValueError: the position in the documents cannot be dealt out.
        """


def stage_has_same_shares(stage: object, state: Any) -> bool:
    """What `stage.has_same_shares` returns; True for a stage without that method.

    Args:
        stage: the stage below the one that asks.
        state: as in `Redealable.has_same_shares`.
    """
    return not isinstance(stage, Redealable) or stage.has_same_shares(state)


def redeal_stage(stage: object, states: Sequence[Any], rank: int, world_size: int) -> Any:
    """What `stage.redeal` returns.

    Args:
        stage: the stage below the one that asks.
        states: as in `Redealable.redeal`.
        rank: likewise.
        world_size: likewise.

    Raises:
        ValueError: the stage has no such method, or its position cannot be dealt out.
    """
    if not isinstance(stage, Redealable):
        raise ValueError(f"a {type(stage).__name__} has no position that could be dealt out to other ranks")
    return stage.redeal(states, rank, world_size)
