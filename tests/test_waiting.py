from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer_packing.waiting import WaitingBuffer


def contents(buffer: WaitingBuffer) -> list[list[int]]:
    return [
        buffer.tokens[start : start + length].tolist()
        for start, length in zip(buffer.starts, buffer.lengths, strict=True)
    ]


def documents(*ids: Any) -> list[dict[str, Any]]:
    return [{"input_ids": each} for each in ids]


def test_lists_arrays_and_tensors_are_taken_in_order_and_empty_documents_are_not() -> None:
    buffer = WaitingBuffer(8, 9)
    added = buffer.append(documents([1, 2], [], np.array([3], np.uint16), torch.tensor([4, 5]), (6,)), 0)
    assert added == len(buffer) == 4
    assert contents(buffer) == [[1, 2], [3], [4, 5], [6]]
    assert buffer.append([], 0) == 0


@given(st.data())
def test_keeping_and_appending_loses_no_token(data: st.DataObject) -> None:
    buffer = WaitingBuffer(8, 9)
    expected: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        batch = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=600), max_size=6))
        buffer.append(documents(*batch), 0)
        expected += [document for document in batch if document]
        kept = data.draw(st.permutations(range(len(expected))).map(lambda order: order[: len(order) // 2]))
        buffer.keep(np.array(kept, np.int64))
        expected = [expected[index] for index in kept]
        assert contents(buffer) == expected


def test_numbers_and_epochs_stay_with_their_documents() -> None:
    buffer = WaitingBuffer(8, 9, numbered=True)
    for epoch in (4, 5):
        batch = documents([1] * epoch, [], [2], [3])
        buffer.append([{**each, "document": number} for number, each in enumerate(batch)], epoch)
    assert buffer.numbers.tolist() == [0, 2, 3, 0, 2, 3]
    assert buffer.epochs.tolist() == [4, 4, 4, 5, 5, 5]
    buffer.keep(np.array([5, 0, 3]))
    assert contents(buffer) == [[3], [1] * 4, [1] * 5]
    assert buffer.numbers.tolist() == [3, 0, 0]
    assert buffer.epochs.tolist() == [5, 4, 5]


def test_memory_follows_what_waits_not_what_was_read() -> None:
    buffer = WaitingBuffer(8, 9)
    for _ in range(1000):
        buffer.append(documents(np.arange(1000)), 0)
        buffer.keep(np.arange(len(buffer))[-2:])
    assert len(buffer.tokens) <= 8 * 1024


@pytest.mark.parametrize(
    "source_batch",
    [
        {"input_ids": [[1, 2]]},
        [[1, 2]],
        [{"tokens": [1]}],
        None,
        documents("text"),
        documents([1.5, 2.0]),
        documents(np.ones((2, 2), np.int64)),
        documents(torch.ones(1, 3)),
        documents([1], [None]),
        documents([[1, 2], [3, 4]]),
        documents(5),
        documents(torch.ones(2, requires_grad=True)),
        documents(torch.tensor(5)),
    ],
)
def test_anything_else_is_an_error_that_shows_it(source_batch: Any) -> None:
    with pytest.raises(TypeError, match="input_ids"):
        WaitingBuffer(8, 9).append(source_batch, 0)


def test_an_id_far_beyond_int64_is_an_error() -> None:
    with pytest.raises(TypeError, match="fit int64"):
        WaitingBuffer(8, 9).append(documents([2**70]), 0)


@pytest.mark.parametrize("ids", [[2**63], np.array([2**64 - 1], np.uint64), [-1], np.array([3, -2])])
def test_an_id_that_would_wrap_or_is_negative_is_an_error(ids: Any) -> None:
    with pytest.raises(ValueError, match="token ids must lie between 0 and"):
        WaitingBuffer(8, 9).append(documents([1], ids), 0)
