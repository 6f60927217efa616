import math
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any, get_type_hints

import pytest

from composer_packing.common.errors import ConfigError
from composer_packing.config.limits import LARGEST, OneOf, Range, check_limits, limited_keys
from composer_packing.config.schema import TrainConfig

CHECKED_WITH_OTHERS = {
    "global_train_batch_size",
    "save_num_checkpoints_to_keep",
    "train_loader.packing_buffer_size",
    "train_loader.batch_size_warmup_min_size",
    "train_loader.masking_ratio_step_size",
}
"""Numbers whose range depends on other keys: `config.checks` knows it."""


@dataclass
class Inner:
    share: Annotated[float, Range(above=0, at_most=1)] | None = None


@dataclass
class Outer:
    kind: Annotated[str, OneOf(("a", "b", "c"))] = "a"
    pair: Annotated[tuple[float, float], Range(at_least=0, below=LARGEST)] = (0.0, 1.0)
    inner: Inner = field(default_factory=Inner)
    named: dict[str, Inner] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Outer(kind="d"), "kind=d: must be a, b or c"),
        (Outer(pair=(0.0, -1.0)), "pair=[0.0, -1.0]: each must be at least 0 and below 2**32"),
        (Outer(pair=(math.nan, 0.0)), "pair=[nan, 0.0]: each must be at least 0 and below 2**32"),
        (Outer(pair=(2.0**32, 0.0)), "pair=[4294967296.0, 0.0]: each must be at least 0 and below 2**32"),
        (Outer(inner=Inner(0.0)), "inner.share=0.0: must be above 0 and at most 1, or null"),
        (Outer(named={"x": Inner(1.0), "y": Inner(1.1)}), "named.y.share=1.1: must be above 0 and at most 1, or null"),
    ],
)
def test_a_value_outside_of_its_limits_is_named_with_its_key_and_what_would_do(config: Outer, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_limits(config)
    assert str(caught.value) == words


def test_values_within_their_limits_and_none_are_allowed() -> None:
    check_limits(Outer("c", (0.0, 2.0**32 - 1), Inner(1.0), {"x": Inner(1e-9), "y": Inner(None)}))


def numbers_in(config: Any, prefix: str = "") -> Iterator[str]:
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if is_dataclass(value) and name not in ("data", "model"):
            yield from numbers_in(value, f"{prefix}{name}.")
        elif kind in (int, float, int | None, float | None):
            yield prefix + name


def test_every_number_of_a_run_declares_its_range() -> None:
    declared = {key.path for key in limited_keys(TrainConfig())}
    assert set(numbers_in(TrainConfig())) - declared == CHECKED_WITH_OTHERS
