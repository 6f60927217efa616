from typing import Any

import pytest
import torch

from composer_packing import (
    get_num_samples_in_packed_batch,
    get_num_tokens_in_packed_batch,
    split_packed_batch,
)
from composer_packing.batch.contract import Batch, check_batch, with_counts, with_equal_weights
from composer_packing.batch.microbatches import get_num_targets_in_packed_batch, get_token_counts_in_packed_batch

DOCUMENTS, TOKENS, TARGETS = 5, 12, 3


@pytest.fixture
def batch() -> Batch:
    """Three rows of six slots: two documents that fill the row, two and some padding, one and much padding."""
    return {
        "input_ids": torch.arange(18).reshape(3, 6),
        "labels": torch.tensor([[-100, 9, -100, -100, -100, -100], [8, 7] + [-100] * 4, [-100] * 6]),
        "cu_seqlens": [torch.tensor(row, dtype=torch.int32) for row in ([0, 2, 6], [0, 3, 4, 6], [0, 2, 6])],
        "max_seqlen": [4, 3, 4],
        "attention_mask": torch.tensor([[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]),
    }


def test_a_row_is_a_microbatch_whatever_size_is_asked_for(batch: Batch) -> None:
    first, second, third = split_packed_batch(batch, 1)
    for size in (4, 0.5):
        for one, other in zip(split_packed_batch(batch, size), (first, second, third), strict=True):
            assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in other)
    assert set(second) == set(batch)
    assert second["input_ids"].tolist() == [6, 7, 8, 9, 10, 11]
    assert second["labels"].tolist() == [8, 7, -100, -100, -100, -100]
    assert second["attention_mask"].tolist() == [1, 1, 1, 1, 0, 0]
    assert second["cu_seqlens"].tolist() == [0, 3, 4, 6]
    assert second["max_seqlen"] == 3
    assert first["input_ids"].shape == third["input_ids"].shape == (6,)


def test_padding_above_the_tolerance_is_cut_off_with_its_segment(batch: Batch) -> None:
    first, second, third = split_packed_batch(batch, 1, padding_tolerance=0.5)
    assert len(first["input_ids"]) == len(second["input_ids"]) == 6
    assert third["input_ids"].tolist() == [12, 13]
    assert third["labels"].tolist() == [-100, -100]
    assert third["attention_mask"].tolist() == [1, 1]
    assert third["cu_seqlens"].tolist() == [0, 2]
    assert third["max_seqlen"] == 2, "the padding was the longest segment"
    _, second, _ = split_packed_batch(batch, 1, padding_tolerance=0.0)
    assert second["cu_seqlens"].tolist() == [0, 3, 4]


def test_tokens_and_documents_are_counted_in_a_batch_and_in_its_microbatches(batch: Batch) -> None:
    for tolerance in (1.0, 0.0):
        for counted in (batch, with_counts(batch)):
            micros = split_packed_batch(counted, 1, padding_tolerance=tolerance)
            for parts in ([counted], micros):
                tokens = [get_num_tokens_in_packed_batch(part) for part in parts]
                documents = [get_num_samples_in_packed_batch(part) for part in parts]
                targets = [get_num_targets_in_packed_batch(part) for part in parts]
                assert (sum(tokens), sum(documents), sum(targets)) == (TOKENS, DOCUMENTS, TARGETS)
                assert {type(n) for n in tokens + documents + targets} == {int}


def test_composer_is_told_real_tokens_and_targets(batch: Batch) -> None:
    assert get_token_counts_in_packed_batch(batch) == {"total": TOKENS, "loss_generating": TARGETS}


def test_counts_travel_with_each_microbatch_as_plain_ints(batch: Batch) -> None:
    micros = split_packed_batch(with_counts(batch), 1)
    assert [micro["num_tokens"] for micro in micros] == [6, 4, 2]
    assert [micro["num_documents"] for micro in micros] == [2, 2, 1]
    assert [micro["num_targets"] for micro in micros] == [1, 2, 0]
    assert all(type(micro["num_targets"]) is int for micro in micros)


def test_a_step_without_targets_is_weighed_by_rows_and_counted_only_once(batch: Batch) -> None:
    batch["labels"][:] = -100
    weighed = with_equal_weights(with_counts(batch))
    assert get_token_counts_in_packed_batch(weighed) == {"total": TOKENS, "loss_generating": 3}
    micros = split_packed_batch(weighed, 1)
    assert [get_token_counts_in_packed_batch(micro)["loss_generating"] for micro in micros] == [1, 1, 1]
    assert get_num_targets_in_packed_batch(weighed) == 0
    assert with_counts(weighed) is weighed


