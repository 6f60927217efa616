import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from composer import Trainer
from composer.loggers import InMemoryLogger

from composer_packing.batch import IGNORE_INDEX, check, split_packed_batch
from composer_packing.buffered import BufferedIterable
from composer_packing.callbacks import PackingMonitor
from composer_packing.composer_model import PackedMaskedLM
from composer_packing.config import ConfigError, TrainConfig, TrainLoaderConfig
from composer_packing.data.corpus import MASK_TOKEN_ID, PAD_TOKEN_ID
from composer_packing.data.dataset import DocumentDataset
from composer_packing.dataspec import eval_batches, packed_dataspec, train_batches
from composer_packing.model import ModernBertConfig
from tests.reference import originals

VOCAB_SIZE = 64


def config_of(**changed: Any) -> TrainConfig:
    model = ModernBertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_out_dropout=0.0,
    )
    settings: dict[str, Any] = {
        "max_duration": "2000tok",
        "max_seq_len": 16,
        "global_train_batch_size": 8,
        "model": model,
    }
    return TrainConfig(**(settings | {"device_train_microbatch_size": 2} | changed))


def documents_of(count: int, longest: int = 40, seed: int = 0) -> DocumentDataset:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, longest, count))])
    return DocumentDataset(rng.integers(5, VOCAB_SIZE, offsets[-1]).astype(np.uint16), offsets, 16)


@pytest.fixture
def batches() -> Iterator[BufferedIterable[Any]]:
    buffered = train_batches(documents_of(60), config_of())
    yield buffered
    buffered.close()


def test_training_batches_have_the_configured_shape_and_ids(batches: BufferedIterable[Any]) -> None:
    for batch in itertools.islice(batches, 5):
        check(batch)
        assert batch["input_ids"].shape == (4, 32)
        padding = batch["attention_mask"] == 0
        assert (batch["labels"][padding] == IGNORE_INDEX).all()
        assert int((batch["input_ids"] == MASK_TOKEN_ID).sum()) > 0
    assert PAD_TOKEN_ID == 0


def test_the_length_of_training_is_unknown_and_that_of_evaluation_is_not(batches: BufferedIterable[Any]) -> None:
    with pytest.raises(TypeError):
        len(packed_dataspec(batches).dataloader)
    fixed = eval_batches(documents_of(60), config_of())
    assert len(packed_dataspec(fixed).dataloader) == len(fixed)


def test_settings_the_packer_refuses_are_a_config_error() -> None:
    loader = TrainLoaderConfig(final_masking_ratio=0.9, masking_ratio_cooldown_tokens="10tok")
    with pytest.raises(ConfigError, match=r"train_loader: final_masking_ratio=0\.9"):
        train_batches(documents_of(60), config_of(train_loader=loader))


@pytest.mark.parametrize("count", [0, 1, 2, 700])
def test_evaluation_has_every_document_once_in_batches_of_one_row(count: int) -> None:
    documents = documents_of(count)
    batches = eval_batches(documents, config_of())
    assert all(batch["input_ids"].shape == (1, 32) for batch in batches)
    found = originals(batches)
    assert sorted(found) == sorted(documents[index]["input_ids"].tolist() for index in range(len(documents)))


def test_evaluation_masks_are_the_same_every_time_and_whatever_the_seed_of_the_run() -> None:
    first, again = (eval_batches(documents_of(60), config_of(seed=seed)) for seed in (17, 18))
    assert all(torch.equal(one["input_ids"], other["input_ids"]) for one, other in zip(first, again, strict=True))


def trainer_of(config: TrainConfig, batches: BufferedIterable[Any], model: PackedMaskedLM, **more: Any) -> Trainer:
    return Trainer(
        model=model,
        train_dataloader=packed_dataspec(batches),
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        max_duration=config.max_duration,
        accumulate_train_batch_on_tokens=True,
        device_train_microbatch_size=1,
        device="cpu",
        progress_bar=False,
        **more,
    )


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
    model = PackedMaskedLM(config.model)
    batches = train_batches(documents_of(60), config)
    monitor, logged = PackingMonitor(batches), InMemoryLogger()
    trainer = trainer_of(config, batches, model, callbacks=[monitor], loggers=[logged])
    trainer.fit()
    trainer.close()
    batches.close()

    fed: list[Any] = []
    again = train_batches(documents_of(60), config).iterable  # the packer itself
    while sum(int(batch["attention_mask"].sum()) for batch in fed) < 6000:
        for batch in again:
            fed.append(batch)
            if sum(int(batch["attention_mask"].sum()) for batch in fed) >= 6000:
                break
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


def test_every_target_of_a_step_has_the_same_weight(batches: BufferedIterable[Any]) -> None:
    """One SGD step from rows with very different numbers of targets, one of them with none."""
    batch = next(iter(batches))
    batch["labels"][0] = IGNORE_INDEX
    batch["labels"][1, 3:] = IGNORE_INDEX
    batch["labels"][1, 2] = batch["input_ids"][1, 2]
    batches.close()
    model = PackedMaskedLM(config_of().model)
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
        def __getitem__(self, index: int) -> Any:
            if index == 37:
                raise OSError("record 37 cannot be read")
            return super().__getitem__(index)

    whole = documents_of(60)
    broken = Broken(whole._tokens, np.concatenate([whole._starts, whole._ends[-1:]]), 16)
    config = config_of()
    batches = train_batches(broken, config)
    trainer = trainer_of(config, batches, PackedMaskedLM(config.model))
    with pytest.raises(OSError, match="record 37 cannot be read"):
        trainer.fit()
    trainer.close()
    batches.close()


def test_a_set_too_small_for_a_batch_ends_the_run_instead_of_spinning() -> None:
    config = config_of()
    batches = train_batches(documents_of(2), config)
    trainer = trainer_of(config, batches, PackedMaskedLM(config.model))
    with pytest.raises(ValueError, match="too few to put one in each of 4 rows"):
        trainer.fit()
    trainer.close()
    batches.close()
