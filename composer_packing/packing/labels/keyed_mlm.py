"""Keyed masks: they depend only on seed, epoch, document and position, not on the row, batch or rank of a token.

The shares are those of `published_mlm`, with two differences. Special tokens are never hidden, and random words come
from the whole vocabulary without the special tokens.

Each token gets 64 random bits::

    seed, epoch, document number  -- hash -->  state of a SplitMix64 generator
    position p                    ----------->  its output at step p + 1:  | upper 32 bits | lower 32 bits |
                                                                            is it chosen?   which random word?

(SplitMix64: Steele, Lea and Flood, 2014.) A token is chosen if its upper half, as a fraction, lies below the mask
ratio in force. So a lower ratio chooses some of the tokens that a higher ratio chooses.

A row is filled and masked in one pass without branches, `BLOCK` tokens at a time. The last block of a document may
write beyond its end; the next document or the padding overwrites these slots.
"""

import operator
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import BLOCK, DocumentTable, Tokens
from composer_packing.packing.layout import Layout

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)

Runs = tuple[tuple[int, int], ...]
"""Special ids as runs of consecutive ids, in rising order: the first id of a run and the number of ids."""


@compiled
def _mixed(state: np.uint64) -> np.uint64:
    """The output function of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


@compiled
def _write_masked(
    tokens: Tokens,
    state: np.uint64,
    thresholds: tuple[int, int, int],
    mask_token: int,
    ignore_index: int,
    special: Runs,
    words: int,
    ids: NDArray[np.int64],
    labels: NDArray[np.int64],
) -> None:
    """Copy tokens to `ids` and mask them. All arrays have the same length."""
    hidden, swapped, chosen = thresholds
    for i in range(len(ids)):
        token = np.int64(tokens[i])
        bits = _mixed(state + np.uint64(i) * _STEP)
        draw = np.int64(bits >> _HALF)
        word = np.int64((np.uint64(np.uint32(bits)) * np.uint64(np.uint32(words))) >> _HALF)
        is_target = draw < chosen
        for first, count in special:
            is_target &= np.uint64(token - first) >= np.uint64(count)
            word += count if word >= first else 0
        shown = mask_token if draw < hidden else word
        ids[i] = shown if is_target & (draw < swapped) else token
        labels[i] = token if is_target else ignore_index


@compiled
def _fill_masked(
    tokens: Tokens,
    documents: DocumentTable,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    pad_token: int,
    seed: np.uint64,
    thresholds: tuple[int, int, int],
    mask_token: int,
    ignore_index: int,
    special: Runs,
    words: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Write the rows. Returns the number of targets of each row."""
    rows, row_len = input_ids.shape
    ids, targets = input_ids.reshape(-1), labels.reshape(-1)
    num_targets = np.zeros(rows, np.int64)
    for row in range(rows):
        begin, end = row * row_len, (row + 1) * row_len
        at = begin
        for i in range(first[row], first[row + 1]):
            document = documents[placed[i]]
            state = _mixed(seed + _STEP)
            state = _mixed(state + np.uint64(document.epoch) * _STEP)
            state = _mixed(state + np.uint64(document.number) * _STEP)
            state += np.uint64(document.position + 1) * _STEP
            to = min(at + (document.length + BLOCK - 1) // BLOCK * BLOCK, len(ids))
            source = tokens[document.start : document.start + to - at]
            _write_masked(
                source,
                state,
                thresholds,
                mask_token,
                ignore_index,
                special,
                words,
                ids[at:to],
                targets[at:to],
            )
            at += document.length
        ids[at:end] = pad_token
        targets[at:end] = ignore_index
        attention_mask[row, : at - begin] = 1
        attention_mask[row, at - begin :] = 0
        count = 0
        of_row = labels[row]
        for slot in range(row_len):
            count += 1 if of_row[slot] != ignore_index else 0
        num_targets[row] = count
    return num_targets


class KeyedMasking:
    """Masked-language-model labels that depend only on seed, epoch, document and position. This module has a picture.

    Args:
        seed: at least 0 and below 2**64.
        vocab_size: all ids of documents lie below this number, and random words are drawn below it; below 2**32.
        special_token_ids: ids that are never hidden nor drawn. The mask token must be one of them. A run of consecutive
            ids costs no more time than one id.

    Raises:
        ValueError: a value is out of range, or no word is left to draw.
        TypeError: a value is not an int.
    """

    def __init__(self, seed: int, vocab_size: int, special_token_ids: Iterable[int]) -> None:
        seed, vocab_size = operator.index(seed), operator.index(vocab_size)
        special_token_ids = tuple(operator.index(token_id) for token_id in special_token_ids)
        if not 0 <= seed < 2**64:
            raise ValueError(f"{seed=} must lie between 0 and 2**64 - 1")
        if not 0 < vocab_size < 2**32:
            raise ValueError(f"{vocab_size=} must be at least 1 and below 2**32")
        outside = [token_id for token_id in special_token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise ValueError(f"special_token_ids={outside} must lie between 0 and {vocab_size=}")
        if not special_token_ids:
            raise ValueError("special_token_ids is empty; give the mask token at least")
        self.seed = seed
        self.vocab_size = vocab_size
        self.special_token_ids = special_token_ids
        self._words = vocab_size - len(set(special_token_ids))
        if not self._words:
            raise ValueError(f"{special_token_ids=} leave no word of {vocab_size=} to draw")
        ordered = np.unique(special_token_ids)
        runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
        self._special: Runs = tuple((int(run[0]), len(run)) for run in runs)

    def fill_masked(
        self,
        tokens: Tokens,
        documents: DocumentTable,
        layout: Layout,
        pad_token: int,
        mask_prob: float,
        mask_token: int,
        ignore_index: int,
        input_ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        attention_mask: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Write the documents of each row one after the other, masked, and pad the rest. Padding is never a target.

        Args:
            tokens: the tokens of all documents, each below `vocab_size`, and `BLOCK` more slots of any value.
            documents: the table.
            layout: which documents lie in which row.
            pad_token: stands in slots that hold no document.
            mask_prob: share of the tokens that are chosen, 0 to 1. Special tokens are never chosen.
            mask_token: id of the mask token.
            ignore_index: label of a slot that is not a target.
            input_ids: int64 `(rows, row_len)`, all of it is written.
            labels: the same.
            attention_mask: the same: 1 for a token of a document, else 0.

        Returns:
            int64 `(rows,)`, targets of each row.
        """
        hidden, swapped, chosen = (round(share * mask_prob * 2**32) for share in (0.8, 0.9, 1.0))
        targets: NDArray[np.int64] = _fill_masked(
            tokens,
            documents,
            layout.documents,
            layout.first,
            pad_token,
            np.uint64(self.seed),
            (hidden, swapped, chosen),
            mask_token,
            ignore_index,
            self._special,
            self._words,
            input_ids,
            labels,
            attention_mask,
        )
        return targets