def test_another_label_than_ignore_index_in_a_slot_without_a_target_is_an_error(batch: Batch) -> None:
    batch["labels"][batch["labels"] == -100] = -1
    with pytest.raises(ValueError, match="labels hold -1: slots without a target must hold -100"):
        with_counts(batch)


def test_a_row_of_nothing_but_padding_keeps_its_padding(batch: Batch) -> None:
    batch["attention_mask"][2] = 0
    batch["cu_seqlens"][2] = torch.tensor([0, 6], dtype=torch.int32)
    third = split_packed_batch(batch, 1, padding_tolerance=0.0)[2]
    assert third["input_ids"].shape == (6,)
    assert third["cu_seqlens"].tolist() == [0, 6]


def test_labels_may_be_missing(batch: Batch) -> None:
    del batch["labels"]
    assert with_counts(batch)["num_targets"] == [0, 0, 0]
    parts = [batch, *split_packed_batch(batch, 1)]
    assert [get_num_tokens_in_packed_batch(part) for part in parts] == [TOKENS, 6, 4, 2]
    assert [get_num_samples_in_packed_batch(part) for part in parts] == [DOCUMENTS, 2, 2, 1]
    assert [get_num_targets_in_packed_batch(part) for part in parts] == [0, 0, 0, 0]


def test_a_batch_that_was_not_masked_can_be_split_and_counted(batch: Batch) -> None:
    bare = batch | {"labels": None}
    del bare["attention_mask"]
    micros = split_packed_batch(bare, 1)
    assert set(micros[0]) == {"input_ids", "labels", "cu_seqlens", "max_seqlen"}
    assert micros[0]["labels"] is None
    assert get_num_tokens_in_packed_batch(bare) == 18
    assert sum(get_num_samples_in_packed_batch(micro) for micro in micros) == 7
    assert get_num_targets_in_packed_batch(bare) == 0
    with pytest.raises(ValueError, match="without attention_mask cannot be counted"):
        with_counts(bare)


def test_every_microbatch_gets_the_mask_ratio(batch: Batch) -> None:
    micros = split_packed_batch(batch | {"mask_prob": torch.tensor(0.25)}, 1)
    assert all(micro["mask_prob"] == 0.25 for micro in micros)


def test_the_length_of_cu_seqlens_is_marked_dynamic_unless_asked_not_to(batch: Batch) -> None:
    def marked(micro: Batch) -> Any:
        return getattr(micro["cu_seqlens"], "_dynamo_dynamic_indices", set())

    assert not any(marked(micro) for micro in split_packed_batch(batch, 1, mark_dynamic=False))
    assert all(marked(micro) == {0} for micro in split_packed_batch(batch, 1))


def test_a_sound_batch_passes_the_check(batch: Batch) -> None:
    check_batch(batch)
    check_batch(batch | {"labels": None})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cu_seqlens", torch.tensor([0, 2, 6]), "not int32"),
        ("cu_seqlens", torch.tensor([1, 2, 6], dtype=torch.int32), "must rise from 0"),
        ("cu_seqlens", torch.tensor([0, 2, 2, 6], dtype=torch.int32), "must rise"),
        ("cu_seqlens", torch.tensor([0, 2, 5], dtype=torch.int32), "row_len=6"),
        ("cu_seqlens", torch.tensor([0, 1, 6], dtype=torch.int32), "max_seqlen=4 is not"),
    ],
)
def test_a_broken_segment_list_is_named(batch: Batch, key: str, value: Any, message: str) -> None:
    batch[key][0] = value
    with pytest.raises(ValueError, match=message):
        check_batch(batch)


def test_a_mask_that_disagrees_with_the_segments_is_named(batch: Batch) -> None:
    batch["attention_mask"][1, 4] = 1
    with pytest.raises(ValueError, match="row 1: attention_mask has 5 ones, not 4 or 6 as cu_seqlens says"):
        check_batch(batch)


def test_a_target_in_the_padding_is_named(batch: Batch) -> None:
    batch["labels"][2, 3] = 1
    with pytest.raises(ValueError, match="row 2: a target lies after"):
        check_batch(batch)


@pytest.mark.parametrize("padding_tolerance", [-0.1, float("nan")])
def test_a_padding_tolerance_that_is_negative_or_nan_is_an_error(padding_tolerance: float) -> None:
    with pytest.raises(ValueError, match=r"padding_tolerance=.* must not be negative"):
        split_packed_batch({}, 1, padding_tolerance)
