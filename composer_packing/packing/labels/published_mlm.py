"""Published masks: which tokens are hidden, what replaces them, and what is predicted.

A token is chosen with probability `mask_prob`, and becomes a target. Of the chosen tokens, 80 % become the mask token,
10 % a random word, and 10 % stay as they are (Devlin et al., 2019, "BERT"). The draws come from a numpy generator, in
the same order as in the published ModernBERT packer, so the same seed gives the same batches.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.arguments import check_ratio
from composer_packing.common.jit import compiled


@compiled
def _hide(
    draws: NDArray[np.float64],
    mask_prob: float,
    mask_token: int,
    ignore_index: int,
    is_token: NDArray[Any],
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
) -> int:
    """Write labels and mask tokens into flat arrays, and give the largest id that is left."""
    largest = -1
    for i in range(len(ids)):
        chosen = draws[i] < mask_prob
        labels[i] = ids[i] if chosen and is_token[i] else ignore_index
        if draws[i] < mask_prob * 0.8:
            ids[i] = mask_token
        largest = max(largest, ids[i])
    return largest


@compiled
def _swap(draws: NDArray[np.float64], mask_prob: float, words: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
    """Write the random words into flat arrays."""
    for i in range(len(ids)):
        if mask_prob * 0.8 <= draws[i] < mask_prob * 0.9:
            ids[i] = words[i]


def mask_in_place(
    ids: NDArray[np.int64],
    is_token: NDArray[Any],
    mask_prob: float,
    mask_token: int,
    ignore_index: int,
    rng: np.random.Generator,
    labels: NDArray[np.int64],
) -> None:
    """Mask `ids` in place and write the labels.

    As in the published packer, padding is masked like a token, but it is never a target. Random words lie between 0 and
    the largest id in the batch, after the mask tokens have been written.

    Args:
        ids: int64, any shape, C-contiguous; changed in place.
        is_token: bool or 0 and 1, same shape: 1 for a document's token, 0 for padding.
        mask_prob: share of the slots that are chosen, 0 to 1.
        mask_token: id of the mask token.
        ignore_index: label of a slot that is not a target.
        rng: draws `random(shape)` and then `integers(0, largest + 1, shape)`.
        labels: int64, same shape, C-contiguous; written whole.
    """
    if ids.size == 0:
        return
    draws: NDArray[np.float64] = np.asarray(rng.random(ids.shape)).reshape(-1)
    flat = ids.reshape(-1)
    largest = _hide(draws, mask_prob, mask_token, ignore_index, is_token.reshape(-1), flat, labels.reshape(-1))
    words: NDArray[np.int64] = np.asarray(rng.integers(0, largest + 1, ids.shape))
    _swap(draws, mask_prob, words.reshape(-1), flat)


def mlm_masking(
    seq: NDArray[np.int64],
    mask_prob: float,
    mask_token: int,
    pad_token: int = -1,
    ignore_index: int = -100,
    np_rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A masked copy of token ids, and their labels. The signature is the published one.

    Args:
        seq: integers, any shape.
        mask_prob: share of the slots that are chosen, 0 to 1.
        mask_token: id of the mask token.
        pad_token: id that is never a target.
        ignore_index: label of a slot that is not a target.
        np_rng: generator of the draws; None for a new generator without a seed.

    Returns:
        `(masked, labels)`, int64, each with the shape of `seq`.

    Raises:
        ValueError: `mask_prob` is not between 0 and 1.
    """
    check_ratio("mask_prob", mask_prob)
    masked = np.array(seq, dtype=np.int64, order="C")
    rng = np.random.default_rng() if np_rng is None else np_rng
    labels = np.empty_like(masked)
    mask_in_place(masked, masked != pad_token, mask_prob, mask_token, ignore_index, rng, labels)
    return masked, labels
