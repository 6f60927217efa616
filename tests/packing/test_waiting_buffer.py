from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from composer_packing import (
    BatchShape,
    DocumentPolicies,
    FlatSourceBatch,
    KeyedMasking,
    LabelSettings,
    flat_source_batch,
)
from composer_packing.packing.options import OverLong
from composer_packing.packing.token_account import TokenAccount
from composer_packing.packing.waiting_buffer import WaitingBuffer


def buffer_of(
    src_batch_size: int, longest: int, over_long: OverLong = OverLong.ERROR, vocab_size: int | None = None
) -> WaitingBuffer:
    """An empty buffer. With a vocabulary its masks are keyed, so it needs the numbers of documents."""
    return WaitingBuffer(
        BatchShape(src_batch_size, out_batch_size=1, out_pseq_len=longest, buffer_size=src_batch_size + 1),
        LabelSettings(keyed_masking=None if vocab_size is None else KeyedMasking(0, vocab_size, (0,))),
        DocumentPolicies(over_long=over_long),
    )


def contents(buffer: WaitingBuffer) -> list[list[int]]:
    tokens, _, table = buffer.documents
    return [
        tokens[document["start"] : document["start"] + document["length"]].tolist() for document in table[buffer.order]
    ]


def column(buffer: WaitingBuffer, name: str) -> list[int]:
    return [int(number) for number in buffer.documents.table[buffer.order][name]]


def flat(*documents: list[int]) -> FlatSourceBatch:
    return flat_source_batch([{"input_ids": ids, "document": i} for i, ids in enumerate(documents)], numbered=True)


