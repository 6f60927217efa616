import sys
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_packing import KeyedMasking, SequencePacker, SubsetSumSequencePacker, Tail
from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep
from composer_packing.checkpointing.packed_dataset import PackedDataset
from composer_packing.common.errors import ConfigError
from composer_packing.data.document_loader import DocumentLoader
from composer_packing.data.share_sampler import WHOLE_SHARE, EarlierDeal, ShareSampler
from tests.tools.array_documents import DocumentDataset
from tests.tools.packers import new_packer
from tests.tools.ranks_resuming import COUNT, EPOCHS, STOPS
from tests.tools.reference import originals
from tests.tools.resumed import saved_and_read
from tests.tools.running import result_of
from tests.tools.runs import VOCAB_SIZE

MASKING = KeyedMasking(1, VOCAB_SIZE, range(5))


def numbered(count: int) -> DocumentDataset:
    """Documents of one to seven tokens; each says in its tokens which it is."""
    lengths = 1 + np.arange(count) % 7
    return DocumentDataset(np.repeat(np.arange(5, 5 + count), lengths).astype(np.uint16), np.cumsum([0, *lengths]), 16)


def packer_of(documents: DocumentDataset, rank: int, world_size: int) -> SequencePacker:
    sampler = ShareSampler(documents, world_size, rank, seed=2)
    loader = DocumentLoader(documents, sampler, 3, 0, 1)
    return new_packer(
        SubsetSumSequencePacker,
        *(loader, 3, 2, 16, 9),
        pad_token_id=0,
        mask_token_id=4,
        tail=Tail.CARRY,
        keyed_masking=MASKING,
        world_size=world_size,
    )


def state_of(packer: SequencePacker) -> dict[str, Any]:
    """As `Lockstep.state_dict` returns it."""
    state = packer.state_dict()
    return {"epoch": 0, "batches_in_epoch": 1, "stream": {"epoch": max(state["epoch"], 0), "source": state}}


def redeal(states: Any, rank: int, world_size: int) -> Any:
    """As a rank that resumes does, which has read nothing yet."""
    return Lockstep(packer_of(numbered(1), rank, world_size), prefetch=0).redeal(states, rank, world_size)


class Rank:
    """One rank's packer, and the documents of the batches that it has given, with the epoch each was in."""

    def __init__(self, documents: DocumentDataset, rank: int, world_size: int) -> None:
        self.packer = packer_of(documents, rank, world_size)
        self.seen: list[int] = []
        self.iterator: Iterator[Batch] = iter(())

    def load(self, state: Any) -> None:
        self.packer.load_state_dict(state["stream"]["source"])

    def take(self, count: int, last_epoch: int) -> None:
        """So many more batches, or fewer, if there are no more up to an epoch."""
        for _ in range(count):
            while (batch := next(self.iterator, None)) is None:
                if self.packer.epoch >= last_epoch and not self.packer._resumes_epoch:
                    return
                self.iterator = iter(self.packer)
            self.seen += [document[0] - 5 for document in originals([batch])]

    def state(self) -> Any:
        return saved_and_read(state_of(self.packer))

    def waiting(self) -> list[int]:
        return [int(number) for number in self.packer.state_dict()["waiting"]["documents"]["number"]]


@settings(max_examples=60)
@given(
    st.integers(1, 59),
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 9), min_size=4, max_size=4)), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_every_document_of_every_epoch_comes_once_whatever_ranks_go_on_where_others_stopped(
    count: int, stops: list[tuple[int, list[int]]], last_world_size: int
) -> None:
    """However far each rank has come, and however often ranks change within an epoch."""
    documents, epochs = numbered(count), 3
    ranks: list[Rank] = []
    seen: list[int] = []
    for world_size, batches in [*stops, (last_world_size, [1000] * 4)]:
        states = [rank.state() for rank in ranks]
        tokens = sum(state["stream"]["source"]["local"]["tok"] for state in states)
        ranks = [Rank(documents, rank, world_size) for rank in range(world_size)]
        for number, rank in enumerate(ranks if states else []):
            rank.load(redeal(states, number, world_size))
        assert sum(rank.packer.local_tokens for rank in ranks) == tokens, "schedules go on"
        for rank, more in zip(ranks, batches, strict=False):
            rank.take(more, last_epoch=epochs - 1)
        seen += [document for rank in ranks for document in rank.seen]
    for rank in ranks:
        account = rank.packer.token_account
        assert account.read == account.waiting + account.emitted
    waiting = [document for rank in ranks for document in rank.waiting()]
    assert Counter(seen + waiting) == Counter(dict.fromkeys(range(count), epochs))
    assert sum(rank.packer.token_account.read for rank in ranks) == epochs * int(sum(1 + np.arange(count) % 7))


