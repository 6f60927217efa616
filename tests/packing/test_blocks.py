import itertools
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_packing.packing.blocks import PackedBlocks, pack_blocks, pack_sequences

PAD = 7

Pieces = list[list[tuple[int, int]]]
"""Pieces of sequences, each token with its loss mask."""

PLACEMENTS: list[dict[str, Any]] = [{"split": True}, {"split": False}, {"split": False, "best_fit": True}]

KINDS: list[Any] = [list, tuple, np.array, torch.tensor]
"""Types in which spans may be given."""


def split_over_boundaries(examples: Pieces, row_len: int) -> list[Pieces]:
    blocks: list[Pieces] = []
    filled = row_len
    for example in examples:
        is_new = True
        for token in example:
            if filled == row_len:
                blocks.append([])
                filled = 0
                is_new = True
            if is_new:
                blocks[-1].append([])
                is_new = False
            blocks[-1][-1].append(token)
            filled += 1
    return blocks


def next_block(examples: Pieces, row_len: int) -> list[Pieces]:
    blocks: list[Pieces] = []
    for example in examples:
        if not blocks or len(example) > row_len - sum(map(len, blocks[-1])):
            blocks.append([])
        blocks[-1].append(example)
    return blocks


def best_fit(examples: Pieces, row_len: int) -> list[Pieces]:
    blocks: list[Pieces] = []
    room: list[int] = []
    since: list[int] = []
    for now, example in enumerate(examples):
        fitting = [(room[at], since[at], at) for at in range(len(blocks)) if room[at] >= len(example)]
        if fitting:
            at = min(fitting)[2]
        else:
            at = len(blocks)
            blocks.append([])
            room.append(row_len)
            since.append(now)
        blocks[at].append(example)
        room[at] -= len(example)
        since[at] = now
    return blocks


