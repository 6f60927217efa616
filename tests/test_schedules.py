from typing import Any

import pytest
from composer import Time, TimeUnit
from hypothesis import given
from hypothesis import strategies as st

from composer_packing import BatchSizeWarmupScheduler, MaskingRatioCooldownScheduler, MaskingSchedule
from composer_packing.schedules import local_tokens
from tests import reference


def test_warmup_gives_the_golden_sizes(golden: dict[str, Any]) -> None:
    for case in golden["schedules"]["warmup"]:
        schedule = BatchSizeWarmupScheduler(*case["args"])
        assert {seen: schedule(int(seen)) for seen in case["at"]} == case["at"]


def test_cooldown_gives_the_golden_ratios_to_the_bit(golden: dict[str, Any]) -> None:
    for case in golden["schedules"]["cooldown"]:
        schedule = MaskingRatioCooldownScheduler(*case["args"])
        assert {seen: schedule(int(seen)) for seen in case["at"]} == case["at"]


@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 10_000), st.integers(1, 9), st.integers(0, 12_000))
def test_warmup_agrees_with_walking_over_all_sizes(
    minimum: int, more: int, tokens: int, world_size: int, seen: int
) -> None:
    schedule = BatchSizeWarmupScheduler(minimum, minimum + more, tokens, world_size)
    assert schedule(seen) == reference.warmup_size(minimum, minimum + more, tokens, world_size, seen)


def test_a_warmup_to_a_billion_sizes_takes_no_time() -> None:
    schedule = BatchSizeWarmupScheduler(1, 10**9, 10**15, 1)
    assert schedule(0) == 1
    assert 1 < schedule(10**14) < 10**9
    assert schedule(10**15) == 10**9


def test_equal_sizes_need_no_warmup() -> None:
    assert BatchSizeWarmupScheduler(4, 4, 1000, 1)(0) == 4


def test_the_same_global_tokens_warm_up_any_number_of_ranks() -> None:
    for world_size in (1, 2, 4):
        schedule = BatchSizeWarmupScheduler(1, 8, 1000, world_size)
        assert schedule(1000 // world_size - 1) < 8
        assert schedule(1000 // world_size) == 8


def test_linear_cooldown_by_hand() -> None:
    schedule = MaskingRatioCooldownScheduler(0.3, 0.1, cooldown_tokens=100, start_tokens=50)
    assert schedule(0) == schedule(50) == 0.3
    assert schedule(100) == pytest.approx(0.2)
    assert schedule(150) == schedule(10**12) == 0.1


def test_stairs_by_hand_never_go_below_the_final_ratio() -> None:
    schedule = MaskingRatioCooldownScheduler(0.3, 0.15, 90, 0, MaskingSchedule.STAIR, 0.07)
    assert [round(schedule(at), 2) for at in (0, 29, 30, 59, 60, 89, 90)] == [
        0.3,
        0.3,
        0.23,
        0.23,
        0.16,
        0.16,
        0.15,
    ]


@pytest.mark.parametrize("time", [1000, "1000tok", "1_000tok", Time(1000, TimeUnit.TOKEN)])
def test_times_are_ints_strings_or_composer_times(time: Any) -> None:
    assert local_tokens("warmup_tokens", time, 1) == 1000
    assert local_tokens("warmup_tokens", time, 3) == 334


@pytest.mark.parametrize(
    "time",
    [
        "10m",
        "",
        "nandur",
        "nantok",
        "infsp",
        "-5tok",
        -1,
        "5ba",
        "0.5dur",
        "five",
        1.5,
        True,
        None,
        Time(3, "ep"),
    ],
)
def test_any_other_time_is_an_error_that_shows_it(time: Any) -> None:
    with pytest.raises(ValueError, match="warmup_tokens=") as error:
        local_tokens("warmup_tokens", time, 1)
    assert repr(time) in str(error.value)


@pytest.mark.parametrize("sizes", [(0, 4), (5, 4), (-1, 2)])
def test_sizes_out_of_order_are_an_error(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"min_batch_size={sizes[0]}"):
        BatchSizeWarmupScheduler(*sizes, 100, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.2, 0.1, 10), "initial_masking_ratio=1.2"),
        ((0.3, -0.1, 10), "final_masking_ratio=-0.1"),
        ((0.1, 0.3, 10), "final_masking_ratio=0.3"),
        ((0.3, 0.1, 10, 0, "cosine"), "schedule_type='cosine'"),
        ((0.3, 0.1, 10, 0, "stair"), "step_size=None"),
        ((0.3, 0.1, 10, 0, "stair", 0.0), "step_size=0.0"),
        ((0.3, 0.1, 10, 0, "stair", float("nan")), "step_size=nan"),
        ((0.3, 0.1, 10, 0, "stair", float("inf")), "step_size=inf"),
        ((0.3, 0.1, 10, 0, "linear", 0.05), "step_size=0.05 is for"),
        ((0.3, 0.1, "10ba"), "cooldown_tokens='10ba'"),
        ((0.3, 0.1, 10, "x"), "start_tokens='x'"),
    ],
)
def test_a_cooldown_that_makes_no_sense_is_an_error_that_shows_the_value(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskingRatioCooldownScheduler(*arguments)
