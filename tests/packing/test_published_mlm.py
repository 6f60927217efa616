import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from composer_packing import mlm_masking

MASK, PAD, IGNORE = 3, 0, -100


@given(
    hnp.arrays(np.int64, hnp.array_shapes(max_dims=2, max_side=30), elements=st.integers(0, 50)),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_every_target_is_the_original_and_everything_else_is_kept(
    ids: NDArray[np.int64], mask_prob: float, seed: int
) -> None:
    before = ids.copy()
    masked, labels = mlm_masking(ids, mask_prob, MASK, PAD, IGNORE, np.random.default_rng(seed))
    assert (ids == before).all(), "the input is not touched"
    target = labels != IGNORE
    assert (labels[target] == ids[target]).all()
    assert (ids[target] != PAD).all()
    kept = ~target & (ids != PAD)
    assert (masked[kept] == ids[kept]).all()


def test_the_shares_are_eighty_ten_ten() -> None:
    ids = np.full(1_000_000, 1000)
    masked, labels = mlm_masking(ids, 0.3, MASK, np_rng=np.random.default_rng(0))
    target = labels != IGNORE
    assert target.mean() == pytest.approx(0.3, abs=0.002)
    assert (masked[target] == MASK).mean() == pytest.approx(0.8, abs=0.003)
    assert (masked[target] == 1000).mean() == pytest.approx(0.1, abs=0.003)


def test_random_words_run_up_to_the_largest_id_present() -> None:
    ids = np.tile([10, 20], 200_000)
    masked, labels = mlm_masking(ids, 1.0, MASK, np_rng=np.random.default_rng(0))
    words = masked[(masked != labels) & (masked != MASK)]
    assert set(words.tolist()) == set(range(21)) - {MASK}


def test_a_ratio_of_zero_masks_nothing_and_a_ratio_of_one_makes_every_token_a_target() -> None:
    ids = np.arange(4, 104).reshape(4, 25)
    masked, labels = mlm_masking(ids, 0.0, MASK)
    assert (masked == ids).all()
    assert (labels == IGNORE).all()
    assert (mlm_masking(ids, 1.0, MASK)[1] == ids).all()


def test_the_same_generator_state_gives_the_same_masks() -> None:
    ids = np.arange(4, 504)
    first = mlm_masking(ids, 0.3, MASK, np_rng=np.random.default_rng(5))
    again = mlm_masking(ids, 0.3, MASK, np_rng=np.random.default_rng(5))
    other = mlm_masking(ids, 0.3, MASK, np_rng=np.random.default_rng(6))
    assert (first[0] == again[0]).all()
    assert (first[0] != other[0]).any()


def test_an_empty_array_stays_empty() -> None:
    masked, labels = mlm_masking(np.empty((0, 5), np.int64), 0.3, MASK)
    assert masked.shape == labels.shape == (0, 5)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_outside_zero_to_one_is_an_error_that_shows_it(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"mask_prob={ratio}"):
        mlm_masking(np.arange(4), ratio, MASK)
