from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from composer_packing import FlatSourceBatch, flat_source_batch


def documents(*ids: Any) -> list[dict[str, Any]]:
    return [{"input_ids": each} for each in ids]


def test_the_picture_in_the_docstring_is_what_happens() -> None:
    given = [{"input_ids": ids, "document": number} for ids, number in (([11, 12, 13], 7), ([], 8), ([31, 32], 9))]
    flat = flat_source_batch(given, vocab_size=40, numbered=True)
    assert flat.numbers is not None
    assert [part.tolist() for part in (flat.tokens, flat.lengths, flat.numbers)] == [
        [11, 12, 13, 31, 32],
        [3, 0, 2],
        [7, 8, 9],
    ]


@given(st.lists(st.lists(st.integers(0, 99), max_size=5)), st.sampled_from([list, tuple, np.array, torch.tensor]))
def test_lists_tuples_arrays_and_tensors_give_the_same_source_batch(given: list[list[int]], kind: Any) -> None:
    flat = flat_source_batch(documents(*(kind(ids) if ids else ids for ids in given)), vocab_size=100)
    assert flat.tokens.dtype == np.uint16
    assert flat.tokens.tolist() == [token for ids in given for token in ids]
    assert flat.lengths.tolist() == [len(ids) for ids in given]
    assert flat.numbers is None


def test_one_source_batch_may_hold_documents_of_all_types() -> None:
    flat = flat_source_batch(documents([1, 2], [], np.array([3], np.uint16), torch.tensor([4, 5]), (6,)))
    assert flat.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert flat_source_batch([]).tokens.tolist() == []


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, np.uint16), (2**16, np.uint16), (2**16 + 1, np.uint32), (2**32, np.uint32), (2**32 + 1, np.int64)],
)
def test_ids_are_stored_as_narrow_as_the_vocabulary_allows_and_the_largest_does_not_wrap(
    vocab_size: int, dtype: Any
) -> None:
    for kind in (list, np.array):
        flat = flat_source_batch(documents(kind([vocab_size - 1, 0])), vocab_size)
        assert flat.tokens.dtype == dtype
        assert flat.tokens.tolist() == [vocab_size - 1, 0]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("vocab_size", [100, 2**16, 2**32])
@pytest.mark.parametrize("wrong", ["negative", "the first too large", "far too large"])
def test_an_id_that_does_not_fit_is_an_error_that_shows_it_and_never_wraps(
    kind: Any, vocab_size: int, wrong: str
) -> None:
    token = {"negative": -1, "the first too large": vocab_size, "far too large": 2**62}[wrong]
    with pytest.raises(ValueError, match=rf"token ids must lie between 0 and .*got {token}"):
        flat_source_batch(documents(kind([1, 2]), kind([token])), vocab_size)


@pytest.mark.parametrize("vocab_size", [0, -5])
def test_a_vocabulary_without_words_is_an_error_that_shows_it(vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size} must be at least 1"):
        flat_source_batch(documents([1]), vocab_size)


@pytest.mark.parametrize("ids", [[2**64], [2**70], [-1]])
def test_an_id_that_does_not_fit_64_bits_is_an_error(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must lie between 0 and"):
        flat_source_batch(documents([1], ids))


@pytest.mark.parametrize(
    "source_batch",
    [
        {"input_ids": [[1, 2]]},
        [[1, 2]],
        [{"tokens": [1]}],
        None,
        documents("text"),
        documents([1.5, 2.0]),
        documents([-1, "a"]),
        documents([2**64, None]),
        documents(np.ones((2, 2), np.int64)),
        documents(torch.ones(1, 3)),
        documents([1], [None]),
        documents([[1, 2], [3, 4]]),
        documents(5),
        documents(torch.ones(2, requires_grad=True)),
        documents(torch.tensor(5)),
        documents(np.array([1.5])),
        documents([1], np.array(["a"])),
        documents(np.array([]), [], (1.5,)),
    ],
)
def test_documents_of_any_other_type_are_an_error_that_shows_them(source_batch: Any) -> None:
    with pytest.raises(TypeError, match="input_ids"):
        flat_source_batch(source_batch)


@pytest.mark.parametrize("number", [None, "a", 1.5, 2**64])
def test_a_document_without_a_number_is_an_error_if_numbers_are_wanted(number: Any) -> None:
    document = {"input_ids": [5, 6]} | ({} if number is None else {"document": number})
    with pytest.raises(TypeError, match=f"need the number of each document.*one document has {number!r}"):
        flat_source_batch([{"input_ids": [1], "document": 4}, document], numbered=True)
    assert flat_source_batch([document]).numbers is None, "numbers that are not wanted are ignored"


def test_workers_give_the_same_source_batches_as_the_main_process() -> None:
    given = [{"input_ids": [number] * (number % 7), "document": number} for number in range(50)]
    flatten = partial(flat_source_batch, vocab_size=100, numbered=True)

    def batches(workers: int) -> list[list[Any]]:
        loader: DataLoader[Any] = DataLoader(given, 8, num_workers=workers, collate_fn=flatten)  # type: ignore[arg-type]
        made = list(loader)
        assert all(isinstance(batch, FlatSourceBatch) and batch.tokens.dtype == np.uint16 for batch in made)
        return [[part.tolist() for part in batch if part is not None] for batch in made]

    assert batches(0) == batches(2)
