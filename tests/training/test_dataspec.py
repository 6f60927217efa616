import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from composer import Callback, Evaluator, Logger, State
from composer.loggers import InMemoryLogger
from numpy.typing import NDArray

from composer_packing.batch.contract import COUNTS, IGNORE_INDEX, check_batch
from composer_packing.batch.lockstep import Lockstep
from composer_packing.batch.microbatches import split_packed_batch
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import EvalLoaderConfig, TrainLoaderConfig
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.console import IntervalConsoleLogger
from composer_packing.training.dataspec import packed_dataspec
from composer_packing.training.evaluation import eval_batches, evaluation_times
from composer_packing.training.monitor import PackingMonitor
from tests.tools.array_documents import DocumentDataset
from tests.tools.reference import masked_documents, originals
from tests.tools.runs import (
    MASK_TOKEN_ID,
    PAD_TOKEN_ID,
    VOCABULARY,
    config_of,
    documents_of,
    read_as,
    trainer_of,
)


@pytest.fixture
def batches() -> Iterator[Lockstep]:
    buffered = train_batches(documents_of(60), config_of(), VOCABULARY)
    yield buffered
    buffered.close()


def test_training_batches_have_the_configured_shape_and_ids(batches: Lockstep) -> None:
    for batch in itertools.islice(batches, 5):
        check_batch(batch)
        assert batch["input_ids"].shape == (4, 32)
        padding = batch["attention_mask"] == 0
        assert (batch["labels"][padding] == IGNORE_INDEX).all()
        assert int((batch["input_ids"] == MASK_TOKEN_ID).sum()) > 0
    assert PAD_TOKEN_ID == 0


def test_the_length_of_training_is_unknown_and_the_length_of_evaluation_is_known(batches: Lockstep) -> None:
    with pytest.raises(TypeError):
        len(packed_dataspec(batches).dataloader)
    fixed = eval_batches(documents_of(60), config_of(), VOCABULARY)
    assert len(packed_dataspec(fixed).dataloader) == len(fixed)


def test_settings_the_packer_refuses_are_a_config_error() -> None:
    loader = TrainLoaderConfig(final_masking_ratio=0.9, masking_ratio_cooldown_tokens="10tok")
    with pytest.raises(
        ConfigError, match=r"train_loader\.final_masking_ratio=0\.9 must not exceed the mask ratio before"
    ):
        train_batches(documents_of(60), config_of(train_loader=loader), VOCABULARY)
    with pytest.raises(ConfigError, match="train_loader: buffer_size=4 must exceed src_batch_size=8"):
        train_batches(documents_of(60), config_of(train_loader=TrainLoaderConfig(packing_buffer_size=4)), VOCABULARY)


def test_reading_leaves_the_global_random_numbers_alone() -> None:
    """Otherwise dropout would depend on how far ahead the thread is."""
    before = torch.get_rng_state()
    batches = train_batches(documents_of(60), config_of(), VOCABULARY)
    for _ in range(3):
        assert list(batches)
    batches.close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 2, 700])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_evaluation_has_every_document_once_and_only_its_last_batch_has_fewer_rows(count: int, micro: int) -> None:
    documents = documents_of(count)
    config = config_of(device_train_microbatch_size=micro, eval_loader=EvalLoaderConfig(0.5))
    batches = eval_batches(documents, config, VOCABULARY)
    rows = [len(batch["input_ids"]) for batch in batches]
    assert all(number == 8 // micro for number in rows[:-1])
    assert all(0 < number <= 8 // micro for number in rows)
    found = originals(batches)
    assert sorted(found) == sorted(documents.__getitems__([index]).tokens.tolist() for index in range(len(documents)))


@pytest.mark.parametrize(("count", "ratio"), [(0, 0.15), (60, 1e-9)])
def test_an_evaluation_without_any_target_is_refused(count: int, ratio: float) -> None:
    config = config_of(eval_loader=EvalLoaderConfig(ratio))
    pieces = len(documents_of(count))
    with pytest.raises(
        ConfigError, match=f"mlm_probability={ratio}: .*no token of the {pieces} held-out documents is a target"
    ):
        eval_batches(documents_of(count), config, VOCABULARY)


def test_evaluation_masks_follow_neither_the_seed_of_the_run_nor_the_shape_of_its_rows() -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 18}, {"device_train_microbatch_size": 4}]
    changes.append({"global_train_batch_size": 16})
    masked = [
        sorted(masked_documents(eval_batches(documents_of(60), config_of(**changed), VOCABULARY)))
        for changed in changes
    ]
    assert all(one == masked[0] for one in masked)


