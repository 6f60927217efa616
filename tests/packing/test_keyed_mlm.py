"""Keyed masks depend on seed, epoch, document and position alone. The statistics use fixed seeds."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from composer_packing import GreedyBestFitSequencePacker
from composer_packing.batch.contract import IGNORE_INDEX, Batch
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.options import OverLong, Tail
from tests.tools.packers import new_packer
from tests.tools.reference import masked_documents, originals

VOCAB_SIZE, SPECIAL, MASK, PAD = 1000, (0, 1, 2, 3, 4), 4, 0


def packed(
    lengths: list[int], row_len: int, rows: int, seed: int = 7, mask_prob: float = 0.3, epochs: int = 1, **more: Any
) -> list[Batch]:
    """Batches of documents with different tokens: the ids of document `d` begin at `10 * d + 5`."""
    documents = [
        {"input_ids": (np.arange(length) + 10 * number) % (VOCAB_SIZE - 5) + 5, "document": number}
        for number, length in enumerate(lengths)
    ]
    packer = new_packer(
        GreedyBestFitSequencePacker,
        [documents],
        len(documents),
        rows,
        row_len,
        len(documents) + 1,
        pad_token_id=PAD,
        mask_token_id=MASK,
        mask_prob=mask_prob,
        tail=Tail.EMIT,
        keyed_masking=KeyedMasking(seed, VOCAB_SIZE, SPECIAL),
        **more,
    )
    return [batch for _ in range(epochs) for batch in packer]


lengths_of_documents = st.lists(st.integers(1, 16), min_size=1, max_size=40)


@given(lengths_of_documents, st.integers(16, 40), st.integers(1, 5), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_the_masks_of_a_document_do_not_depend_on_where_it_was_packed(
    lengths: list[int], row_len: int, rows: int, mask_prob: float, seed: int
) -> None:
    one_row = packed(lengths, 1000, 1, seed, mask_prob)
    assert sorted(masked_documents(packed(lengths, row_len, rows, seed, mask_prob))) == sorted(
        masked_documents(one_row)
    )


@given(lengths_of_documents, st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_targets_are_originals_and_special_tokens_and_padding_are_neither_hidden_nor_drawn(
    lengths: list[int], mask_prob: float, seed: int
) -> None:
    ids = [[2, *range(10 * number + 5, 10 * number + length + 5), 3] for number, length in enumerate(lengths)]
    documents = [{"input_ids": document, "document": number} for number, document in enumerate(ids)]
    packer = new_packer(
        GreedyBestFitSequencePacker,
        [documents],
        len(documents),
        3,
        18,
        len(documents) + 1,
        pad_token_id=PAD,
        mask_token_id=MASK,
        mask_prob=mask_prob,
        tail=Tail.EMIT,
        keyed_masking=KeyedMasking(seed, VOCAB_SIZE, SPECIAL),
    )
    batches = list(packer)
    assert sorted(originals(batches)) == sorted(ids)
    for batch in batches:
        seen, labels, target = batch["input_ids"], batch["labels"], batch["labels"] != IGNORE_INDEX
        assert not torch.isin(labels[target], torch.tensor(SPECIAL)).any()
        assert not torch.isin(seen[target], torch.tensor([0, 1, 2, 3])).any(), "only the mask token is written"
        assert (seen[batch["attention_mask"] == 0] == PAD).all()
        assert int((seen[~target] == MASK).sum()) == 0


def by_the_formula(
    ids: list[int], seed: int, epoch: int, document: int, mask_prob: float, vocab_size: int, special: list[int]
) -> tuple[list[int], list[int]]:
    """Masked ids and labels, computed with Python integers. Special ids must be in rising order."""

    def mixed(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    step = 0x9E3779B97F4A7C15
    state = mixed((seed + step) % 2**64)
    for part in (epoch, document):
        state = mixed((state + part * step) % 2**64)
    seen, labels = [], []
    for position, token in enumerate(ids):
        bits = mixed((state + (position + 1) * step) % 2**64)
        draw, word = bits >> 32, (bits % 2**32) * (vocab_size - len(special)) >> 32
        for passed_over in special:
            word += word >= passed_over
        target = draw < round(mask_prob * 2**32) and token not in special
        labels.append(token if target else IGNORE_INDEX)
        hidden, swapped = draw < round(0.8 * mask_prob * 2**32), draw < round(0.9 * mask_prob * 2**32)
        seen.append(token if not target else MASK if hidden else word if swapped else token)
    return seen, labels


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=12) | st.lists(st.integers(1, 5), min_size=1, max_size=40),
    st.floats(0, 1),
    st.integers(1, 2**64 - 1),
    st.sampled_from([9, 300, 2**16, 2**16 + 1, 2**32 - 1]),
    st.sets(st.integers(0, 8), max_size=7),
    st.sampled_from([0, 1, 7, 200]),
    st.data(),
)
def test_masks_follow_the_formula_whatever_the_lengths_and_special_ids(
    lengths: list[int],
    mask_prob: float,
    seed: int,
    vocab_size: int,
    special: set[int],
    room: int,
    data: st.DataObject,
) -> None:
    special |= {MASK}
    row_len = (
        max(lengths) + room
    )  # rows may be shorter than a block of the loop, and such a block may cover several rows
    tokens = st.integers(0, min(vocab_size, 20) - 1) | st.integers(0, vocab_size - 1)
    documents = [data.draw(st.lists(tokens, min_size=length, max_size=length)) for length in lengths]
    packer = new_packer(
        GreedyBestFitSequencePacker,
        [[{"input_ids": ids, "document": 7 * number} for number, ids in enumerate(documents)]],
        len(documents),
        3,
        row_len,
        len(documents) + 1,
        pad_token_id=PAD,
        mask_token_id=MASK,
        mask_prob=mask_prob,
        tail=Tail.EMIT,
        keyed_masking=KeyedMasking(seed, vocab_size, sorted(special)),
    )
    expected = [
        (ids, *by_the_formula(ids, seed, 0, 7 * number, mask_prob, vocab_size, sorted(special)))
        for number, ids in enumerate(documents)
    ]
    batches = list(packer)
    assert sorted(masked_documents(batches)) == sorted(expected)
    for batch in batches:
        assert (batch["labels"][batch["attention_mask"] == 0] == IGNORE_INDEX).all()
        assert batch["num_targets"] == (batch["labels"] != IGNORE_INDEX).sum(-1).tolist()
        assert batch["num_tokens"] == batch["attention_mask"].sum(-1).tolist()


def test_pieces_have_the_masks_of_their_positions_in_the_document() -> None:
    def masked(row_len: int) -> list[int]:
        source = [[{"input_ids": [50 + position for position in range(100)], "document": 3}]]
        packer = new_packer(
            GreedyBestFitSequencePacker,
            source,
            1,
            1,
            row_len,
            2,
            pad_token_id=PAD,
            mask_token_id=MASK,
            tail=Tail.EMIT,
            over_long=OverLong.SPLIT,
            keyed_masking=KeyedMasking(7, VOCAB_SIZE, SPECIAL),
        )
        labels = torch.cat([batch["labels"][0] for batch in packer])
        return sorted(labels[labels != IGNORE_INDEX].tolist())

    assert masked(100) == masked(30) == masked(7)
    assert len(masked(100)) > 20


def test_words_are_uniform_also_if_special_ids_lie_apart() -> None:
    special = (0, 100, 101, 102, 103, 999)
    (batch,) = new_packer(
        GreedyBestFitSequencePacker,
        [[{"input_ids": np.full(1_000_000, 500), "document": 0}]],
        1,
        1,
        1_000_000,
        2,
        pad_token_id=PAD,
        mask_token_id=103,
        mask_prob=1.0,
        keyed_masking=KeyedMasking(7, VOCAB_SIZE, special),
    )
    ids = batch["input_ids"][0]
    counts = np.bincount(ids[(ids != 103) & (ids != 500)].numpy(), minlength=VOCAB_SIZE)
    assert set(np.flatnonzero(counts == 0).tolist()) == {*special, 500}
    counts = counts[counts > 0]
    expected = counts.sum() / len(counts)
    # Chi-square with 992 degrees of freedom: mean 992, standard deviation 44.5.
    assert ((counts - expected) ** 2 / expected).sum() == pytest.approx(992, abs=5 * 44.5)


def test_neighbouring_batches_and_ranks_are_independent_slot_by_slot() -> None:
    """As a model sees them: eight batches in a row, on each of two ranks that share the documents."""

    def targets(rank: int) -> list[NDArray[np.bool_]]:
        numbers = range(rank, 4000, 2)
        source = [[{"input_ids": np.full(37, 500), "document": number} for number in numbers]]
        packer = new_packer(
            GreedyBestFitSequencePacker,
            source,
            len(numbers),
            1,
            37 * 200,
            len(numbers) + 1,
            pad_token_id=PAD,
            mask_token_id=MASK,
            keyed_masking=KeyedMasking(7, VOCAB_SIZE, SPECIAL),
        )
        return [(batch["labels"] != IGNORE_INDEX).numpy().ravel() for batch in packer][:8]

    together = np.corrcoef(np.array(targets(0) + targets(1)))
    # 120 pairs of 7400 draws: a correlation has a standard deviation of 0.0116.
    assert np.abs(together - np.eye(16)).max() < 0.058


def test_a_ratio_of_one_hides_every_token_but_special_tokens() -> None:
    documents = [{"input_ids": [2, 50, 60, 3], "document": 0}]
    packer = new_packer(
        GreedyBestFitSequencePacker,
        [documents],
        1,
        1,
        4,
        2,
        pad_token_id=PAD,
        mask_token_id=MASK,
        mask_prob=1.0,
        keyed_masking=KeyedMasking(0, VOCAB_SIZE, SPECIAL),
    )
    (batch,) = packer
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 50, 60, IGNORE_INDEX]]


def test_epochs_seeds_and_documents_have_masks_of_their_own() -> None:
    def targets(seed: int, epochs: int = 1) -> list[NDArray[np.bool_]]:
        rows = packed([1000] * 4, 1000, 1, seed, epochs=epochs)
        return [(row["labels"] != IGNORE_INDEX).numpy().ravel() for row in rows]

    masks = [*targets(seed=7, epochs=3), *targets(seed=8, epochs=3)]
    assert len(masks) == 24
    together = np.corrcoef(np.array(masks))
    # 276 pairs of 1000 draws: a correlation has a standard deviation of 0.032.
    assert np.abs(together - np.eye(24)).max() < 0.13
    assert all((one == other).all() for one, other in zip(targets(7), masks[:4], strict=True))


def test_a_document_that_was_carried_has_the_masks_of_the_epoch_it_was_read_in() -> None:
    source = [[{"input_ids": [100 + number] * 40, "document": number} for number in range(3)]]

    def masked(rows: int) -> Iterator[list[tuple[list[int], list[int], list[int]]]]:
        packer = new_packer(
            GreedyBestFitSequencePacker,
            source,
            3,
            rows,
            40,
            4,
            pad_token_id=PAD,
            mask_token_id=MASK,
            mask_prob=0.5,
            tail=Tail.CARRY,
            keyed_masking=KeyedMasking(7, VOCAB_SIZE, SPECIAL),
        )
        while True:
            yield masked_documents(list(packer))

    in_time = masked(rows=1)
    first, second = next(in_time), next(in_time)
    assert sorted(first) != sorted(second)
    late = masked(rows=2)
    early, carried = next(late), next(late)
    assert (len(early), len(carried)) == (2, 4)
    assert sorted(early + carried) == sorted(first + second)


def test_a_lower_ratio_hides_some_of_what_a_higher_one_hides() -> None:
    targets = []
    for mask_prob in (0.1, 0.3, 0.9):
        (batch,) = packed([1000], 1000, 1, mask_prob=mask_prob)
        targets.append(set(torch.nonzero(batch["labels"][0] != IGNORE_INDEX).flatten().tolist()))
    assert targets[0] < targets[1] < targets[2]


@pytest.mark.parametrize("mask_prob", [0.15, 0.3, 1.0])
def test_the_shares_are_eighty_ten_ten_and_words_are_drawn_from_the_whole_vocabulary(mask_prob: float) -> None:
    tokens = 1_000_000
    (batch,) = packed([tokens], tokens, 1, mask_prob=mask_prob)
    ids, labels = batch["input_ids"][0].numpy(), batch["labels"][0].numpy()
    chosen = labels != IGNORE_INDEX
    five_sigma = 5 * np.sqrt(mask_prob * (1 - mask_prob) / tokens)
    assert chosen.mean() == pytest.approx(mask_prob, abs=five_sigma + 1e-12)
    assert (ids[chosen] == MASK).mean() == pytest.approx(0.8, abs=5 * np.sqrt(0.16 / chosen.sum()))
    assert (ids[chosen] == labels[chosen]).mean() == pytest.approx(0.1, abs=5 * np.sqrt(0.09 / chosen.sum()) + 2e-4)
    words = ids[chosen & (ids != MASK) & (ids != labels)]
    counts = np.bincount(words, minlength=VOCAB_SIZE)
    assert counts[list(SPECIAL)].sum() == 0
    expected = len(words) / (VOCAB_SIZE - len(SPECIAL))
    chi_square = ((counts[len(SPECIAL) :] - expected) ** 2 / expected).sum()
    # Chi-square with 994 degrees of freedom: mean 994, standard deviation 44.6.
    assert chi_square == pytest.approx(994, abs=5 * 44.6)


def test_neighbouring_positions_and_documents_are_independent() -> None:
    (batch,) = packed([1_000_000], 1_000_000, 1, mask_prob=0.5)
    chosen = (batch["labels"][0] != IGNORE_INDEX).numpy().astype(float) - 0.5
    for distance in (1, 2, 3, 64, 1000):
        # Each product has a mean of 0 and a deviation of a quarter.
        assert abs((chosen[:-distance] * chosen[distance:]).mean()) < 5 * 0.25 / 1000
    (first_tokens,) = packed([1] * 100_000, 100_000, 1, mask_prob=0.5)
    first = (first_tokens["labels"][0] != IGNORE_INDEX).numpy().astype(float) - 0.5
    assert abs(first.mean()) < 5 * 0.5 / np.sqrt(len(first))
    assert abs((first[:-1] * first[1:]).mean()) < 5 * 0.25 / np.sqrt(len(first))


def test_an_id_beyond_the_vocabulary_is_an_error_that_shows_it() -> None:
    packer = new_packer(
        GreedyBestFitSequencePacker,
        [[{"input_ids": [5, 1000], "document": 0}]],
        1,
        1,
        4,
        2,
        keyed_masking=KeyedMasking(0, VOCAB_SIZE, SPECIAL),
    )
    with pytest.raises(ValueError, match="ids must lie between 0 and 999; got 1000"):
        list(packer)


def test_a_mask_token_that_might_be_hidden_itself_is_an_error() -> None:
    with pytest.raises(ValueError, match="mask_token_id=9 must be one of"):
        new_packer(
            GreedyBestFitSequencePacker, [], 1, 1, 4, 2, mask_token_id=9, keyed_masking=KeyedMasking(0, 50, SPECIAL)
        )


@pytest.mark.parametrize("number", [None, "a", 1.5, 2**64])
def test_a_document_without_a_number_is_an_error_that_says_how_to_give_one(number: Any) -> None:
    document = {"input_ids": [5, 6]} | ({} if number is None else {"document": number})
    packer = new_packer(
        GreedyBestFitSequencePacker, [[document]], 1, 1, 4, 2, keyed_masking=KeyedMasking(0, VOCAB_SIZE, SPECIAL)
    )
    with pytest.raises(TypeError, match="need the number of each document"):
        list(packer)


@pytest.mark.parametrize("arguments", [(1.5, 9, (0,)), (0, 9.5, (0,)), (0, 9, (0, 4.5)), (0, 9, None), (0, 9, "ab")])
def test_a_value_that_is_not_an_int_is_an_error(arguments: Any) -> None:
    with pytest.raises(TypeError):
        KeyedMasking(*arguments)


@pytest.mark.parametrize("kind", [set, list, np.array, torch.tensor])
def test_special_ids_may_come_in_any_collection(kind: Any) -> None:
    assert sorted(KeyedMasking(0, 9, kind([0, 4])).special_token_ids) == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 10, (0,)), "seed=-1"),
        ((2**64, 10, (0,)), "seed=18446744073709551616"),
        ((0, 10, (0, 10, -1)), r"special_token_ids=\[10, -1\] must lie between 0 and vocab_size=10"),
        ((0, 2, (0, 1)), "leave no word"),
        ((0, 2**32, (0,)), "vocab_size=4294967296"),
        ((0, 0, (0,)), "vocab_size=0"),
        ((0, 9, ()), "special_token_ids is empty"),
    ],
)
def test_numbers_that_make_no_sense_are_an_error_that_shows_them(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyedMasking(*arguments)