@given(st.data(), st.sampled_from([None, 100, 70_000]))
def test_adding_and_emitting_loses_no_token(data: st.DataObject, vocab_size: int | None) -> None:
    buffer = buffer_of(8, 600, vocab_size=vocab_size)
    expected: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 8))):
        batch = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=600), max_size=6))
        assert buffer.append(flat(*batch)) == sum(map(bool, batch))
        expected += [document for document in batch if document]
        stay = data.draw(st.permutations(range(len(expected))).map(lambda order: order[: len(order) // 2]))
        emitted = sum(map(len, expected)) - sum(len(expected[index]) for index in stay)
        buffer.emit(buffer.order[np.array(stay, np.int64)], emitted)
        expected = [expected[index] for index in stay]
        assert contents(buffer) == expected
        assert buffer.account.waiting == sum(map(len, expected))
        assert buffer.account.read == buffer.account.waiting + buffer.account.emitted
        assert all(len(document) >= buffer.shortest for document in expected)


def test_the_entry_of_a_document_stays_with_it_when_arrays_are_replaced() -> None:
    buffer = buffer_of(8, 9, vocab_size=1000)
    for epoch in (4, 5):
        buffer.append(FlatSourceBatch(np.arange(6) + epoch, np.array([4, 0, 1, 1]), np.arange(4)), epoch, 10 * epoch)
    assert column(buffer, "number") == [0, 2, 3, 0, 2, 3]
    assert column(buffer, "epoch") == [4, 4, 4, 5, 5, 5]
    assert column(buffer, "serial") == [0, 1, 2, 3, 4, 5]
    buffer.emit(buffer.order[[5, 0, 3]], 4)
    for _ in range(20):  # meanwhile the arrays are replaced
        buffer.append(FlatSourceBatch(np.array([1, 2]), np.array([1, 1]), np.array([8, 9])))
        buffer.emit(buffer.order[:3], 2)
    assert contents(buffer) == [[10], [4, 5, 6, 7], [5, 6, 7, 8]]
    assert column(buffer, "number") == [3, 0, 0]
    assert column(buffer, "epoch") == [5, 4, 5]
    assert column(buffer, "batch") == [50, 40, 50]
    assert column(buffer, "serial") == [5, 0, 3]


def test_memory_follows_what_waits_not_what_was_read() -> None:
    buffer = buffer_of(8, 1000, vocab_size=1000)
    for _ in range(1000):
        buffer.append(flat(list(range(1000))))
        buffer.emit(buffer.order[-2:], max(0, 1000 * (len(buffer) - 2)))
    assert buffer.documents.tokens.dtype == np.uint16
    assert len(buffer.documents.tokens) <= 16 * 1024
    assert len(buffer.documents.table) <= 64


lengths_of_documents = st.lists(st.integers(0, 40), max_size=12)


@given(lengths_of_documents, st.integers(1, 10), st.sampled_from(list(OverLong)))
def test_tokens_in_are_tokens_out_and_tokens_reported(lengths: list[int], row_len: int, over_long: OverLong) -> None:
    documents = [list(range(100 * number, 100 * number + length)) for number, length in enumerate(lengths)]
    buffer = buffer_of(len(documents) + 1, row_len, over_long)
    longer = [document for document in documents if len(document) > row_len]
    if over_long is OverLong.ERROR and longer:
        with pytest.raises(ValueError, match=rf"document of {max(map(len, longer))} tokens does not fit a row of"):
            buffer.append(flat(*documents))
        return
    buffer.append(flat(*documents))
    account = buffer.account
    assert account.read == sum(lengths)
    assert account.read == account.waiting + account.truncated + account.dropped
    assert account.waiting == sum(map(len, contents(buffer)))
    assert buffer.account.over_long_documents == len(longer)
    assert all(len(document) <= row_len for document in contents(buffer))
    expected = {
        OverLong.ERROR: documents,
        OverLong.TRUNCATE: [document[:row_len] for document in documents],
        OverLong.DROP: [document for document in documents if len(document) <= row_len],
        OverLong.SPLIT: [
            document[at : at + row_len] for document in documents for at in range(0, len(document), row_len)
        ],
    }[over_long]
    assert contents(buffer) == [document for document in expected if document]


@pytest.mark.parametrize(
    ("over_long", "lengths", "account"),
    [
        (OverLong.TRUNCATE, [3, 8, 8], TokenAccount(read=52, waiting=19, truncated=33, over_long_documents=2)),
        (OverLong.SPLIT, [3, 8, 1, 8, 8, 8, 8, 8], TokenAccount(read=52, waiting=52, over_long_documents=2)),
        (OverLong.DROP, [3], TokenAccount(read=52, waiting=3, dropped=49, over_long_documents=2)),
    ],
)
def test_documents_of_3_9_and_40_tokens_in_rows_of_8(
    over_long: OverLong, lengths: list[int], account: TokenAccount
) -> None:
    buffer = buffer_of(8, 8, over_long)
    buffer.append(flat([1] * 3, [2] * 9, [3] * 40))
    assert column(buffer, "length") == lengths
    assert buffer.account == account


def test_pieces_know_their_position_in_the_document() -> None:
    buffer = buffer_of(8, 4, OverLong.SPLIT, vocab_size=1000)
    buffer.append(FlatSourceBatch(np.arange(12), np.array([2, 10]), np.array([6, 7])))
    assert column(buffer, "number") == [6, 7, 7, 7]
    assert column(buffer, "position") == [0, 0, 4, 8]
    assert column(buffer, "serial") == [0, 1, 2, 3]


def test_documents_that_are_cleared_are_left_over() -> None:
    buffer = buffer_of(8, 9)
    buffer.append(flat([1, 2], [3]))
    buffer.clear()
    assert len(buffer) == 0
    assert buffer.account == TokenAccount(read=3, left_over=3)
    buffer.append(flat([4]))
    assert contents(buffer) == [[4]]


ids, lengths, numbers = np.array([5, 6, 7]), np.array([2, 1]), np.array([0, 1])


@pytest.mark.parametrize(
    ("source_batch", "message"),
    [
        (FlatSourceBatch(ids.astype(float), lengths, numbers), "tokens must be a one-dimensional array of integers"),
        (FlatSourceBatch(["a"], lengths, numbers), "tokens must be"),  # type: ignore[arg-type]
        (FlatSourceBatch(ids[None], lengths, numbers), "tokens must be"),
        (FlatSourceBatch(ids, lengths.astype(float), numbers), "lengths must be"),
        (FlatSourceBatch(ids, lengths, numbers.astype(str)), "numbers must be"),
        (FlatSourceBatch(ids, lengths), "this FlatSourceBatch has no numbers"),
        (FlatSourceBatch(ids, None, numbers), "lengths must be .*; got object .*None"),  # type: ignore[arg-type]
        (FlatSourceBatch(ids.astype(">u2"), lengths, numbers), r"tokens must be .*; got >u2 \(3,\)"),
    ],
)
def test_a_part_of_another_type_is_an_error_that_names_it(source_batch: FlatSourceBatch, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        buffer_of(8, 9, vocab_size=1000).append(source_batch)


@pytest.mark.parametrize(
    ("source_batch", "message"),
    [
        (FlatSourceBatch(ids, np.array([2, 2]), numbers), "has 3 tokens, but its lengths, from 0 to 2, come to 4"),
        (FlatSourceBatch(ids, np.array([4, -1]), numbers), "has 3 tokens, but its lengths, from -1 to 4, come to 3"),
        (FlatSourceBatch(ids, np.array([2**63 - 1, 2**63 - 1, 5]), np.arange(3)), "from 0 to 9223372036854775807"),
        (FlatSourceBatch(ids, np.array([2**63], np.uint64), np.arange(1)), "from -9223372036854775808"),
        (FlatSourceBatch(ids, lengths, numbers[:1]), "has 1 numbers for 2 documents"),
        (
            FlatSourceBatch(np.arange(9), np.ones(9, np.int64), np.arange(9)),
            "9 documents at once, more than src_batch_size=8",
        ),
        (FlatSourceBatch(np.array([5, -6, 7]), lengths, numbers), "token ids must lie between 0 and 9; got -6"),
        (FlatSourceBatch(np.array([5, 10, 7]), lengths, numbers), "token ids must lie between 0 and 9; got 10"),
        (FlatSourceBatch(np.array([2**16, 0, 0]), lengths, numbers), "got 65536"),
    ],
)
def test_parts_that_do_not_go_together_and_ids_out_of_range_are_errors_that_show_them(
    source_batch: FlatSourceBatch, message: str
) -> None:
    buffer = buffer_of(8, 9, OverLong.SPLIT, vocab_size=10)
    for number in range(5):  # the arrays are full, and the first documents have left
        buffer.append(FlatSourceBatch(np.arange(3), np.array([2, 1]), np.array([number, 9])))
    buffer.emit(buffer.order[3:], 5)
    before = contents(buffer), column(buffer, "number"), column(buffer, "serial"), buffer.num_added, buffer.account
    with pytest.raises(ValueError, match=message):
        buffer.append(source_batch)
    assert before == (
        *(contents(buffer), column(buffer, "number"), column(buffer, "serial")),
        *(buffer.num_added, buffer.account),
    )
    buffer.append(FlatSourceBatch(np.array([7, 8]), np.array([2]), np.array([6])))
    assert contents(buffer) == [*before[0], [7, 8]]


def test_tensors_and_lists_are_accepted_as_a_dataloader_without_batching_gives_them() -> None:
    given = [FlatSourceBatch(ids, lengths, numbers)] * 2
    (first, _) = DataLoader(given, batch_size=None)  # type: ignore[arg-type]
    assert isinstance(first.tokens, torch.Tensor)
    buffer = buffer_of(8, 9, vocab_size=1000)
    buffer.append(first)
    buffer.append(FlatSourceBatch([1, 2], [2], [7]))  # type: ignore[arg-type]
    assert contents(buffer) == [[5, 6], [7], [1, 2]]
    assert column(buffer, "number") == [0, 1, 7]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("vocab_size", [None, 200])
def test_tokens_of_any_integer_type_are_taken_even_where_they_cannot_be_written(
    dtype: Any, vocab_size: int | None
) -> None:
    buffer = buffer_of(8, 9, vocab_size=vocab_size)
    tokens = np.array([5, 100, 7], dtype)
    tokens.setflags(write=False)
    buffer.append(FlatSourceBatch(tokens, lengths.astype(dtype), numbers))
    buffer.append(FlatSourceBatch(np.array([1, 0, 2, 0, 3, 0], dtype)[::2], lengths, numbers))
    assert contents(buffer) == [[5, 100], [7], [1, 2], [3]]


def test_without_a_vocabulary_tokens_keep_the_narrowest_type_they_came_in() -> None:
    buffer = buffer_of(8, 9)
    kinds: list[tuple[Any, int]] = [(np.uint8, 200), (np.uint16, 2**16 - 1), (np.uint32, 2**32 - 1), (np.int64, 2**62)]
    for dtype, token in kinds:
        buffer.append(FlatSourceBatch(np.array([token], dtype), np.array([1])))
        assert buffer.documents.tokens.dtype == {np.uint8: np.uint16}.get(dtype, dtype)
    assert contents(buffer) == [[token] for _, token in kinds]


def test_the_bound_on_the_shortest_document_rises_after_it_has_left() -> None:
    buffer = buffer_of(8, 100)
    buffer.append(flat([1]))
    assert buffer.shortest == 1
    buffer.emit(buffer.order[:0], 1)
    for _ in range(20):
        buffer.append(flat([1] * 50))
        buffer.emit(buffer.order[:0], 50)
    assert buffer.shortest == 50


def test_the_largest_possible_id_is_accepted_at_any_position() -> None:
    buffer = buffer_of(8, 9)
    buffer.append(flat([2**63 - 1, 5], [5, 2**63 - 1]))
    assert contents(buffer) == [[2**63 - 1, 5], [5, 2**63 - 1]]


@pytest.mark.parametrize("token", [2**63, 2**64 - 1])
def test_an_id_that_would_wrap_around_is_an_error(token: int) -> None:
    with pytest.raises(ValueError, match="token ids must lie between 0 and"):
        buffer_of(8, 9).append(FlatSourceBatch(np.array([token], np.uint64), np.array([1])))
