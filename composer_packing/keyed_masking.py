"""Masks that follow from seed, epoch, document and position, whatever row, batch or rank a token lies in.

Who is chosen and what becomes of it is as in `masking`, with two differences: special tokens are never
hidden, and random words come from the whole vocabulary without them. The draw at a position is the output
of SplitMix64 (Steele, Lea and Flood, 2014) at that step, for a generator whose state is a hash of the
other three. A token is chosen where its draw lies below the mask ratio in force: a lower ratio chooses some
of those that a higher one does.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from composer_packing.packing import NO_DOCUMENT, FilledRows, compiled

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


@compiled
def _mixed(state: np.uint64) -> np.uint64:
    """The output function of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


@compiled
def _mask_documents(
    ids: NDArray[np.int64],
    cu_seqlens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    document_at: NDArray[np.int64],
    epochs: NDArray[np.int64],
    documents: NDArray[np.int64],
    seed: np.uint64,
    mask_prob: float,
    mask_token: int,
    ignore_index: int,
    may_be_hidden: NDArray[np.bool_],
    words: NDArray[np.int64],
    labels: NDArray[np.int64],
) -> int:
    """Mask in place and write the labels; give an id beyond the vocabulary where one is met, else -1."""
    labels[:] = ignore_index
    for row in range(len(ids)):
        for segment in range(offsets[row] + 1, offsets[row + 1]):
            document = document_at[segment]
            if document == NO_DOCUMENT:
                continue
            state = _mixed(seed + _STEP)
            state = _mixed(state + np.uint64(epochs[document]) * _STEP)
            state = _mixed(state + np.uint64(documents[document]) * _STEP)
            for i in range(cu_seqlens[segment - 1], cu_seqlens[segment]):
                token = ids[row, i]
                if token >= len(may_be_hidden):
                    return int(token)
                state += _STEP
                bits = _mixed(state)
                draw = (bits >> np.uint64(11)) * _UNIT
                if draw >= mask_prob or not may_be_hidden[token]:
                    continue
                labels[row, i] = token
                if draw < mask_prob * 0.8:
                    ids[row, i] = mask_token
                elif draw < mask_prob * 0.9:
                    # A second hash: the bits of the draw lie in a narrow range here.
                    word = ((_mixed(bits) >> np.uint64(32)) * np.uint64(len(words))) >> np.uint64(32)
                    ids[row, i] = words[word]
    return -1


class KeyedMasking:
    """Masked-language-model labels from seed, epoch, document and position.

    Args:
        seed: at least 0 and below 2**64.
        vocab_size: ids of documents lie below it; random words are drawn from it.
        special_token_ids: ids that are neither hidden nor drawn, the mask token among them.

    Raises:
        ValueError: a value is out of range, or no word is left to draw.
    """

    def __init__(self, seed: int, vocab_size: int, special_token_ids: Sequence[int]) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"{seed=} must lie between 0 and 2**64 - 1")
        outside = [token_id for token_id in special_token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise ValueError(f"special_token_ids={outside} must lie between 0 and {vocab_size=}")
        self.seed = seed
        self.vocab_size = vocab_size
        self.special_token_ids = tuple(special_token_ids)
        self._may_be_hidden = np.ones(vocab_size, np.bool_)
        self._may_be_hidden[list(special_token_ids)] = False
        self._words = np.flatnonzero(self._may_be_hidden)
        if not len(self._words):
            raise ValueError(f"{special_token_ids=} leave no word of {vocab_size=} to draw")

    def mask_in_place(
        self,
        filled: FilledRows,
        epochs: NDArray[np.int64],
        documents: NDArray[np.int64],
        mask_prob: float,
        mask_token: int,
        ignore_index: int,
    ) -> NDArray[np.int64]:
        """Mask the rows where they lie and give the labels. Padding is left as it is.

        Args:
            filled: rows; their `input_ids` are changed in place.
            epochs: int64, epoch of each document that `filled.document_at` refers to.
            documents: int64, number of each.
            mask_prob: share of tokens that are chosen, 0 to 1; special tokens are passed over.
            mask_token: id of the mask token.
            ignore_index: label of what is no target.

        Returns:
            int64 labels, of the shape of `input_ids`.

        Raises:
            ValueError: a token id is not below `vocab_size`.
        """
        labels = np.empty_like(filled.input_ids)
        beyond = _mask_documents(
            filled.input_ids,
            filled.cu_seqlens,
            filled.offsets,
            filled.document_at,
            epochs,
            documents,
            np.uint64(self.seed),
            mask_prob,
            mask_token,
            ignore_index,
            self._may_be_hidden,
            self._words,
            labels,
        )
        if beyond >= 0:
            raise ValueError(f"a document holds the id {beyond}; vocab_size={self.vocab_size}")
        return labels
