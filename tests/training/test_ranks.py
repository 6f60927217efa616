"""What 1, 2 and 4 ranks do, compared with each other and with one padded batch."""

import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest

from composer_packing.packing.schedules import BatchSizeWarmupScheduler, MaskingRatioCooldownScheduler
from tests.tools.running import result_of

pytestmark = pytest.mark.slow

WORLD_SIZES = [1, 2, 4]


@cache
def result_of_program(program: str) -> Any:
    """The JSON that a program prints."""
    return result_of(sys.executable, "-m", f"tests.tools.{program}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradient_and_loss_are_those_of_one_padded_batch_however_the_documents_are_split(world_size: int) -> None:
    found = result_of_program("ranks_training")[str(world_size)]
    assert len(found["gradient"]) == 12, "two sets of documents, two ways to share them, three lengths of rows"
    assert max(found["gradient"].values()) < 1e-5
    assert max(found["loss"].values()) < 1e-5
    assert found["weighted by documents"] > 0.1, "what Composer does if it is not told of targets"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gradient_and_loss_of_fine_tuning_are_those_of_the_examples_on_their_own(world_size: int) -> None:
    found = result_of_program("ranks_training")[str(world_size)]["fine-tuning"]
    assert len(found) == 6, "two ways to share the examples, three lengths of rows"
    for gradient, loss in found.values():
        assert gradient < 1e-5
        assert loss < 1e-5


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_step_in_which_no_rank_has_a_target_has_no_loss_and_no_gradient(world_size: int) -> None:
    assert result_of_program("ranks_training")[str(world_size)]["without any target"] == [0.0, 0.0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_composers_clock_counts_real_tokens_and_documents_over_all_ranks(world_size: int) -> None:
    ranks = result_of_program("ranks_training")[str(world_size)]["clock"]
    for rank in ranks:
        assert rank["token"] == sum(batch["tokens"] for each in ranks for batch in each["fed"])
        assert rank["sample"] == sum(batch["documents"] for each in ranks for batch in each["fed"])
        assert rank["batch"] == len(rank["fed"])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_rank_takes_each_step_of_both_schedules_at_the_same_batch(world_size: int) -> None:
    ranks = result_of_program("ranks_training")[str(world_size)]["clock"]
    size = BatchSizeWarmupScheduler(4 // world_size, 16 // world_size, "6000tok", world_size)
    ratio = MaskingRatioCooldownScheduler(0.3, 0.1, "400sp", "200sp", world_size=world_size)
    tokens = documents = 0
    steps = set()
    for batches in zip(*(rank["fed"] for rank in ranks), strict=True):
        for batch in batches:
            assert batch["before"] == tokens, "what all ranks have counted is Composer's clock"
            assert batch["rows"] == size(tokens // world_size)
            assert batch["mask_prob"] == pytest.approx(ratio(documents // world_size))
        steps.add((batches[0]["rows"], batches[0]["mask_prob"]))
        tokens += sum(batch["tokens"] for batch in batches)
        documents += sum(batch["documents"] for batch in batches)
    assert len(steps) > 12, "both schedules have run through"
    assert batches[0]["rows"] == 16 // world_size
    assert batches[0]["mask_prob"] == pytest.approx(0.1)


def test_evaluation_does_not_depend_on_the_rows_nor_on_the_number_of_ranks() -> None:
    figures = [
        figure
        for size in WORLD_SIZES
        for figure in result_of_program("ranks_training")[str(size)]["evaluation"].values()
    ]
    assert len(figures) == 9
    for loss, accuracy, documents in figures:
        assert loss == pytest.approx(figures[0][0], rel=1e-5)
        assert accuracy == pytest.approx(figures[0][1], rel=1e-5)
        assert documents == figures[0][2]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("count", [101, 3])
def test_ranks_share_the_documents_of_an_epoch_and_end_it_after_the_same_batch(world_size: int, count: int) -> None:
    ranks = result_of_program("ranks_reading")[str(world_size)][str(count)]
    assert all(rank["batches"] == ranks[0]["batches"] for rank in ranks)
    assert min(ranks[0]["batches"]) > 0
    seen = Counter(document for rank in ranks for epoch in rank["train"] for document, *_ in epoch)
    assert set(seen) == set(range(count)), "every document comes at some time"
    if count == 101:
        assert seen.total() > 3 * 101 - world_size * 20, "a batch of a rank holds about 16"
        so_far: Counter[int] = Counter()
        for epoch in range(3):
            so_far.update(document for rank in ranks for document, *_ in rank["train"][epoch])
            assert max(so_far.values()) == epoch + 1, "no document comes more often than there were epochs"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_document_is_evaluated_once_and_ranks_have_the_same_number_of_batches(world_size: int) -> None:
    for count, ranks in result_of_program("ranks_reading")[str(world_size)].items():
        assert sorted(document for rank in ranks for document, *_ in rank["eval"]) == list(range(int(count)))
        assert len({rank["eval_batches"] for rank in ranks}) == 1


def test_masks_of_a_document_in_an_epoch_are_the_same_on_any_number_of_ranks() -> None:
    epochs: dict[int, set[str]] = {}
    evaluations: dict[int, set[str]] = {}
    long, times = set(), 0
    for world_size in WORLD_SIZES:
        for rank in result_of_program("ranks_reading")[str(world_size)]["101"]:
            for document, seen, labels in (each for epoch in rank["train"] for each in epoch):
                epochs.setdefault(document, set()).add(str((seen, labels)))
                times += 1
                if len(seen) > 12:
                    long.add(document)
            for document, seen, labels in rank["eval"]:
                evaluations.setdefault(document, set()).add(str((seen, labels)))
    assert times > 2.5 * 3 * 101, "three epochs on three numbers of ranks"
    assert max(len(masks) for masks in epochs.values()) == 3, "one mask for each epoch, whatever the number of ranks"
    assert [len(epochs[document]) for document in sorted(long)] == [3] * len(long)
    assert {len(masks) for masks in evaluations.values()} == {1}


def test_ranks_of_different_lengths_hand_over_the_same_number_of_batches_and_lose_none() -> None:
    ranks = result_of_program("ranks_lockstep")
    for rank in ranks:
        assert rank["ten against eleven"] == [list(range(at, at + 10)) for at in (0, 10, 20)]
        assert rank["one against thirty"] == [[0], [1], [2]]
        # The second rank has 0, 2, 0, 1, 0 and 2 batches. An epoch without any continues with those of the next.
        assert rank["sometimes none"] == [[0, 1], [2], [3, 4]]
        assert rank["threads"] == []
