"""Runs that stop and resume through Composer's own checkpoints, compared with a run that never stops."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Callback, Logger, State, Trainer
from composer.loggers import InMemoryLogger
from composer.optim import DecoupledAdamW

from composer_packing.batch.lockstep import Lockstep, Stopped
from composer_packing.checkpointing.packed_dataset import PackedDataset, settings_that_must_match
from composer_packing.checkpointing.resumption import Resumption
from composer_packing.checkpointing.sigterm import StopAtSigterm, UntilStopped
from composer_packing.common.errors import ConfigError
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.dataspec import packed_dataspec
from composer_packing.training.optimizer import WarmupStableDecayScheduler
from tests.checkpointing.test_resuming import scheduled
from tests.tools.runs import VOCABULARY, documents_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")

DURATION = "2800tok"


class Stop(Callback):
    """Wants to stop while a batch is trained on, as after a signal."""

    def __init__(self, batches: Lockstep, batch: int) -> None:
        self._batches, self._batch = batches, batch
        self.rates: list[float] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])
        self._batches.stop_wanted |= state.timestamp.batch.value == self._batch


class Run:
    """A run as in `train.py`, with dropout and a learning rate that changes in every batch.

    Attributes:
        curve: clock, epoch, batch of the epoch, learning rate and loss of every batch.
    """

    def __init__(self, load_path: Path | None = None, stop_in: int = -1, data: str = "a", **more: Any) -> None:
        config = scheduled()
        config.model.attn_out_dropout = 0.2
        torch.manual_seed(0 if load_path is None else 1)
        model, self.log = PackedLanguageModel(config.model), InMemoryLogger()
        self.batches = train_batches(documents_of(60), config, VOCABULARY)
        self.data = PackedDataset(
            self.batches, settings_that_must_match(config, "t", data), more.pop("restart_changed", False)
        )
        stop = Stop(self.batches, stop_in)
        every_batch = StopAtSigterm(self.batches, "1ba", UntilStopped([], self.batches)).is_to_save
        settings: dict[str, Any] = {"save_interval": every_batch, "save_overwrite": True}
        try:
            self.trainer = Trainer(
                model=model,
                train_dataloader=packed_dataspec(self.data),
                optimizers=DecoupledAdamW(model.parameters(), lr=1e-2),
                schedulers=WarmupStableDecayScheduler("600tok", "1500tok", 0.0),
                max_duration=DURATION,
                accumulate_train_batch_on_tokens=True,
                device_train_microbatch_size=1,
                device="cpu",
                progress_bar=False,
                loggers=[self.log],
                callbacks=[stop, Resumption(self.data)],
                load_path=None if load_path is None else str(load_path),
                seed=3,
                **(settings | more),
            )
            self.first = self.trainer.state.timestamp
            with contextlib.suppress(Stopped):
                self.trainer.fit()
            self.trainer.engine.close()
        finally:
            self.batches.close()
        self.curve = [
            (int(time.token), int(time.sample), int(time.epoch), int(time.batch_in_epoch), rate, float(loss))
            for (time, loss), rate in zip(self.log.data["loss/train/total"], stop.rates, strict=True)
        ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which the undisturbed run puts a checkpoint after every batch."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Run:
    """The run that never stops."""
    return Run(save_folder=str(folder))


def checkpoint(folder: Path, batch: int) -> Path:
    (path,) = folder.glob(f"ep*-ba{batch}-rank0.pt")
    return path


def assert_ends_as(run: Run, whole: Run) -> None:
    """Assert that two runs end with the same weights, moments and clock."""
    one, other = run.trainer.state, whole.trainer.state
    assert all(torch.equal(*pair) for pair in zip(one.model.parameters(), other.model.parameters(), strict=True))
    moments = [each.optimizers[0].state_dict() for each in (one, other)]
    for mine, theirs in zip(*(each["state"].values() for each in moments), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert moments[0]["param_groups"] == moments[1]["param_groups"]
    for unit in ("epoch", "batch", "sample", "token", "batch_in_epoch", "token_in_epoch"):
        assert getattr(one.timestamp, unit) == getattr(other.timestamp, unit)


def test_the_loss_curve_is_that_of_a_run_that_was_never_stopped(whole: Run, folder: Path) -> None:
    """The stops lie in the warmup, in the cooldown, at the end of an epoch and next to it."""
    last_of_epoch = sum(epoch == 0 for _, _, epoch, *_ in whole.curve)
    assert 8 < last_of_epoch < len(whole.curve) - 8
    for stop in (1, 4, last_of_epoch - 1, last_of_epoch, last_of_epoch + 1, len(whole.curve) - 1):
        run = Run(checkpoint(folder, stop))
        assert run.curve == whole.curve[stop:], f"after batch {stop}"
        assert_ends_as(run, whole)


def test_a_run_resumes_from_a_checkpoint_at_the_end_of_an_epoch_too(whole: Run, tmp_path: Path) -> None:
    Run(save_folder=str(tmp_path), save_interval="1ep")
    last_of_epoch = sum(epoch == 0 for _, _, epoch, *_ in whole.curve)
    run = Run(checkpoint(tmp_path, last_of_epoch))
    assert run.first.batch_in_epoch == 0
    assert run.curve == whole.curve[last_of_epoch:]
    assert_ends_as(run, whole)


def test_a_run_that_is_stopped_three_times_in_an_epoch_ends_as_if_it_was_never_stopped(
    whole: Run, tmp_path: Path
) -> None:
    """Each stop comes after the batch in hand and leaves a checkpoint of that batch."""
    curve: list[Any] = []
    load_path = None
    for stop_in in (2, 4, 7, -1):
        run = Run(load_path, stop_in, save_folder=str(tmp_path), save_num_checkpoints_to_keep=1)
        assert run.batches.is_last is (stop_in >= 0)
        curve += run.curve
        if stop_in >= 0:
            assert len(curve) == stop_in + 1
            assert curve[-1][2] == 0, "still in the first epoch"
            load_path = checkpoint(tmp_path, len(curve))
    assert curve == whole.curve
    assert_ends_as(run, whole)


def test_evaluation_ends_early_if_the_run_is_to_stop(caplog: pytest.LogCaptureFixture) -> None:
    batches = train_batches(documents_of(60), scheduled(), VOCABULARY)
    held_out = UntilStopped([{"number": number} for number in range(5)], batches)
    assert len(held_out) == len(list(held_out)) == 5
    iterator = iter(held_out)
    assert [next(iterator)["number"] for _ in range(2)] == [0, 1]
    stopping = StopAtSigterm(batches, "1ba", held_out)
    assert stopping.state_dict() == {"owes_evaluation": False}
    batches.stop_wanted = True
    assert list(iterator) == []
    assert stopping.state_dict() == {"owes_evaluation": True}
    again = StopAtSigterm(batches, "1ba", held_out)
    again.load_state_dict(stopping.state_dict())
    assert again.owes_evaluation
    assert "evaluated on only 2 of 5 batches; the run evaluates again when it resumes" in caplog.text
    assert batches.is_last
    with pytest.raises(Stopped):
        next(iter(batches))
    batches.close()


def test_a_run_that_takes_only_the_weights_starts_data_and_clock_from_the_beginning(whole: Run, folder: Path) -> None:
    run = Run(checkpoint(folder, 9), load_weights_only=True)
    assert run.first.batch == 0
    assert [entry[:5] for entry in run.curve] == [entry[:5] for entry in whole.curve]
    assert run.curve[0][5] < whole.curve[0][5]


@pytest.mark.parametrize("has_lost", ["its position", "all of it"])
def test_a_checkpoint_without_a_position_in_the_data_is_refused_or_the_data_is_read_from_its_start(
    whole: Run, folder: Path, tmp_path: Path, has_lost: str
) -> None:
    """In the latter case clock, schedules and optimizer resume. Composer alone would replay batches, or worse."""
    saved = torch.load(checkpoint(folder, 9), weights_only=False)
    if has_lost == "its position":
        saved["state"]["dataset_state"]["train"] = None
    else:
        del saved["state"]["dataset_state"]
    torch.save(saved, tmp_path / "lost.pt")
    with pytest.raises(ConfigError, match="cannot resume from its checkpoint: it has no position in the data"):
        Run(tmp_path / "lost.pt")
    run = Run(tmp_path / "lost.pt", restart_changed=True)
    assert run.data.is_restarted
    assert run.curve[0][:2] == whole.curve[9][:2]
    assert run.curve[0][4] == whole.curve[9][4], "the learning rate continues"
    local = run.batches.state_dict()["stream"]["source"]["local"]
    assert local["tok"] == run.trainer.state.timestamp.token.value, "the schedules of the packer continue"
    assert local["ba"] == run.trainer.state.timestamp.batch.value


def test_a_checkpoint_of_other_data_is_refused_before_the_first_batch(whole: Run, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot resume from its checkpoint: data was a, is b; give the same"):
        Run(checkpoint(folder, 9), data="b")
    run = Run(checkpoint(folder, 9), data="b", restart_changed=True)
    assert run.data.is_restarted
    assert len(run.curve) > 5
