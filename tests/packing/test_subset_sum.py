import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_packing import (
    FlatSourceBatch,
    GreedyBestFitSequencePacker,
    SubsetSumSequencePacker,
    Tail,
)
from composer_packing.batch.contract import Batch
from composer_packing.packing.document_table import NO_ROW
from composer_packing.packing.subset_sum import CANDIDATES, _add_shifted, place_subset_sum
from tests.test_benchmarks import loaded
from tests.tools.packers import new_packer
from tests.tools.tables import table


def placed(lengths: list[int], rows: int, row_len: int) -> list[int]:
    row_of = place_subset_sum(table(lengths), np.arange(len(lengths)), rows, row_len, min(lengths, default=1))
    return [int(row) for row in row_of]


def test_the_picture_in_the_docstring_is_what_happens() -> None:
    assert placed([3, 4, 4, 1, 5], 1, 8) == [0, 0, NO_ROW, 0, NO_ROW]


def test_a_document_may_be_as_long_as_a_row_and_rows_may_outnumber_documents() -> None:
    assert placed([8, 1, 8], 4, 8) == [0, 1, 2]
    assert placed([], 4, 8) == []


@given(st.lists(st.integers(1, 90), max_size=60), st.integers(1, 5), st.integers(90, 200))
def test_no_row_is_too_full_and_rows_are_used_from_0_on(lengths: list[int], rows: int, row_len: int) -> None:
    row_of = placed(lengths, rows, row_len)
    filled = Counter[int]()
    for row, length in zip(row_of, lengths, strict=True):
        filled[row] += length
    del filled[NO_ROW]
    assert all(tokens <= row_len for tokens in filled.values())
    assert sorted(filled) == list(range(len(filled)))
    if NO_ROW in row_of:
        assert len(filled) == rows


@given(st.lists(st.integers(1, 30), min_size=1, max_size=10), st.integers(30, 70))
def test_the_first_row_is_filled_as_full_as_any_choice_with_the_oldest_document_can(
    lengths: list[int], row_len: int
) -> None:
    row_of = placed(lengths, 1, row_len)
    filled = sum(length for row, length in zip(row_of, lengths, strict=True) if row == 0)
    rest = lengths[1:]
    choices = itertools.chain.from_iterable(itertools.combinations(rest, count) for count in range(len(rest) + 1))
    assert row_of[0] == 0
    assert filled == max(total for choice in choices if (total := lengths[0] + sum(choice)) <= row_len)


@given(st.sets(st.integers(0, 700), min_size=1), st.integers(1, 700), st.integers(1, 12))
def test_sums_are_shifted_like_the_bits_of_a_long_number(sums: set[int], length: int, words: int) -> None:
    bits = sum(1 << number for number in sums if number < 64 * words) | 1
    before = np.frombuffer(bits.to_bytes(8 * words, "little"), np.uint64)
    after = np.full(words, 12345, np.uint64)
    _add_shifted(before, length, after)
    assert int.from_bytes(after.tobytes(), "little") == (bits | bits << length) % (1 << 64 * words)


@given(
    st.integers(1, 20), st.lists(st.integers(1, 150), min_size=1, max_size=9), st.sampled_from([63, 64, 65, 128, 300])
)
def test_the_room_after_the_oldest_document_is_filled_as_far_as_any_sum_reaches(
    oldest: int, others: list[int], row_len: int
) -> None:
    lengths = [oldest, *(min(length, row_len) for length in others)]
    filled = sum(length for row, length in zip(placed(lengths, 1, row_len), lengths, strict=True) if row == 0)
    choices = itertools.chain.from_iterable(itertools.combinations(lengths[1:], count) for count in range(len(lengths)))
    best = max(total for choice in choices if (total := oldest + sum(choice)) <= row_len)
    enough = CANDIDATES * sum(lengths) // (2 * len(lengths))
    assert filled == best or row_len > enough, (
        "unless documents were so short that some were taken in waiting order first"
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(1, 4))
def test_every_row_begins_with_the_document_that_has_waited_longest(lengths: list[int], rows: int) -> None:
    row_of = placed(lengths, rows, 50)
    for row in range(max(row_of) + 1):
        oldest = next(index for index, of in enumerate(row_of) if of == NO_ROW or of >= row)
        assert row_of[oldest] == row


order = loaded("order")


@pytest.mark.parametrize("name", order.WORKLOADS)
def test_rows_are_never_emptier_than_by_best_fit(name: str) -> None:
    assert order.efficiency(order.batches(SubsetSumSequencePacker, name, 60)) >= order.efficiency(
        order.batches(GreedyBestFitSequencePacker, name, 60)
    )


@pytest.mark.parametrize(("name", "least"), [("medium", 0.9999), ("long", 0.998), ("short", 0.9999)])
def test_rows_are_full_to_the_last_slots_and_documents_nearly_keep_their_order(name: str, least: float) -> None:
    given = order.batches(SubsetSumSequencePacker, name, 200)
    assert order.efficiency(given) >= least
    # With best fit, the longest waits are 151, 72 and 199 batches, and the displacements 4376, 50 and 44351 documents.
    assert order.longest_wait(given) <= 3
    assert order.mean_displacement(given) <= 25


@given(st.data(), st.integers(1, 4), st.integers(1, 6), st.integers(1, 20), st.integers(1, 3))
def test_a_document_that_n_others_wait_before_is_in_one_of_the_next_n_by_rows_plus_1_batches(
    data: st.DataObject, rows: int, src_batch_size: int, extra_buffer: int, epochs: int
) -> None:
    """Also from epoch to epoch, with the rows of the warmup that are in force when the document is read."""
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=200 // epochs))
    first_rows = data.draw(st.integers(1, rows))
    packed: set[int] = set()
    latest: dict[int, int] = {}
    given: list[Batch] = []

    class Watched:
        def __iter__(self) -> Iterator[FlatSourceBatch]:
            for first in range(0, len(lengths), src_batch_size):
                part = np.array(lengths[first : first + src_batch_size])
                numbers = np.arange(len(latest), len(latest) + len(part))
                latest.update((int(n), len(given) + (int(n) - len(packed)) // packer.rows_per_batch) for n in numbers)
                yield FlatSourceBatch(np.repeat(numbers, part), part)

    packer = new_packer(
        SubsetSumSequencePacker,
        Watched(),
        src_batch_size,
        rows,
        16,
        src_batch_size + extra_buffer,
        tail=Tail.CARRY,
        suppress_masking=True,
        batch_size_warmup_min_size=first_rows,
        batch_size_warmup_tokens=300,
    )
    for batch in itertools.chain.from_iterable(packer for _ in range(epochs)):
        for ids, ends in zip(batch["input_ids"], batch["cu_seqlens"], strict=True):
            documents = {int(ids[end - 1]) for end in ends[1:]} - {-1}
            assert not documents & packed
            assert all(latest[document] >= len(given) for document in documents)
            packed |= documents
        given.append(batch)
    assert len(latest) == epochs * len(lengths)
    assert len(latest) - len(packed) == len(packer._waiting)
