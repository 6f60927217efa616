from typing import Any

import pytest
from composer import Time, Timestamp, TimeUnit
from hypothesis import given
from hypothesis import strategies as st

from composer_packing.common.durations import UNITS, Duration, parse_duration


@pytest.mark.parametrize("time", [1000, "1000tok", "1_000tok", Time(1000, TimeUnit.TOKEN)])
def test_an_int_is_a_number_of_tokens(time: Any) -> None:
    assert parse_duration("warmup", time) == Duration(1000, "tok")


@pytest.mark.parametrize("unit", ["tok", "sp", "ba"])
def test_durations_are_parsed_and_written_as_composer_does(unit: str) -> None:
    assert parse_duration("warmup", f"7{unit}") == parse_duration("warmup", Time(7, unit)) == Duration(7, unit)
    assert str(Duration(7, unit)) == f"7{unit}"


@given(st.integers(0, 10**15), st.integers(1, 1000))
def test_ranks_share_tokens_and_documents_rounded_up_and_do_not_share_batches(count: int, world_size: int) -> None:
    for unit in ("tok", "sp"):
        local = Duration(count, unit).local(world_size)
        assert count <= local * world_size < count + world_size
    assert Duration(count, "ba").local(world_size) == count


@pytest.mark.parametrize("unit", ["tok", "sp", "ba"])
def test_a_share_of_the_training_is_in_the_unit_of_the_training(unit: str) -> None:
    whole = Duration(2000, unit)
    assert parse_duration("warmup", "0.1dur", max_duration=whole) == Duration(200, unit)
    assert parse_duration("warmup", "0.7dur", max_duration=Duration(10, unit)) == Duration(7, unit)
    assert parse_duration("warmup", "0.29dur", max_duration=Duration(100, unit)) == Duration(29, unit), "as written"
    assert parse_duration("warmup", "0.5dur", max_duration=Duration(7, unit)) == Duration(3, unit), "two halves fit"
    assert parse_duration("warmup", Time(0.25, "dur"), max_duration=whole) == Duration(500, unit)
    assert parse_duration("warmup", "5ba", max_duration=whole) == Duration(5, "ba")


@pytest.mark.parametrize("whole", [None, Duration(100, "tok")])
@pytest.mark.parametrize(
    "time",
    [
        *("10m", "", "nandur", "infdur", "nantok", "infsp", "-5tok", "-1dur", -1, "five", "5", "5ep", 1.5, "1.5tok"),
        *(True, None, Time(3, "ep"), Time(3, "sec"), Time(-3, "ba")),
    ],
)
def test_anything_else_is_an_error_that_shows_the_value(time: Any, whole: Duration | None) -> None:
    with pytest.raises(ValueError, match="warmup=") as error:
        parse_duration("warmup", time, max_duration=whole)
    assert repr(time) in str(error.value)


def test_a_share_of_an_unknown_length_is_an_error_that_does_not_suggest_dur() -> None:
    with pytest.raises(ValueError, match=r"warmup='0\.5dur' must be a duration such as 1000tok, 50sp, 10ba$"):
        parse_duration("warmup", "0.5dur")


def test_a_duration_below_the_least_is_an_error_that_shows_it_as_given_and_as_resolved() -> None:
    with pytest.raises(ValueError, match=r"interval='0\.001dur' comes to 0ba; it must be at least 1ba"):
        parse_duration("interval", "0.001dur", least=1, max_duration=Duration(100, "ba"))


@pytest.mark.parametrize("time", ["1e308dur", "1e30tok", 2**63])
def test_a_duration_that_does_not_fit_int64_is_an_error_that_shows_the_value(time: Any) -> None:
    with pytest.raises(ValueError, match=r"it must be below 2\*\*63 tokens") as error:
        parse_duration("interval", time, max_duration=Duration(1000, "tok"))
    assert f"interval={time!r} is too long" in str(error.value)


def test_a_world_size_of_0_is_an_error() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        Duration(5, "tok").local(0)


def test_composers_timestamp_counts_every_unit_under_the_name_of_the_table() -> None:
    clock = Timestamp(token=3, sample=4, batch=5)
    for unit, count in {"tok": 3, "sp": 4, "ba": 5}.items():
        name = UNITS[unit].timestamp_name
        assert getattr(clock, name) == Time(count, unit)
        assert clock.state_dict()[name] == count
    assert set(UNITS) == {"tok", "sp", "ba"}
