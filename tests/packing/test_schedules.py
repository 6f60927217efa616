from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_packing import (
    BatchSizeWarmup,
    BatchSizeWarmupScheduler,
    MaskingRatioCooldownScheduler,
    MaskingSchedule,
    MaskRatioCooldown,
)
from composer_packing.packing.schedules import PackingSchedules
from tests.tools import reference


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


@pytest.mark.parametrize("unit", ["tok", "sp"])
def test_a_warmup_in_documents_has_the_shape_of_one_in_tokens(unit: str) -> None:
    schedule = BatchSizeWarmupScheduler(1, 4, f"600{unit}", 1)
    assert schedule.unit == unit
    assert [schedule(seen) for seen in (0, 99, 100, 299, 300, 599, 600)] == [1, 1, 2, 2, 3, 3, 4]


def test_a_warmup_in_batches_gives_each_size_as_many_of_them_on_any_number_of_ranks() -> None:
    for world_size in (1, 2, 8):
        schedule = BatchSizeWarmupScheduler(1, 4, "30ba", world_size)
        assert schedule.unit == "ba"
        assert [schedule(seen) for seen in range(31)] == [1] * 10 + [2] * 10 + [3] * 10 + [4]


def test_a_cooldown_counts_in_the_unit_of_its_length() -> None:
    schedule = MaskingRatioCooldownScheduler(0.3, 0.1, "100sp", "50sp", world_size=2)
    assert schedule.unit == "sp"
    assert schedule(50) == pytest.approx(0.2), "half of the hundred documents, after half of the fifty"
    assert MaskingRatioCooldownScheduler(0.3, 0.1, "10ba", world_size=4)(5) == pytest.approx(0.2)


@given(
    st.integers(1, 6), st.integers(0, 6), st.sampled_from(["tok", "sp", "ba"]), st.integers(0, 400), st.integers(1, 4)
)
def test_schedules_follow_what_was_packed_in_their_own_unit(
    minimum: int, more: int, unit: str, length: int, world_size: int
) -> None:
    warmup = BatchSizeWarmupScheduler(minimum, minimum + more, f"{length}{unit}", world_size)
    cooldown = MaskingRatioCooldownScheduler(0.3, 0.1, f"{length}{unit}", world_size=world_size)
    schedules = PackingSchedules(99, 0.5, warmup, cooldown)
    seen = {"tok": 0, "sp": 0, "ba": 0}
    for batch in range(20):
        assert schedules.rows == warmup(seen[unit])
        assert schedules.mask_ratio == cooldown(seen[unit])
        schedules.advance(tokens=30 + batch, documents=3)
        seen = {"tok": seen["tok"] + 30 + batch, "sp": seen["sp"] + 3, "ba": seen["ba"] + 1}
    constant = PackingSchedules(99, 0.5, None, None)
    assert (constant.rows, constant.mask_ratio) == (99, 0.5)


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


@pytest.mark.parametrize("sizes", [(0, 4), (5, 4), (-1, 2)])
def test_sizes_out_of_order_are_an_error(sizes: tuple[int, int]) -> None:
    with pytest.raises(
        ValueError, match=f"min_size={sizes[0]} must (be at least 1|not exceed the batch size after .*4)"
    ):
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
        ((0.3, 0.1, 10, 0, "linear", 0.05), "step_size=0.05 needs masking_cooldown_schedule_type='stair'"),
        ((0.3, 0.1, "10ep"), "cooldown_tokens='10ep'"),
        (
            (0.3, 0.1, "10ba", "5tok"),
            "start_tokens='5tok' must be in ba, the unit of masking_ratio_cooldown_tokens='10ba'",
        ),
        ((0.3, 0.1, 10, "x"), "start_tokens='x'"),
    ],
)
def test_an_invalid_cooldown_is_an_error_that_shows_the_value(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskingRatioCooldownScheduler(*arguments)


def test_without_options_there_is_no_schedule() -> None:
    assert BatchSizeWarmup.from_options(None, None) is None
    assert MaskRatioCooldown.from_options(None, None, None, "linear", None) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"final_masking_ratio": 0.1}, "final_masking_ratio=0.1 needs masking_ratio_cooldown_tokens too"),
        ({"masking_ratio_cooldown_tokens": "5ba"}, "masking_ratio_cooldown_tokens='5ba' needs final_masking_ratio too"),
        ({"masking_ratio_cooldown_start_tokens": 0}, "masking_ratio_cooldown_start_tokens=0 needs final_masking_ratio"),
        (
            {"masking_cooldown_schedule_type": "stair"},
            "masking_cooldown_schedule_type='stair' needs final_masking_ratio",
        ),
        ({"masking_ratio_step_size": 0.1}, "masking_ratio_step_size=0.1 needs final_masking_ratio too"),
    ],
)
def test_a_cooldown_option_that_needs_another_option_is_an_error_that_names_it(
    changed: dict[str, Any], message: str
) -> None:
    none = dict.fromkeys(
        (
            "final_masking_ratio",
            "masking_ratio_cooldown_tokens",
            "masking_ratio_cooldown_start_tokens",
            "masking_ratio_step_size",
        )
    )
    options: Any = {"masking_cooldown_schedule_type": "linear", **none, **changed}
    with pytest.raises(ValueError, match=f"^{message}"):
        MaskRatioCooldown.from_options(**options)


def test_a_warmup_in_sequences_becomes_a_warmup_in_rows() -> None:
    assert BatchSizeWarmup(32, "5ba").in_rows(4) == BatchSizeWarmup(8, "5ba")
    with pytest.raises(
        ValueError, match="batch_size_warmup_min_size=33 must be a multiple of 4, the sequences of a row"
    ):
        BatchSizeWarmup(33, "5ba").in_rows(4)


def test_options_make_the_published_schedulers() -> None:
    warmup = BatchSizeWarmup(1, "600sp").scheduler(4, world_size=2)
    assert (warmup.min_batch_size, warmup.max_batch_size, warmup.unit, warmup.local_warmup) == (1, 4, "sp", 300)
    cooldown = MaskRatioCooldown(0.1, 100, 50, "stair", 0.05).scheduler(0.3, world_size=2)
    assert (cooldown.local_cooldown, cooldown.local_start, cooldown.step_size) == (50, 25, 0.05)
    assert (cooldown.initial_masking_ratio, cooldown.final_masking_ratio) == (0.3, 0.1)