def test_composers_clock_and_the_log_count_what_was_fed_over_epochs() -> None:
    config = config_of(
        max_duration="6000tok",
        train_loader=TrainLoaderConfig(
            batch_size_warmup_min_size=2,
            batch_size_warmup_tokens="1500tok",
            masking_ratio_cooldown_start_tokens="1000tok",
            masking_ratio_cooldown_tokens="2000tok",
            final_masking_ratio=0.1,
        ),
    )
    model = PackedLanguageModel(config.model)
    batches = train_batches(documents_of(60), config, VOCABULARY)
    monitor, logged = PackingMonitor(batches, config.mlm_probability), InMemoryLogger()
    trainer = trainer_of(config, batches, model, callbacks=[monitor], loggers=[logged])
    trainer.fit()
    trainer.close()
    batches.close()

    fed: list[Any] = []
    again = train_batches(documents_of(60), config, VOCABULARY)
    while sum(int(batch["attention_mask"].sum()) for batch in fed) < 6000:
        for batch in again:
            fed.append(batch)
            if sum(int(batch["attention_mask"].sum()) for batch in fed) >= 6000:
                break
    again.close()
    tokens = sum(int(batch["attention_mask"].sum()) for batch in fed)
    documents = sum(
        len(row) - 1 - int(mask[-1] == 0)
        for batch in fed
        for row, mask in zip(batch["cu_seqlens"], batch["attention_mask"], strict=True)
    )
    timestamp = trainer.state.timestamp
    assert (timestamp.token, timestamp.sample, timestamp.batch) == (tokens, documents, len(fed))
    assert timestamp.epoch >= 2, "the data is shorter than the training"
    assert {len(batch["input_ids"]) for batch in fed} == {1, 2, 3, 4}
    for name, counted in {
        "packing/rows": [len(batch["input_ids"]) for batch in fed],
        "packing/real_tokens": [int(batch["attention_mask"].sum()) for batch in fed],
        "packing/targets": [int((batch["labels"] != IGNORE_INDEX).sum()) for batch in fed],
        "packing/efficiency": [float(batch["attention_mask"].double().mean()) for batch in fed],
        "packing/mask_prob": [float(batch["mask_prob"]) for batch in fed],
        "packing/learning_rate": [1.0] * len(fed),
    }.items():
        assert [value for _, value in logged.data[name]] == pytest.approx(counted), name
    assert sum(value for _, value in logged.data["packing/documents"]) == documents
    assert all(0 <= value <= 1 for _, value in logged.data["packing/data_wait_share"])
    ratios = {float(batch["mask_prob"]) for batch in fed}
    assert (max(ratios), min(ratios)) == pytest.approx((0.3, 0.1))

    assert monitor.summary is not None
    assert (monitor.summary.num_tokens, monitor.summary.num_documents) == (tokens, documents)
    slots = sum(batch["input_ids"].numel() for batch in fed)
    assert monitor.summary.packing_efficiency == pytest.approx(tokens / slots)