def test_what_waited_keeps_its_order_and_its_masks() -> None:
    documents = numbered(40)
    ranks = [Rank(documents, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.take(2, 0)
    in_line = [rank.waiting() for rank in ranks]
    taken_over = [redeal([rank.state() for rank in ranks], rank, 3) for rank in range(3)]
    dealt = [state["stream"]["source"]["waiting"]["documents"]["number"].tolist() for state in taken_over]
    expected = [number for pair in zip_longest(*in_line) for number in pair if number is not None]
    assert expected == [number for some in zip_longest(*dealt) for number in some if number is not None]


def test_dealing_again_by_hand() -> None:
    """Five documents on two ranks in epoch 0: the first has read two of three, the second none of two."""
    sampler = ShareSampler(range(5), 1, 0, seed=3)
    order = sampler.numbers().tolist()
    sampler.deals = {0: [EarlierDeal(2, (2, 0))], 1: [EarlierDeal(2, (WHOLE_SHARE, 1))]}
    assert sampler.numbers().tolist() == [order[1], order[3], order[4]]
    sampler.set_epoch(1)
    (second,) = [ShareSampler(range(5), 1, 0, seed=3)]
    second.set_epoch(1)
    order = second.numbers().tolist()
    assert sampler.numbers().tolist() == [order[2], order[4]], "epoch 1 began with the second rank, which had read one"


def test_a_rank_keeps_its_share_if_the_saved_ranks_were_dealt_the_same_shares() -> None:
    documents = numbered(10)
    states = [Rank(documents, rank, 2).state() for rank in range(2)]
    lockstep = Lockstep(packer_of(documents, 1, 2), prefetch=0)
    assert lockstep.has_same_shares(states[0])
    other_nodes = saved_and_read(states[0])
    other_nodes["stream"]["source"]["source"]["ranks_per_node"] = 1
    assert not lockstep.has_same_shares(other_nodes)
    theirs = saved_and_read(states[0])
    for position in ({"place": 3}, None):  # of a source that is not ours
        theirs["stream"]["source"]["source"] = position
        assert not lockstep.has_same_shares(theirs)
        with pytest.raises(ValueError, match="the saved position in the documents is not one of a DocumentLoader"):
            redeal([theirs] * 2, 0, 1)
        assert Lockstep(packer_over_a_list(), prefetch=0).has_same_shares(theirs)


def packer_over_a_list() -> SequencePacker:
    return new_packer(SubsetSumSequencePacker, [[{"input_ids": torch.arange(3)}]], 2, 1, 4, 3)


def test_a_source_without_a_position_cannot_be_dealt_out_to_other_ranks() -> None:
    lockstep = Lockstep(packer_over_a_list(), prefetch=0)
    states = [lockstep.state_dict()] * 2
    with pytest.raises(ValueError, match="a list has no position that could be dealt out to other ranks"):
        lockstep.redeal(states, 0, 1)
    with pytest.raises(ConfigError, match=r"cannot resume from its checkpoint: a list has no .*; resume on 2 ranks, w"):
        PackedDataset(lockstep).load_state_dict({"settings": {"version": 1}, "ranks": states})


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `ranks_resuming` found; one program for all tests that look at it."""
    found: dict[str, Any] = result_of(
        sys.executable, "-m", "tests.tools.ranks_resuming", str(tmp_path_factory.mktemp("ranks"))
    )
    return found


@pytest.mark.slow
def test_two_ranks_go_on_from_every_batch_each_at_its_own_place(ranks: dict[str, Any]) -> None:
    """Compared in the program itself, which fails otherwise."""
    assert min(ranks["steps"]) > 25


@pytest.mark.slow
@pytest.mark.parametrize("stop", STOPS)
def test_composer_goes_on_with_the_same_ranks_as_if_nothing_had_been(ranks: dict[str, Any], stop: int) -> None:
    for whole, rest in zip(ranks["whole"], ranks[f"2 from {stop}"], strict=True):
        assert rest["documents"] == whole["documents"][stop:]
        assert rest["values"] == whole["values"][stop:]
        assert rest["waiting"] == whole["waiting"]
        assert rest["unread"] == whole["unread"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "stop", "after"),
    [*((2, stop, f"{world_size} from {stop}") for stop in STOPS for world_size in (1, 2, 4)), (4, 12, "2 from 4")],
)
def test_composer_goes_on_with_other_ranks_and_every_document_comes_once_an_epoch(
    ranks: dict[str, Any], before: int, stop: int, after: str
) -> None:
    first = ranks["whole"] if before == 2 else [*ranks["4 from 5"]]
    given = [batch for rank in ranks["whole"] for batch in rank["documents"][: stop if before == 2 else STOPS[0]]]
    if before == 4:  # two ranks up to the first stop, then four up to the second, then two again
        given += [batch for rank in first for batch in rank["documents"][: STOPS[1] - STOPS[0]]]
    given += [batch for rank in ranks[after] for batch in rank["documents"]]
    counted = Counter(number for batch in given for number in batch)
    for rank in ranks[after]:
        counted.update(rank["waiting"])
        counted.update(number for numbers in rank["unread"].values() for number in numbers)
    assert counted == Counter(dict.fromkeys(range(COUNT), EPOCHS + 2))

    whole, rest = (some[0]["values"] for some in (ranks["whole"], ranks[after]))
    if before == 2:
        assert rest[0][:2] == whole[stop][:2], "Composer's tokens and documents"
        assert rest[0][3] == pytest.approx(whole[stop][3], abs=0.01), "the mask ratio"
        rows = [sum(rank["values"][0][2] for rank in some) for some in (ranks[after],)]
        assert rows[0] == pytest.approx(sum(rank["values"][stop][2] for rank in ranks["whole"]), abs=2), "the batch"
