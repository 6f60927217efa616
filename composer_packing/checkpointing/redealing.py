"""A run that goes on with other ranks: what waited, and what had not been read, is dealt out again.

Two ranks had read `a c e` and `b d` of an epoch, `c e` and `d` of which wait. Of three ranks that go on, each gets one
of those that wait, and a third of what neither has read; where one of the two was an epoch ahead, first what is left
of the earlier epoch, then of the later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.batch.lockstep import LockstepState
from composer_packing.data.share_sampler import ALL
from composer_packing.packing.document_store import as_bytes, tokens_in
from composer_packing.packing.token_account import TokenAccount

State = Mapping[str, Any]


def has_the_same_shares(states: Sequence[State], own: State, world_size: int) -> bool:
    """Whether ranks read the shares of those that saved.

    Args:
        states: of all ranks that saved, as `Lockstep.state_dict` gives them.
        own: of a rank that goes on, in the same form.
        world_size: number of those.
    """
    there, here = (state["stream"]["source"].get("source") for state in (states[0], own))
    nodes = [(source or {}).get("ranks_per_node") for source in (there, here)]
    return len(states) == world_size and nodes[0] == nodes[1]


def share_of(total: int, rank: int, world_size: int) -> int:
    """A rank's part of a count; those of all ranks add up to it."""
    return total // world_size + (rank < total % world_size)


def redeal(states: Sequence[State], rank: int, world_size: int) -> LockstepState:
    """What one of the ranks that go on begins with: every document is with one of them.

    Args:
        states: of all ranks that saved, as `Lockstep.state_dict` gives them over a packer over a `DocumentLoader`.
        rank: the one that goes on.
        world_size: ranks that go on.

    Raises:
        ValueError: the source has no place that could be dealt out.
    """
    packers = [state["stream"]["source"] for state in states]
    sources = [packer["source"] for packer in packers]
    if not all(source and "deals" in source for source in sources):
        raise ValueError(f"saved on {len(states)} ranks, whose source knows no place: it cannot go on on {world_size}")

    epoch = min(source["epoch"] for source in sources)
    waiting, num_tokens = _share_of_waiting([packer["waiting"] for packer in packers], rank, world_size)
    accounts = [packer["waiting"]["account"] for packer in packers]
    account = {name: share_of(sum(each[name] for each in accounts), rank, world_size) for name in accounts[0]}
    account["waiting"] = num_tokens
    account["read"] = TokenAccount(**account).placed
    totals = {unit: sum(packer["local"][unit] for packer in packers) for unit in ("tok", "sp")}
    local = {unit: share_of(total, rank, world_size) for unit, total in totals.items()}
    packer = packers[0] | {
        "epoch": epoch,
        "source_ended": False,
        **dict.fromkeys(("seqs_consumed", "seqs_emitted", "source_batches"), 0),
        "local": packers[0]["local"] | local,  # batches are as many on every rank
        "waiting": waiting | {"account": account, "account_before": account},
        "source": {"epoch": epoch, "read": 0, "deals": _deals(sources)},
    }
    return {
        "epoch": states[0]["epoch"],
        "batches_in_epoch": states[0]["batches_in_epoch"],
        "stream": {"epoch": epoch, "source": packer},
    }


def _deals(sources: Sequence[State]) -> dict[int, list[Any]]:
    """How the epochs that some rank had begun were dealt out, and how far it had come in each."""
    epochs = [source["epoch"] for source in sources]
    deals = {epoch: list(earlier) for source in sources for epoch, earlier in source["deals"].items()}
    for epoch in range(min(epochs), max(epochs) + 1):
        read = [
            ALL if source["epoch"] > epoch else source["read"] if source["epoch"] == epoch else 0 for source in sources
        ]
        deals.setdefault(epoch, []).append([sources[0]["ranks_per_node"], read])
    return deals


def _share_of_waiting(buffers: Sequence[State], rank: int, world_size: int) -> tuple[dict[str, Any], int]:
    """What waited on any rank, dealt out in waiting order: the state of a buffer, and its number of tokens."""
    counts = [len(buffer["documents"]["length"]) for buffer in buffers]
    columns = {
        name: np.concatenate([buffer["documents"][name] for buffer in buffers]) for name in buffers[0]["documents"]
    }
    ends = np.cumsum(columns["length"])
    places = np.concatenate([np.arange(count) for count in counts])
    mine = np.argsort(places, kind="stable")[rank::world_size]
    slices = [slice(ends[one] - columns["length"][one], ends[one]) for one in mine]
    kept = {name: column[mine] for name, column in columns.items()}
    kept["serial"] = np.arange(len(mine))

    def of_mine(of_all: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([of_all[:0], *(of_all[each] for each in slices)])

    waiting = {
        **as_bytes(of_mine(np.concatenate([tokens_in(buffer) for buffer in buffers]))),
        "loss_mask": torch.from_numpy(of_mine(np.concatenate([buffer["loss_mask"] for buffer in buffers]))),
        "documents": {name: torch.from_numpy(column) for name, column in kept.items()},
        "num_added": len(mine),
        "num_gone": 0,
        "idle_reads": 0,
    }
    return waiting, int(kept["length"].sum())