class InTurn(Callback):
    """Writes down after which batches an evaluation ends and a checkpoint would be written."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def eval_end(self, state: State, logger: Logger) -> None:
        self.found.append(("evaluated", int(state.timestamp.batch)))

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self.found.append(("checkpoint", int(state.timestamp.batch)))


@pytest.mark.parametrize(("interval", "evaluated"), [("2ba", (2, 4, 5)), ("5ba", (5,))])
def test_the_last_evaluation_ends_before_the_last_checkpoint_so_that_the_checkpoint_can_say_if_it_was_interrupted(
    interval: str, evaluated: tuple[int, ...]
) -> None:
    config, in_turn = config_of(max_duration="5ba"), InTurn()
    batches = train_batches(documents_of(60), config, VOCABULARY)
    held_out = Evaluator(label="eval", dataloader=packed_dataspec(eval_batches(documents_of(9), config, VOCABULARY)))
    trainer = trainer_of(
        config,
        batches,
        PackedLanguageModel(config.model),
        eval_dataloader=held_out,
        eval_interval=evaluation_times(interval),
        callbacks=[in_turn],
    )
    trainer.fit()
    trainer.close()
    batches.close()
    assert in_turn.found == [
        (what, batch)
        for batch in range(1, 6)
        for what in ("evaluated", "checkpoint")
        if what == "checkpoint" or batch in evaluated
    ]


def test_every_target_of_a_step_has_the_same_weight(batches: Lockstep) -> None:
    """One SGD step on rows with very different numbers of targets. One row has none."""
    batch = {key: value for key, value in next(iter(batches)).items() if key not in COUNTS}
    batch["labels"][0] = IGNORE_INDEX
    batch["labels"][1, 3:] = IGNORE_INDEX
    batch["labels"][1, 2] = batch["input_ids"][1, 2]
    batches.close()
    model = PackedLanguageModel(config_of().model)
    by_hand = copy.deepcopy(model)

    class Once:
        def __iter__(self) -> Iterator[Any]:
            return iter([batch])

    trainer = trainer_of(config_of(max_duration="1ba"), Once(), model)  # type: ignore[arg-type]
    trainer.fit()
    trainer.close()

    targets = int((batch["labels"] != IGNORE_INDEX).sum())
    for micro in split_packed_batch(batch, 1):
        output = by_hand(micro)
        assert output.targets is not None
        torch.nn.functional.cross_entropy(output.logits, output.targets, reduction="sum").div(targets).backward()
    for (name, trained), parameter in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(trained, parameter - parameter.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_an_error_in_the_data_ends_the_run_with_that_error() -> None:
    class Broken(DocumentDataset):
        def __getitems__(self, indices: Sequence[int] | NDArray[np.int64]) -> Any:
            if 37 in indices:
                raise OSError("record 37 cannot be read")
            return super().__getitems__(indices)

    config = config_of()
    batches = train_batches(read_as(Broken, documents_of(60)), config, VOCABULARY)
    trainer = trainer_of(config, batches, PackedLanguageModel(config.model))
    with pytest.raises(OSError, match="record 37 cannot be read"):
        trainer.fit()
    trainer.close()
    batches.close()


def test_a_step_without_any_target_is_trained_on_and_changes_nothing() -> None:
    special = DocumentDataset(np.full(400, 3, np.uint16), np.arange(0, 401, 10), 16)
    config = config_of(max_duration="2ba")
    model = PackedLanguageModel(config.model)
    before = copy.deepcopy(model.state_dict())
    batches = train_batches(special, config, VOCABULARY)
    trainer = trainer_of(config, batches, model)
    trainer.fit()
    trainer.close()
    batches.close()
    assert trainer.state.timestamp.token > 0
    assert trainer.state.total_loss_dict == {"loss/train/total": 0.0}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("duration", ["20ba", "70sp", "2000tok"])
def test_a_set_smaller_than_a_batch_trains_over_many_epochs(duration: str) -> None:
    config = config_of(max_duration=duration)
    batches = train_batches(documents_of(2, longest=16), config, VOCABULARY)
    trainer = trainer_of(config, batches, PackedLanguageModel(config.model))
    trainer.fit()
    trainer.close()
    batches.close()
    assert trainer.state.timestamp >= duration
    assert trainer.state.timestamp.epoch.value > 5


def test_no_documents_end_the_run_instead_of_spinning() -> None:
    config = config_of()
    batches = train_batches(documents_of(0), config, VOCABULARY)
    trainer = trainer_of(config, batches, PackedLanguageModel(config.model))
    with pytest.raises(ValueError, match="the documents of 1000 epochs did not fill one batch"):
        trainer.fit()
    trainer.close()
    batches.close()


def test_the_console_prints_at_an_interval_in_any_unit(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(interval: str) -> int:
        config = config_of(max_duration="12ba")
        batches = train_batches(documents_of(60), config, VOCABULARY)
        model = PackedLanguageModel(config.model)
        trainer = trainer_of(config, batches, model, loggers=[IntervalConsoleLogger(interval)])
        trainer.fit()
        trainer.close()
        batches.close()
        return capsys.readouterr().err.count("Train loss/train/total")

    assert printed("4ba") == 4, "after batches 1, 4, 8 and 12"
    assert printed("100000tok") == 2, "after the first batch and the last"
    assert 4 < printed("250tok") < 12
    assert 4 < printed("25sp") < 12
