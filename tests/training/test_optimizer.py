import pytest
import torch
from composer import State, Timestamp
from composer.devices import DeviceCPU

from composer_packing.model.config import ModernBertConfig
from composer_packing.model.modernbert import ModernBertForMaskedLM
from composer_packing.training.optimizer import WarmupStableDecayScheduler, parameter_groups


def state_at(now: int, max_duration: str = "1000tok") -> State:
    state = State(torch.nn.Linear(1, 1), 0, "run", DeviceCPU(), max_duration=max_duration)
    state.timestamp = Timestamp(token=now, sample=now, batch=now)
    return state


@pytest.mark.parametrize("unit", ["tok", "sp", "ba"])
def test_the_rate_rises_stays_and_falls_by_one_minus_a_square_root(unit: str) -> None:
    schedule = WarmupStableDecayScheduler(f"100{unit}", f"400{unit}", alpha_f=0.1)
    by_hand = {0: 0.0, 50: 0.5, 100: 1.0, 599: 1.0, 600: 1.0, 700: 1 - 0.9 * 0.5, 1000: 0.1, 1200: 0.1}
    assert {now: schedule(state_at(now, f"1000{unit}")) for now in by_hand} == pytest.approx(by_hand)


def test_without_warmup_and_decay_the_rate_is_constant() -> None:
    schedule = WarmupStableDecayScheduler("0tok", "0tok")
    assert [schedule(state_at(now)) for now in (0, 500, 1000)] == [1.0, 1.0, 1.0]


def test_a_warmup_counts_in_its_own_unit() -> None:
    state = state_at(0)
    state.timestamp = Timestamp(token=900, sample=70, batch=5)
    assert WarmupStableDecayScheduler("10ba", "0tok")(state) == 0.5
    assert WarmupStableDecayScheduler("100sp", "0tok")(state) == 0.7
    assert WarmupStableDecayScheduler("900tok", "0tok")(state) == 1.0


def test_a_decay_in_another_unit_than_the_length_of_training_is_refused() -> None:
    with pytest.raises(ValueError, match="t_decay=10ba must be in tok: it counts back from max_duration=1000tok"):
        WarmupStableDecayScheduler("0tok", "10ba")(state_at(0))
    assert WarmupStableDecayScheduler("10ba", "0tok")(state_at(5, "100ba")) == 0.5


@pytest.mark.parametrize("time", ["", "0.1dur", "5ep", "-1ba"])
def test_a_string_that_is_not_a_duration_is_refused_at_once(time: str) -> None:
    for times in ((time, "0tok"), ("0tok", time)):
        with pytest.raises(ValueError, match=f"{time!r} must"):
            WarmupStableDecayScheduler(*times)


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    config = ModernBertConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model = ModernBertForMaskedLM(config)
    decaying, others = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all("norm" in names[id(parameter)] or "bias" in names[id(parameter)] for parameter in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)
