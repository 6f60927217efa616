from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from composer_packing import (
    BatchShape,
    BatchSizeWarmup,
    DocumentPolicies,
    GreedyBestFitSequencePacker,
    KeyedMasking,
    LabelSettings,
    MaskRatioCooldown,
    ScheduleSettings,
    SequencePacker,
    SubsetSumSequencePacker,
    flat_source_batch,
)
from composer_packing.batch.contract import check_batch
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.token_account import TokenAccount
from tests.packing.test_waiting_buffer import contents
from tests.tools import reference
from tests.tools.packers import new_packer

Documents = list[list[int]]


def wrapped(source_batches: list[Documents], kind: Callable[[list[int]], Any] = list) -> list[Any]:
    return [[{"input_ids": kind(document)} for document in batch] for batch in source_batches]


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with lists instead of tensors, for comparing."""

    def value(of: Any) -> Any:
        return [value(each) for each in of] if isinstance(of, list) else of.tolist() if hasattr(of, "tolist") else of

    return {key: value(of) for key, of in batch.items()}


@pytest.mark.parametrize("case", range(14))
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, "flat uint16", "flat uint32", "flat int64"])
def test_golden_batches_come_out_to_the_bit(golden: dict[str, Any], case: int, kind: Any) -> None:
    given = golden["cases"][case]
    if isinstance(kind, str):
        vocab_size = {"flat uint16": 2**16, "flat uint32": 2**32, "flat int64": None}[kind]
        source = [flat_source_batch(batch, vocab_size) for batch in wrapped(given["source_batches"])]
        assert all(kind.endswith(str(batch.tokens.dtype)) or kind == "flat int64" for batch in source)
    else:
        source = wrapped(given["source_batches"], lambda ids: kind(ids) if ids else ids)
    packer = new_packer(GreedyBestFitSequencePacker, source, **given["params"])
    for expected in given["expected_epochs"]:
        assert [plain(batch) for batch in packer] == expected


def test_batches_have_the_types_of_the_contract(golden: dict[str, Any]) -> None:
    given = golden["cases"][2]
    packer = new_packer(GreedyBestFitSequencePacker, wrapped(given["source_batches"]), **given["params"])
    for batch in packer:
        check_batch(batch)
        assert {batch[key].dtype for key in ("input_ids", "labels", "attention_mask")} == {torch.int64}
        assert {type(longest) for longest in batch["max_seqlen"]} == {int}
        assert batch["mask_prob"].dtype == torch.float32
        assert batch["mask_prob"].shape == ()


both_strategies = pytest.mark.parametrize("strategy", [GreedyBestFitSequencePacker, SubsetSumSequencePacker])

streams = st.fixed_dictionaries(
    {
        "row_len": st.integers(1, 24),
        "rows": st.integers(1, 5),
        "src_batch_size": st.integers(1, 6),
        "extra_buffer": st.integers(1, 20),
        "lengths": st.lists(st.integers(0, 24), max_size=80),
        "mask_prob": st.sampled_from([0.0, 0.15, 0.3, 1.0]),
        "seed": st.integers(0, 1000),
        "pad_token_id": st.sampled_from([-1, 0, 7]),
    }
)


@given(streams)
def test_any_stream_gives_what_the_reference_gives_and_every_document_is_accounted_for(
    stream: dict[str, Any],
) -> None:
    lengths = [min(length, stream["row_len"]) for length in stream["lengths"]]
    ids = iter(range(10, 10_000))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    size = stream["src_batch_size"]
    source = [documents[at : at + size] for at in range(0, len(documents), size)]
    settings = {
        "src_batch_size": size,
        "out_batch_size": stream["rows"],
        "out_pseq_len": stream["row_len"],
        "buffer_size": size + stream["extra_buffer"],
        "pad_token_id": stream["pad_token_id"],
        "mask_token_id": 3,
        "mask_prob": stream["mask_prob"],
        "seed": stream["seed"],
    }
    packer = new_packer(GreedyBestFitSequencePacker, wrapped(source), **settings)
    for epoch in (0, 1):
        expected = list(reference.epoch_batches(source, epoch, **settings))
        assume(expected)
        got = list(packer)
        for batch in got:
            check_batch(batch)
        placed = [document for batch in expected for row in batch.pop("documents") for document in row]
        assert [plain(batch) for batch in got] == expected

        left = [document for document in documents if document and document not in placed]
        assert sorted(placed + left) == sorted(document for document in documents if document)
        assert packer.epoch == epoch
        assert packer.seqs_emitted == len(placed)
        assert packer.seqs_consumed == sum(length > 0 for length in lengths)
    assert packer.local_tokens == 2 * sum(map(len, placed))


def test_a_token_that_equals_the_padding_id_is_still_a_token() -> None:
    packer = new_packer(GreedyBestFitSequencePacker, wrapped([[[0, 5, 0]]]), 1, 1, 4, 2, pad_token_id=0, mask_prob=0.0)
    (batch,) = packer
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]]
    assert packer.local_tokens == 3


def test_documents_without_room_come_first_in_the_next_batch_in_reverse_order() -> None:
    source = wrapped([[[1] * 5, [2] * 4, [3] * 4, [4] * 5, [5] * 5]])
    packer = new_packer(GreedyBestFitSequencePacker, source, 5, 1, 5, 6, suppress_masking=True)
    assert [batch["input_ids"][0, 0].item() for batch in packer] == [1, 5, 2, 4, 3]


def test_suppressing_masks_leaves_no_labels_but_schedules_advance() -> None:
    source = wrapped([[[1] * 4] * 8])
    packer = new_packer(
        GreedyBestFitSequencePacker,
        source,
        8,
        4,
        4,
        9,
        suppress_masking=True,
        batch_size_warmup_min_size=1,
        batch_size_warmup_tokens=12,
    )
    batches = list(packer)
    assert all(batch["labels"] is None and "attention_mask" not in batch for batch in batches)
    assert [len(batch["input_ids"]) for batch in batches] == [1, 2, 4]
    assert packer.local_tokens == 28


@both_strategies
def test_the_warmup_continues_in_the_next_epoch(
    strategy: type[SequencePacker],
) -> None:
    packer = new_packer(
        strategy, wrapped([[[1] * 4] * 4]), 4, 2, 4, 5, batch_size_warmup_min_size=1, batch_size_warmup_tokens=16
    )
    assert [len(batch["input_ids"]) for batch in packer] == [1] * 4
    assert packer.rows_per_batch == 2
    assert [len(batch["input_ids"]) for batch in packer] == [2] * 2


def test_every_epoch_draws_other_masks_and_a_new_packer_draws_the_same_masks() -> None:
    def epochs() -> list[list[Any]]:
        packer = new_packer(GreedyBestFitSequencePacker, wrapped([[list(range(10, 42))] * 4]), 4, 2, 32, 5, seed=1)
        return [[plain(batch) for batch in packer] for _ in range(2)]

    first, again = epochs(), epochs()
    assert first == again
    assert first[0] != first[1]


class Numbered(Dataset[dict[str, list[int]]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [10 + index] * 4}


def test_the_distributed_sampler_is_told_the_epoch() -> None:
    dataset = Numbered()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=lambda documents: documents)
    packer = new_packer(GreedyBestFitSequencePacker, loader, 4, 2, 4, 5, suppress_masking=True)
    for epoch in range(3):
        order = [int(row[0]) - 10 for batch in packer for row in batch["input_ids"]]
        assert sampler.epoch == epoch
        assert sorted(order) == sorted(sampler)


@both_strategies
def test_an_iterator_of_an_earlier_epoch_raises_once_a_newer_one_exists(
    strategy: type[SequencePacker],
) -> None:
    packer = new_packer(strategy, wrapped([[[1] * 4] * 4] * 4), 4, 2, 4, 5)
    old = iter(packer)
    next(old)
    new = iter(packer)
    next(new)
    with pytest.raises(RuntimeError, match="epoch 0 of this packer is over"):
        next(old)
    assert len(list(new)) == 7
    assert packer.seqs_consumed == packer.seqs_emitted == 16


def test_a_batch_is_given_before_the_source_is_exhausted() -> None:
    read = 0

    def source() -> Iterator[Any]:
        nonlocal read
        while True:
            read += 1
            yield [{"input_ids": [1, 2]}] * 2

    class Endless:
        def __iter__(self) -> Iterator[Any]:
            return source()

    packer = new_packer(GreedyBestFitSequencePacker, Endless(), 2, 2, 4, 8)
    next(iter(packer))
    assert read <= 8


@both_strategies
def test_documents_left_over_at_the_end_of_an_epoch_are_reported(
    strategy: type[SequencePacker],
    caplog: pytest.LogCaptureFixture,
) -> None:
    packer = new_packer(strategy, wrapped([[[1] * 4] * 5]), 5, 2, 4, 6)
    assert len(list(packer)) == 2
    assert caplog.messages == ["epoch 0: 1 of 5 documents were left over at the end, too few for another batch"]
    caplog.clear()
    assert len(list(new_packer(strategy, wrapped([[[1] * 4] * 4]), 4, 2, 4, 6))) == 2
    assert caplog.messages == []


strategies = st.sampled_from([GreedyBestFitSequencePacker, SubsetSumSequencePacker])


@given(strategies, streams, st.sampled_from([Tail.CARRY, Tail.EMIT]), st.integers(1, 4))
def test_no_document_is_lost_where_the_tail_is_carried_or_emitted(
    strategy: type[SequencePacker], stream: dict[str, Any], tail: Tail, epochs: int
) -> None:
    lengths = [min(length, stream["row_len"]) for length in stream["lengths"]]
    ids = iter(range(10, 10_000))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    size = stream["src_batch_size"]
    packer = new_packer(
        strategy,
        wrapped([documents[at : at + size] for at in range(0, len(documents), size)]),
        size,
        stream["rows"],
        stream["row_len"],
        size + stream["extra_buffer"],
        tail=tail,
    )
    fed = Counter(tuple(document) for document in documents if document)
    assume(fed)
    found: Counter[tuple[int, ...]] = Counter()
    for epoch in range(1, epochs + 1):
        batches = list(packer)
        found.update(tuple(document) for document in reference.originals(batches))
        rows = [len(batch["input_ids"]) for batch in batches]
        if tail is Tail.CARRY:
            assert set(rows) <= {stream["rows"]}
            assert all(found[document] <= epoch for document in fed)
        else:
            assert set(rows[:-1]) <= {stream["rows"]}
            assert rows[-1] <= stream["rows"]
            assert found == Counter(dict.fromkeys(fed, epoch))
    if tail is Tail.CARRY:
        found.update(tuple(document) for document in contents(packer._waiting))
        assert found == Counter(dict.fromkeys(fed, epochs))


@given(
    strategies,
    streams,
    st.sampled_from(list(Tail)),
    st.sampled_from([OverLong.TRUNCATE, OverLong.SPLIT, OverLong.DROP]),
    st.integers(1, 3),
)
def test_tokens_in_are_tokens_out_and_tokens_reported_whatever_the_policies(
    strategy: type[SequencePacker], stream: dict[str, Any], tail: Tail, over_long: OverLong, epochs: int
) -> None:
    lengths, size, row_len = stream["lengths"], stream["src_batch_size"], stream["row_len"]
    assume(any(lengths))
    ids = iter(range(10, 10_000))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    packer = new_packer(
        strategy,
        wrapped([documents[at : at + size] for at in range(0, len(documents), size)]),
        size,
        stream["rows"],
        row_len,
        size + stream["extra_buffer"],
        tail=tail,
        over_long=over_long,
    )
    batches = []
    for epoch in range(1, epochs + 1):
        try:
            batches += list(packer)
        except ValueError as error:
            expected_error = "too few to put one in each" in str(error) or "are longer than a row" in str(error)
            assume(not expected_error)
            raise
        account = packer.token_account
        assert account.read == epoch * sum(lengths)
        assert account.emitted == sum(int(batch["attention_mask"].sum()) for batch in batches) == packer.local_tokens
        parts = (account.emitted, account.waiting, account.truncated, account.dropped, account.left_over)
        assert account.read == sum(parts)
        assert (
            account.truncated == epoch * sum(max(0, length - row_len) for length in lengths) or over_long != "truncate"
        )
        assert account.dropped == epoch * sum(length for length in lengths if length > row_len) or over_long != "drop"
        assert account.waiting == 0 or tail is Tail.CARRY
        assert account.left_over == 0 or tail is Tail.DROP
    for batch in batches:
        check_batch(batch)
    pieces = {tuple(ids[at : at + row_len]) for ids in documents for at in range(0, len(ids), row_len)}
    assert {tuple(document) for document in reference.originals(batches)} <= pieces


@pytest.mark.parametrize("name", ["tail", "over_long"])
def test_policies_may_be_given_as_their_values_and_as_nothing_else(name: str) -> None:
    def made(value: Any) -> GreedyBestFitSequencePacker:
        settings: dict[str, Any] = {name: value}
        return new_packer(GreedyBestFitSequencePacker, [], 1, 1, 8, 2, **settings)

    for member in Tail if name == "tail" else OverLong:
        assert getattr(made(member.value).policies, name) is member
    with pytest.raises(ValueError, match=f"{name}='carries' must be one of .*drop"):
        made("carries")


@both_strategies
@pytest.mark.parametrize(("document", "over_long"), [([], OverLong.ERROR), ([1] * 9, OverLong.DROP)])
def test_an_endless_source_that_gives_nothing_to_pack_is_an_error_not_a_silent_loop(
    strategy: type[SequencePacker], document: list[int], over_long: OverLong
) -> None:
    class Endless:
        def __iter__(self) -> Iterator[Any]:
            yield from wrapped([[[1] * 8, document]])
            while True:
                yield from wrapped([[document, document]])

    packer = new_packer(strategy, Endless(), 2, 2, 8, 4, over_long=over_long)
    with pytest.raises(ValueError, match="1000 source batches in a row gave no document to pack"):
        list(packer)


def test_an_epoch_of_dropped_documents_is_allowed_after_other_documents_were_packed() -> None:
    """One rank may meet such an epoch while the other ranks continue."""
    shares = iter([[[1] * 8] * 3, [[1] * 9] * 3, [[1] * 8] * 3])

    class Shares:
        def __iter__(self) -> Iterator[Any]:
            return iter(wrapped([next(shares)]))

    packer = new_packer(GreedyBestFitSequencePacker, Shares(), 3, 2, 8, 4, tail="carry", over_long="drop")
    assert [len(list(packer)) for _ in range(3)] == [1, 0, 2]
    assert packer.token_account.dropped == 27


def test_an_account_that_was_asked_for_does_not_change_later() -> None:
    packer = new_packer(GreedyBestFitSequencePacker, wrapped([[[1] * 4] * 4]), 4, 2, 4, 5)
    before = packer.token_account
    list(packer)
    assert packer.token_account.since(before) == TokenAccount(read=16, emitted=16)


def test_an_empty_source_gives_no_batch_if_the_tail_is_emitted() -> None:
    packer = new_packer(GreedyBestFitSequencePacker, [], 1, 1, 8, 2, tail=Tail.EMIT)
    assert list(packer) == []


def test_a_split_document_ten_times_as_long_as_a_row_is_packed_to_the_last_token() -> None:
    packer = new_packer(
        SubsetSumSequencePacker,
        wrapped([[list(range(10, 90))]]),
        1,
        5,
        8,
        2,
        over_long=OverLong.SPLIT,
        suppress_masking=True,
    )
    assert torch.cat([batch["input_ids"] for batch in packer]).flatten().tolist() == list(range(10, 90))
    assert packer.seqs_emitted == 10


@both_strategies
def test_what_happens_to_over_long_documents_is_logged(
    strategy: type[SequencePacker],
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = wrapped([[[1] * 9, [2] * 4, [3] * 40]])
    packer = new_packer(strategy, source, 3, 1, 8, 4, over_long=OverLong.TRUNCATE)
    assert len(list(packer)) == 3
    assert caplog.messages == ["epoch 0: 2 documents were longer than a row (truncate): 33 tokens cut off, 0 dropped"]
    assert packer.token_account.truncated == 33


@pytest.mark.parametrize("tail", list(Tail))
@pytest.mark.parametrize("over_long", list(OverLong))
def test_a_source_of_over_long_documents_gives_batches_or_stops_with_an_error(tail: Tail, over_long: OverLong) -> None:
    packer = new_packer(
        GreedyBestFitSequencePacker, wrapped([[[5] * 9] * 4]), 4, 2, 8, 5, tail=tail, over_long=over_long
    )
    if over_long in (OverLong.ERROR, OverLong.DROP):
        message = "does not fit a row" if over_long is OverLong.ERROR else "4 are longer than a row of 8"
        with pytest.raises(ValueError, match=message):
            list(packer)
    else:
        assert sum(int(batch["attention_mask"].sum()) for batch in packer) >= 24


def test_the_account_adds_up_after_an_epoch_that_was_left_early() -> None:
    packer = new_packer(GreedyBestFitSequencePacker, wrapped([[[1] * 4] * 5] * 3), 5, 2, 4, 6)
    next(iter(packer))
    iter(packer)
    assert packer.token_account == TokenAccount(read=20, emitted=8, left_over=12)


def test_carried_documents_come_first_in_the_next_epoch_in_their_order() -> None:
    packer = new_packer(
        GreedyBestFitSequencePacker,
        wrapped([[[1] * 4, [2] * 4, [3] * 4, [4] * 4, [5] * 4]]),
        5,
        2,
        4,
        6,
        suppress_masking=True,
        tail=Tail.CARRY,
    )
    epochs = [[batch["input_ids"][:, 0].tolist() for batch in packer] for _ in range(2)]
    assert epochs == [[[1, 2], [5, 4]], [[3, 1], [5, 4], [2, 3]]]


@both_strategies
def test_a_set_smaller_than_a_batch_gives_one_once_several_epochs_fill_it(
    strategy: type[SequencePacker],
) -> None:
    packer = new_packer(strategy, wrapped([[[7] * 4]]), 1, 3, 4, 2, suppress_masking=True, tail=Tail.CARRY)
    assert [len(list(packer)) for _ in range(7)] == [0, 0, 1, 0, 0, 1, 0]


@both_strategies
def test_the_last_batch_of_an_epoch_that_emits_its_tail_has_fewer_rows(
    strategy: type[SequencePacker],
) -> None:
    packer = new_packer(strategy, wrapped([[[1] * 4] * 5]), 5, 3, 4, 6, tail=Tail.EMIT)
    assert [len(batch["input_ids"]) for batch in packer] == [3, 2]
    assert packer.seqs_emitted == packer.seqs_consumed == 5


def test_leaving_an_epoch_early_is_logged_if_the_tail_is_carried(caplog: pytest.LogCaptureFixture) -> None:
    packer = new_packer(GreedyBestFitSequencePacker, wrapped([[[1] * 4] * 2] * 3), 2, 1, 4, 3, tail=Tail.CARRY)
    assert len(list(packer)) == 6
    next(iter(packer))
    assert caplog.messages == []
    next(iter(packer))
    assert caplog.messages == ["epoch 1 was left before its source ended: the rest of the source is not read"]


@pytest.mark.parametrize("unit", ["sp", "ba"])
def test_a_warmup_in_documents_or_batches_follows_what_was_packed(unit: str) -> None:
    packer = new_packer(
        GreedyBestFitSequencePacker,
        wrapped([[[1] * 2] * 8] * 8),
        8,
        3,
        4,
        9,
        batch_size_warmup_min_size=1,
        batch_size_warmup_tokens=f"12{unit}",
    )
    rows = [len(batch["input_ids"]) for batch in packer]
    by_hand = {"sp": [1] * 2 + [2] * 2 + [3] * 8, "ba": [1] * 6 + [2] * 6 + [3] * 4}
    assert rows[: len(by_hand[unit])] == by_hand[unit], "two documents fill a row"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"buffer_size": 4}, "buffer_size=4 must exceed src_batch_size=4"),
        ({"buffer_size": 1}, "buffer_size=1 must exceed"),
        ({"src_batch_size": 0}, "src_batch_size=0"),
        ({"out_batch_size": 0}, "out_batch_size=0"),
        ({"out_pseq_len": -3}, "out_pseq_len=-3"),
        ({"world_size": 0}, "world_size=0"),
        ({"mask_prob": 1.5}, "mask_prob=1.5"),
        ({"batch_size_warmup_min_size": 1}, "batch_size_warmup_min_size=1 needs batch_size_warmup_tokens too"),
        ({"batch_size_warmup_tokens": "5tok"}, "batch_size_warmup_tokens='5tok' needs batch_size_warmup_min_size too"),
        ({"batch_size_warmup_tokens": "5ep", "batch_size_warmup_min_size": 1}, "'5ep'"),
        (
            {"batch_size_warmup_tokens": 5, "batch_size_warmup_min_size": 9},
            "batch_size_warmup_min_size=9 must not exceed",
        ),
        ({"final_masking_ratio": 0.1}, "final_masking_ratio=0.1 needs masking_ratio_cooldown_tokens too"),
        ({"masking_cooldown_schedule_type": "cosine"}, "schedule_type='cosine'"),
        ({"masking_ratio_cooldown_start_tokens": 5}, "cooldown_start_tokens=5 needs final_masking_ratio too"),
    ],
)
def test_numbers_that_do_not_go_together_are_an_error_that_shows_them(changed: dict[str, Any], message: str) -> None:
    settings = {
        "src_batch_size": 4,
        "out_batch_size": 2,
        "out_pseq_len": 8,
        "buffer_size": 9,
    }
    with pytest.raises(ValueError, match=message):
        new_packer(GreedyBestFitSequencePacker, [], **settings | changed)


@pytest.mark.parametrize("name", ["src_batch_size", "out_batch_size", "out_pseq_len", "world_size"])
def test_a_size_that_is_not_an_int_is_an_error_that_names_it(name: str) -> None:
    settings: dict[str, Any] = dict.fromkeys(("src_batch_size", "out_batch_size", "out_pseq_len"), 4)
    with pytest.raises(TypeError, match=rf"{name}=4\.0 must be an int"):
        new_packer(GreedyBestFitSequencePacker, [], buffer_size=9, **settings | {name: 4.0})


@pytest.mark.parametrize("name", ["pad_token_id", "mask_token_id"])
@pytest.mark.parametrize("token_id", [None, "a", 1.0])
def test_a_token_id_that_is_not_an_int_is_an_error_that_names_it(name: str, token_id: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}={token_id!r} must be an int"):
        GreedyBestFitSequencePacker.from_composer([], **{name: token_id})


def test_a_source_that_can_be_read_only_once_is_an_error_in_the_second_epoch() -> None:
    packer = new_packer(GreedyBestFitSequencePacker, (batch for batch in wrapped([[[1] * 4] * 4])), 4, 2, 4, 5)
    assert len(list(packer)) == 2
    with pytest.raises(ValueError, match="epoch 1: the source gave nothing; it must be readable more than once"):
        list(packer)


@pytest.mark.parametrize("tail", list(Tail))
def test_a_source_that_can_be_read_only_once_is_an_error_with_every_tail_policy(tail: Tail) -> None:
    packer = new_packer(
        GreedyBestFitSequencePacker, (batch for batch in wrapped([[[1] * 4] * 4])), 4, 2, 4, 5, tail=tail
    )
    assert len(list(packer)) == 2
    with pytest.raises(ValueError, match="it must be readable more than once"):
        list(packer)


@both_strategies
def test_a_document_longer_than_a_row_is_an_error_that_shows_the_lengths(
    strategy: type[SequencePacker],
) -> None:
    packer = new_packer(strategy, wrapped([[[1], [2] * 9]]), 2, 1, 8, 3)
    with pytest.raises(ValueError, match=r"document of 9 tokens does not fit a row of 8 slots"):
        next(iter(packer))


@both_strategies
def test_a_source_batch_larger_than_promised_is_an_error_that_shows_both_sizes(
    strategy: type[SequencePacker],
) -> None:
    packer = new_packer(strategy, wrapped([[[1], [2], [3]]]), 2, 1, 8, 3)
    with pytest.raises(ValueError, match="3 documents at once, more than src_batch_size=2"):
        list(packer)


@pytest.mark.parametrize("source", [[], [[]], [[[], []]], [[[1, 2]]]])
def test_a_source_too_small_for_a_batch_is_an_error_not_an_empty_epoch(source: list[Documents]) -> None:
    packer = new_packer(GreedyBestFitSequencePacker, wrapped(source), 2, 2, 8, 3)
    documents = sum(bool(document) for batch in source for document in batch)
    with pytest.raises(ValueError, match=f"gave {documents} documents, too few"):
        list(packer)


def test_from_composer_turns_sequences_into_rows() -> None:
    packer = GreedyBestFitSequencePacker.from_composer(
        [],
        batch_size=24,
        micro_batch_size=4,
        max_seq_len=16,
        buffer_size=100,
        batch_size_warmup_min_size=8,
        batch_size_warmup_tokens="1000tok",
    )
    assert packer.shape == BatchShape(src_batch_size=24, out_batch_size=6, out_pseq_len=64, buffer_size=100)
    assert packer.rows_per_batch == 2


@both_strategies
def test_from_composer_makes_the_same_packer_as_its_groups_of_settings(strategy: type[SequencePacker]) -> None:
    source = [[{"input_ids": [5] * (1 + i % 16), "document": i} for i in range(24)]] * 3
    masking = KeyedMasking(3, 50, [0])
    flat = strategy.from_composer(
        source,
        batch_size=24,
        micro_batch_size=4,
        max_seq_len=12,
        buffer_size=100,
        pad_token_id=1,
        mask_prob=0.5,
        batch_size_warmup_min_size=8,
        batch_size_warmup_tokens="100tok",
        final_masking_ratio=0.2,
        masking_ratio_cooldown_tokens="300tok",
        masking_ratio_cooldown_start_tokens="10tok",
        masking_cooldown_schedule_type="stair",
        masking_ratio_step_size=0.1,
        world_size=2,
        tail="emit",
        over_long="split",
        keyed_masking=masking,
        max_document_len=12,
    )
    grouped = strategy(
        source,
        BatchShape(src_batch_size=24, out_batch_size=6, out_pseq_len=48, buffer_size=100, max_document_len=12),
        LabelSettings(pad_token_id=1, mask_prob=0.5, keyed_masking=masking),
        ScheduleSettings(
            BatchSizeWarmup(2, "100tok"),
            MaskRatioCooldown(0.2, "300tok", "10tok", "stair", 0.1),
            world_size=2,
        ),
        DocumentPolicies(Tail.EMIT, OverLong.SPLIT),
    )
    batches = [plain(batch) for batch in flat]
    assert batches == [plain(batch) for batch in grouped]
    assert len({batch["mask_prob"] for batch in batches}) > 2
    assert {2, 6} <= {len(batch["input_ids"]) for batch in batches}


def test_from_composer_has_the_published_defaults() -> None:
    packer = GreedyBestFitSequencePacker.from_composer([])
    shape, labels = packer.shape, packer.labels
    assert (shape.src_batch_size, shape.out_batch_size, shape.out_pseq_len) == (512, 16, 32 * 1024)
    assert (shape.buffer_size, labels.pad_token_id, labels.mask_token_id) == (5120, -1, 0)
    assert (labels.ignore_token_id, labels.mask_prob, labels.seed) == (-100, 0.3, 42)
    assert (labels.objective, packer.policies) == (Objective.MLM, DocumentPolicies(Tail.DROP, OverLong.ERROR))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"batch_size": 10, "micro_batch_size": 4}, "batch_size=10 must be a multiple of micro_batch_size=4"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"max_seq_len": 0}, "max_seq_len=0"),
        ({"batch_size_warmup_min_size": 33, "batch_size_warmup_tokens": 1}, "batch_size_warmup_min_size=33"),
        (
            {"batch_size_warmup_min_size": 0, "batch_size_warmup_tokens": 1},
            "batch_size_warmup_min_size=0 must be at least 1",
        ),
    ],
)
def test_from_composer_refuses_sizes_that_do_not_divide(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GreedyBestFitSequencePacker.from_composer([], **sizes)
