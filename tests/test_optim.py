import pytest
import torch
from composer import State, Timestamp
from composer.devices import DeviceCPU

from composer_packing.model import ModernBertConfig, ModernBertForMaskedLM
from composer_packing.optim import WarmupStableDecayScheduler, parameter_groups


def state_at(now: int, max_duration: str = "1000tok") -> State:
    state = State(torch.nn.Linear(1, 1), 0, "run", DeviceCPU(), max_duration=max_duration)
    state.timestamp = Timestamp(token=now, batch=now)
    return state


@pytest.mark.parametrize("times", [("100tok", "400tok"), ("0.1dur", "0.4dur")])
def test_the_rate_rises_stays_and_falls_by_one_minus_a_square_root(times: tuple[str, str]) -> None:
    schedule = WarmupStableDecayScheduler(*times, alpha_f=0.1)
    by_hand = {0: 0.0, 50: 0.5, 100: 1.0, 599: 1.0, 600: 1.0, 700: 1 - 0.9 * 0.5, 1000: 0.1, 1200: 0.1}
    assert {now: schedule(state_at(now)) for now in by_hand} == pytest.approx(by_hand)


def test_without_warmup_and_decay_the_rate_is_constant() -> None:
    schedule = WarmupStableDecayScheduler("0tok", "0tok")
    assert [schedule(state_at(now)) for now in (0, 500, 1000)] == [1.0, 1.0, 1.0]


def test_a_time_in_another_unit_is_refused() -> None:
    schedule = WarmupStableDecayScheduler("10ba", "0tok")
    with pytest.raises(ValueError, match=r"'10ba' does not go with max_duration='1000tok'"):
        schedule(state_at(0))
    assert WarmupStableDecayScheduler("10ba", "0dur")(state_at(5, "100ba")) == 0.5


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