def expected(
    sequences: list[list[int]], masks: list[list[int]], row_len: int, split: bool, best: bool
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Blocks, loss masks and `cu_seqlens` as lists, from placing one sequence after another."""
    examples = [list(zip(ids, mask, strict=True))[:row_len] for ids, mask in zip(sequences, masks, strict=True)]
    examples = [example for example in examples if any(learned for _, learned in example)]
    place = split_over_boundaries if split else best_fit if best else next_block
    blocks, loss_masks, all_ends = [], [], []
    for pieces in place(examples, row_len):
        tokens = list(itertools.chain.from_iterable(pieces))
        padding = row_len - len(tokens)
        blocks.append([token for token, _ in tokens] + [PAD] * padding)
        loss_masks.append([learned for _, learned in tokens] + [0] * padding)
        ends = [0, *itertools.accumulate(map(len, pieces))]
        all_ends.append(ends + [row_len] * (padding > 0))
    return blocks, loss_masks, all_ends


def as_lists(packed: PackedBlocks) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    assert packed.blocks.dtype == packed.loss_masks.dtype == np.int64
    assert all(ends.dtype == np.int32 for ends in packed.cu_seqlens)
    return packed.blocks.tolist(), packed.loss_masks.tolist(), [ends.tolist() for ends in packed.cu_seqlens]


def numbered(lengths: list[int]) -> list[list[int]]:
    """Sequences of these lengths. No token comes twice, and the id of padding is one of them."""
    ids = itertools.count()
    return [list(itertools.islice(ids, length)) for length in lengths]


some_lengths = st.lists(st.integers(0, 14), max_size=60)
row_lengths = st.sampled_from([1, 2, 3, 5, 8, 12, 16, 17, 65])
placements = st.sampled_from(PLACEMENTS)


@st.composite
def examples(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    """Sequences, and a loss mask of each."""
    sequences = numbered(draw(some_lengths))
    return sequences, [draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))) for ids in sequences]


@given(some_lengths, row_lengths, placements)
def test_every_placement_gives_what_placing_one_sequence_after_another_gives(
    lengths: list[int], row_len: int, how: dict[str, Any]
) -> None:
    sequences = numbered(lengths)
    masks = [[1] * length for length in lengths]
    packed = pack_blocks(sequences, row_len, PAD, **how)
    assert as_lists(packed) == expected(sequences, masks, row_len, how["split"], "best_fit" in how)
    assert packed.num_truncated == sum(length > row_len for length in lengths)
    assert packed.num_dropped == 0


@given(examples(), row_lengths, placements)
def test_placements_with_responses_are_the_same_and_examples_without_a_response_left_are_counted(
    drawn: tuple[list[list[int]], list[list[int]]], row_len: int, how: dict[str, Any]
) -> None:
    sequences, masks = drawn
    packed = pack_blocks(sequences, row_len, PAD, loss_masks=masks, **how)
    assert as_lists(packed) == expected(sequences, masks, row_len, how["split"], "best_fit" in how)
    assert packed.num_dropped == sum(len(mask) > 0 and not any(mask[:row_len]) for mask in masks)


@given(some_lengths, row_lengths)
def test_split_sequences_lie_in_their_order_with_every_token_once_and_only_the_last_block_is_padded(
    lengths: list[int], row_len: int
) -> None:
    sequences = numbered(lengths)
    blocks, loss_masks = pack_sequences(sequences, row_len, PAD)
    kept = list(itertools.chain.from_iterable(ids[:row_len] for ids in sequences))
    assert list(itertools.chain.from_iterable(blocks))[: len(kept)] == kept
    assert len(blocks) == -(-len(kept) // row_len)
    assert all(all(mask) for mask in loss_masks[:-1])


@given(some_lengths, row_lengths, placements)
def test_loss_masks_sum_to_the_kept_tokens_and_all_other_slots_are_padding(
    lengths: list[int], row_len: int, how: dict[str, Any]
) -> None:
    packed = pack_blocks(numbered(lengths), row_len, -1, **how)
    assert packed.loss_masks.sum() == sum(min(length, row_len) for length in lengths)
    assert np.array_equal(packed.blocks == -1, packed.loss_masks == 0)


@given(some_lengths, row_lengths, st.booleans())
def test_without_splitting_every_sequence_is_a_segment_of_its_own(lengths: list[int], row_len: int, best: bool) -> None:
    sequences = numbered(lengths)
    packed = pack_blocks(sequences, row_len, -1, split=False, best_fit=best)
    segments = [
        block[start:end]
        for block, ends in zip(packed.blocks.tolist(), packed.cu_seqlens, strict=True)
        for start, end in itertools.pairwise(ends.tolist())
        if block[start] != -1
    ]
    assert sorted(segments) == [ids[:row_len] for ids in sequences if ids]


@given(examples(), placements)
def test_every_token_keeps_its_loss_mask(drawn: tuple[list[list[int]], list[list[int]]], how: dict[str, Any]) -> None:
    sequences, masks = drawn
    blocks, loss_masks = pack_sequences(sequences, 14, -1, loss_masks=masks, **how)
    learned = Counter(zip(itertools.chain(*blocks), itertools.chain(*loss_masks), strict=True))
    del learned[-1, 0]
    examples = [zip(ids, mask, strict=True) for ids, mask in zip(sequences, masks, strict=True) if any(mask)]
    assert learned == Counter(itertools.chain(*examples))


@given(st.data(), some_lengths, row_lengths, placements)
def test_spans_give_the_same_blocks_as_masks(
    data: st.DataObject, lengths: list[int], row_len: int, how: dict[str, Any]
) -> None:
    """Also if spans overlap or are empty."""
    spans: list[Any] = []
    masks = [[0] * length for length in lengths]
    for length, mask in zip(lengths, masks, strict=True):
        drawn = data.draw(st.lists(st.lists(st.integers(0, length), min_size=2, max_size=2), max_size=3))
        drawn = [sorted(span) for span in drawn]
        for start, end in drawn:
            mask[start:end] = [1] * (end - start)
        as_single = len(drawn) == 1 and data.draw(st.booleans())
        kind = data.draw(st.sampled_from(KINDS))
        spans.append(kind(drawn[0] if as_single else drawn))
    by_spans = pack_blocks(numbered(lengths), row_len, PAD, response_spans=spans, **how)
    by_masks = pack_blocks(numbered(lengths), row_len, PAD, loss_masks=masks, **how)
    assert as_lists(by_spans) == as_lists(by_masks)
    assert by_spans[3:] == by_masks[3:]


def test_best_fit_over_many_open_blocks_gives_what_trying_each_block_gives() -> None:
    lengths = np.random.default_rng(1).integers(100, 300, 1500).tolist()
    sequences = numbered(lengths)
    packed = pack_blocks(sequences, 320, PAD, split=False, best_fit=True)
    assert len(packed.blocks) > 500
    assert as_lists(packed) == expected(sequences, [[1] * length for length in lengths], 320, False, True)


def test_three_sequences_fill_two_blocks() -> None:
    assert pack_sequences([[1, 2], [3, 4, 5], [6]], 4) == ([[1, 2, 3, 4], [5, 6, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("how", "picture", "all_ends"),
    [
        (PLACEMENTS[0], "aaaaabbb bcccdddd ddeeeff.", [[0, 5, 8], [0, 1, 4, 8], [0, 2, 5, 7, 8]]),
        (PLACEMENTS[1], "aaaaa... bbbbccc. dddddd.. eeeff...", [[0, 5, 8], [0, 4, 7, 8], [0, 6, 8], [0, 3, 5, 8]]),
        (PLACEMENTS[2], "aaaaaccc bbbbeee. ddddddff", [[0, 5, 8], [0, 4, 7, 8], [0, 6, 8]]),
    ],
)
def test_the_picture_in_the_docstring_is_what_happens(
    how: dict[str, Any], picture: str, all_ends: list[list[int]]
) -> None:
    sequences = [[ord(name)] * length for name, length in zip("abcdef", [5, 4, 3, 6, 3, 2], strict=True)]
    blocks, _, ends = as_lists(pack_blocks(sequences, 8, ord("."), **how))
    assert " ".join("".join(map(chr, block)) for block in blocks) == picture
    assert ends == all_ends


def test_on_a_tie_best_fit_takes_the_block_that_has_had_this_room_for_longest() -> None:
    """The second block has room for 2 from the start, the first block only after the second sequence of 3."""
    sequences = [[1] * 3, [2] * 6, [3] * 3, [4] * 2, [5] * 2]
    packed = pack_blocks(sequences, 8, split=False, best_fit=True)
    assert packed.blocks.tolist() == [[1, 1, 1, 3, 3, 3, 5, 5], [2, 2, 2, 2, 2, 2, 4, 4]]


def test_an_example_whose_response_is_cut_off_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    sequences = [[1, 2, 3, 4, 5, 6], [11, 12], [21, 22, 23, 24, 25], [31]]
    with caplog.at_level(logging.WARNING, "composer_packing.packing.blocks"):
        packed = pack_blocks(sequences, 4, response_spans=[(4, 6), (1, 2), [(0, 1), (3, 5)], []])
    assert packed.blocks.tolist() == [[11, 12, 21, 22], [23, 24, 0, 0]]
    assert packed.loss_masks.tolist() == [[0, 1, 1, 0], [0, 1, 0, 0]]
    assert (packed.num_truncated, packed.num_dropped) == (2, 2)
    assert caplog.messages == [
        "of 4 sequences, 2 were cut to 4 tokens and 2 were dropped because they had no response token left",
    ]


@pytest.mark.parametrize(("mask", "cut", "dropped"), [([0, 0], 0, 1), ([1, 0, 0], 1, 0)])
def test_one_warning_reports_sequences_that_were_only_cut_or_only_dropped(
    caplog: pytest.LogCaptureFixture, mask: list[int], cut: int, dropped: int
) -> None:
    pack_blocks([[1], [2] * len(mask)], 2, loss_masks=[[1], mask])
    assert caplog.messages == [
        f"of 2 sequences, {cut} were cut to 2 tokens and {dropped} were dropped because they had no response token left"
    ]


def test_nothing_is_logged_if_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    pack_blocks([[1, 2], []], 4, response_spans=[(1, 2), (0, 0)])
    assert caplog.messages == []


def test_a_token_with_the_id_of_padding_is_a_token() -> None:
    assert pack_sequences([[0, 5, 0], [0, 0]], 4) == ([[0, 5, 0, 0], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize("how", PLACEMENTS)
def test_no_sequences_give_no_blocks_and_empty_sequences_are_passed_over(how: dict[str, Any]) -> None:
    for count in range(3):
        nothing: list[list[int]] = [[] for _ in range(count)]
        packed = pack_blocks(nothing, 4, loss_masks=nothing, **how)
        assert packed.blocks.shape == packed.loss_masks.shape == (0, 4)
        assert packed[2:] == ([], 0, 0)
    assert pack_sequences([[], [1], [], [2], []], 2, **how) == ([[1, 2]], [[1, 1]])


def test_a_full_block_has_no_segment_of_padding() -> None:
    assert [ends.tolist() for ends in pack_blocks([[1, 2], [3, 4]], 4).cu_seqlens] == [[0, 2, 4]]


@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 2), (3, 4)],
        np.array([[1, 2], [3, 4]], np.uint16),
        torch.tensor([[1, 2], [3, 4]]),
        [np.array([1, 2]), torch.tensor([3, 4])],
        ([1, 2], [3, 4]),
        (list(ids) for ids in ((1, 2), (3, 4))),
    ],
)
def test_lists_tuples_arrays_tensors_and_iterators_give_the_same_blocks(sequences: Any) -> None:
    given = pack_sequences(sequences, 3, loss_masks=np.array([[False, True], [True, False]]))
    assert given == ([[1, 2, 3], [4, 0, 0]], [[0, 1, 1], [0, 0, 0]])
    assert all(type(item) is int for lists in given for row in lists for item in row)


def test_the_given_arrays_are_not_changed() -> None:
    sequences, masks = [np.array([1, 2, 3])], [np.array([0, 1, 1])]
    packed = pack_blocks(sequences, 3, loss_masks=masks)
    packed.blocks[:] = packed.loss_masks[:] = 9
    assert (sequences[0].tolist(), masks[0].tolist()) == ([1, 2, 3], [0, 1, 1])


@pytest.mark.parametrize(
    ("sequences", "shown"),
    [
        ([1, 2], "int: 1"),
        ("ab", "str: a"),
        (["ab"], "str: ab"),
        ([[1.5]], r"list: \[1.5\]"),
        ([[[1]]], r"list: \[\[1\]\]"),
        ([[1], None], "NoneType: None"),
        ([np.ones((1, 2), np.int64)], r"ndarray: \[\[1 1\]\]"),
        ({1: [2]}, "int: 1"),
    ],
)
def test_a_sequence_of_another_type_is_an_error_that_shows_it(sequences: Any, shown: str) -> None:
    with pytest.raises(TypeError, match=f"each sequence must be a flat sequence of integers.*got {shown}"):
        pack_sequences(sequences, 4)


@pytest.mark.parametrize("sequences", [None, 5, torch.tensor(5)])
def test_an_argument_that_holds_no_sequences_is_an_error_that_shows_it(sequences: Any) -> None:
    with pytest.raises(TypeError, match=r"^sequences must be a sequence of sequences; got \w+: .*(None|5)"):
        pack_sequences(sequences, 4)


@pytest.mark.parametrize("sequences", [[[1], [-3]], [np.array([-3])]])
def test_a_negative_id_is_an_error_that_shows_it(sequences: Any) -> None:
    with pytest.raises(ValueError, match=r"token ids must lie between 0 and .*got -3"):
        pack_sequences(sequences, 4)


@pytest.mark.parametrize("wrong", [4.0, "4", None, np.array([4, 4])])
def test_a_size_or_an_id_that_is_not_an_int_is_an_error_that_shows_it(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"max_seq_length=.* must be an int"):
        pack_sequences([[1]], wrong)
    with pytest.raises(TypeError, match=r"padding_token_id=.* must be an int"):
        pack_sequences([[1]], 4, wrong)


def test_a_padding_id_that_does_not_fit_int64_is_an_error_that_shows_it() -> None:
    with pytest.raises(ValueError, match=f"padding_token_id={2**63} must fit int64"):
        pack_sequences([[1]], 4, 2**63)


@pytest.mark.parametrize(("wrong", "bound"), [(0, "at least 1"), (-1, "at least 1"), (2**31, r"below 2\*\*31")])
def test_a_size_out_of_range_is_an_error_that_shows_it(wrong: int, bound: str) -> None:
    with pytest.raises(ValueError, match=f"max_seq_length={wrong} must be {bound}"):
        pack_sequences([[1]], wrong)


def test_options_that_do_not_go_together_are_errors() -> None:
    with pytest.raises(ValueError, match="best_fit=True needs split=False, got split=True"):
        pack_sequences([[1]], 4, best_fit=True)
    with pytest.raises(ValueError, match="loss_masks and response_spans must not both be given"):
        pack_sequences([[1]], 4, loss_masks=[[1]], response_spans=[(0, 1)])


@pytest.mark.parametrize("name", ["loss_masks", "response_spans"])
def test_a_wrong_number_of_masks_or_spans_is_an_error_that_shows_both_numbers(name: str) -> None:
    too_few, none_at_all = {name: [[1]]}, {name: 5}
    with pytest.raises(ValueError, match=f"{name} must have one entry for each of 2 sequences; got 1"):
        pack_sequences([[1], [2]], 4, 0, **too_few)
    with pytest.raises(TypeError, match=f"{name} must be a sequence of sequences; got int: 5"):
        pack_sequences([[1], [2]], 4, 0, **none_at_all)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        ([1], "loss mask 1 has 1 values for 2 tokens"),
        ([1, 2], "values of loss masks must lie between 0 and 1; got 2"),
        ([-1, 1], "values of loss masks must lie between 0 and 1; got -1"),
    ],
)
@pytest.mark.parametrize("kind", [list, np.array])
def test_a_mask_of_another_length_or_other_values_is_an_error_that_shows_it(mask: Any, shown: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=shown):
        pack_sequences([[1], [2, 3], [4]], 4, loss_masks=[kind([1]), kind(mask), kind([0])])


@pytest.mark.parametrize("mask", [[0.5, 1.0], "ab", None, [[1], [1]]])
def test_a_mask_of_another_type_is_an_error_that_shows_it(mask: Any) -> None:
    with pytest.raises(TypeError, match="each loss mask must be a flat sequence of integers"):
        pack_sequences([[1], [2, 3]], 4, loss_masks=[[1], mask])


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 1), (0, 4), (4, 4)])
def test_a_span_that_does_not_lie_in_its_sequence_is_an_error_that_shows_it(start: int, end: int) -> None:
    shown = rf"response_spans\[1\] must satisfy 0 <= start <= end <= 3.*got start={start}, end={end}"
    for spans in ((start, end), [(0, 1), (start, end)], np.array([start, end])):
        with pytest.raises(ValueError, match=shown):
            pack_sequences([[1], [2, 3, 4]], 2, response_spans=[(0, 1), spans])


@pytest.mark.parametrize("spans", [None, 5, "ab", ["ab"], (0, 1, 2), [(0,)], (0, 1.0), (0.5, 1), [0, (1, 2)], {"a": 1}])
def test_spans_of_another_type_are_an_error_that_shows_them(spans: Any) -> None:
    with pytest.raises(TypeError, match=r"response_spans\[1\] must be one \(start, end\) or a list of them; got \w+: "):
        pack_sequences([[1], [2, 3]], 4, response_spans=[(0, 1), spans])
