import gc
import logging
import threading
from typing import Any

import pytest

from composer_packing.batch.lockstep import PATIENCE, Lockstep
from tests.tools.numbered import Numbered

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def numbers(batches: Any) -> list[int]:
    return [int(batch["input_ids"][0, 0]) for batch in batches]


def test_epochs_are_those_of_the_source_and_no_batch_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    batches = Lockstep(Numbered(3, 2), prefetch=4)
    assert [numbers(batches) for _ in range(3)] == [[0, 1, 2], [3, 4], [5, 6, 7]]
    batches.close()
    assert caplog.messages[0] == "epoch 0 ended on all ranks after 3 batches"


def test_an_epoch_is_never_empty() -> None:
    batches = Lockstep(Numbered(0, 0, 1, 0, 2), prefetch=1)
    assert [numbers(batches) for _ in range(3)] == [[0], [1, 2], [3]]
    batches.close()


def test_batches_come_with_their_counts() -> None:
    batches = Lockstep(Numbered(1), prefetch=1)
    (batch,) = batches
    assert (batch["num_tokens"], batch["num_targets"], batch["num_documents"]) == ([2], [1], [1])
    assert "loss_weight" not in batch
    batches.close()


def test_a_step_in_which_no_rank_has_a_target_gets_a_weight_per_row_to_divide_by() -> None:
    batches = Lockstep(Numbered(1, targets=0), prefetch=1)
    (batch,) = batches
    assert (batch["num_targets"], batch["loss_weight"]) == ([0], [1])
    batches.close()


def test_an_iterator_that_is_left_early_loses_no_batch_and_gives_no_more() -> None:
    batches = Lockstep(Numbered(6), prefetch=3)
    first = iter(batches)
    assert [next(first)["input_ids"][0, 0].item() for _ in range(2)] == [0, 1]
    second = iter(batches)
    assert next(second)["input_ids"][0, 0].item() == 2
    assert numbers(first) == []
    assert numbers(second) == [3, 4, 5]
    assert numbers(batches) == [6, 7, 8, 9, 10, 11]
    batches.close()


def test_an_error_in_the_source_comes_after_the_batches_before_it_and_no_batch_follows() -> None:
    batches = Lockstep(Numbered(5, fails_at=2), prefetch=3)
    iterator = iter(batches)
    assert [next(iterator)["input_ids"][0, 0].item() for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="record 37 is broken"):
        next(iterator)
    with pytest.raises(RuntimeError, match="there are no more batches"):
        next(iter(batches))


@pytest.mark.parametrize("begun", [True, False])
def test_a_closed_lockstep_gives_no_more_batches(begun: bool) -> None:
    batches = Lockstep(Numbered(5), prefetch=3)
    if begun:
        next(iter(batches))
    batches.close()
    batches.close()
    with pytest.raises(RuntimeError, match="there are no more batches"):
        next(iter(batches))


def test_a_lockstep_that_is_dropped_without_being_closed_leaves_no_thread() -> None:
    batches = Lockstep(Numbered(5), prefetch=1)
    for _ in batches:
        break
    del batches
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("composer_packing")]
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_documents_that_never_fill_a_batch_are_an_error_and_not_an_endless_loop() -> None:
    batches = Lockstep(Numbered(0), prefetch=1)
    with pytest.raises(ValueError, match=f"the documents of {PATIENCE} epochs did not fill one batch"):
        next(iter(batches))
    batches.close()
