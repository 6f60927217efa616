"""Keyed masks: they depend only on seed, epoch, document and position, not on the row, batch or rank of a token.

The shares are those of `published_mlm`: of the chosen tokens, 80 % become the mask token, 10 % a random word, and 10 %
stay. Two things differ: special tokens are never chosen, and random words come from the whole vocabulary without the
special tokens.

Every position of a document has a draw of 64 bits. It is the output of SplitMix64 (Steele, Lea and Flood, 2014) at the
step of that position, and the state of the generator is a hash of seed, epoch and document::

    draw    upper 32 bits                 lower 32 bits
            is the token chosen?          which random word?

A token is chosen if the upper half lies below the mask ratio. So a lower ratio chooses some of the tokens that a higher
ratio chooses, and no others.

Rows are filled and masked in one pass without branches, a block of tokens at a time. The last block of a document
writes a few slots too many. What follows the document, another document or padding, overwrites them.
"""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import BLOCK, DocumentArrays, DocumentTable, Tokens
from composer_packing.packing.layout import Layout

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)

Runs = tuple[tuple[int, int], ...]
"""Special ids as runs of consecutive ids, in rising order: the first id of each run, and the number of its ids."""


class MaskRule(NamedTuple):
    """What becomes of a token, given its draw.

    Attributes:
        hidden: a chosen token becomes the mask token if the upper half of its draw is below this.
        swapped: otherwise it becomes a random word if the upper half is below this, and stays if it is not.
        chosen: a token is chosen if the upper half is below this.
        mask_token: id of the mask token.
        special: ids that are never chosen or drawn.
        words: number of ids that may be drawn.
        ignore_index: label of a token that is not chosen.
    """

    hidden: int
    swapped: int
    chosen: int
    mask_token: int
    special: Runs
    words: int
    ignore_index: int


@compiled
def _mix(state: np.uint64) -> np.uint64:
    """The output function of SplitMix64."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


@compiled
def _write_masked(
    tokens: Tokens, state: np.uint64, rule: MaskRule, ids: NDArray[np.int64], labels: NDArray[np.int64]
) -> None:
    """Copy tokens to `ids`, masked, and write their labels. All arrays have the same length."""
    for i in range(len(ids)):
        token = np.int64(tokens[i])
        bits = _mix(state + np.uint64(i) * _STEP)
        draw = np.int64(bits >> _HALF)
        word = np.int64((np.uint64(np.uint32(bits)) * np.uint64(np.uint32(rule.words))) >> _HALF)
        is_target = draw < rule.chosen
        for first, count in rule.special:
            is_target &= np.uint64(token - first) >= np.uint64(count)
            word += count if word >= first else 0
        shown = rule.mask_token if draw < rule.hidden else word
        ids[i] = shown if is_target & (draw < rule.swapped) else token
        labels[i] = token if is_target else rule.ignore_index


@compiled
def _fill_masked(
    tokens: Tokens,
    table: DocumentTable,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    pad_token: int,
    seed: np.uint64,
    rule_values: tuple[Any, ...],
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Write the rows, masked, and give the number of targets of each row."""
    rule = MaskRule(*rule_values)
    rows, row_len = input_ids.shape
    ids, targets = input_ids.reshape(-1), labels.reshape(-1)
    num_targets = np.zeros(rows, np.int64)
    for row in range(rows):
        begin, end = row * row_len, (row + 1) * row_len
        at = begin
        for i in range(first[row], first[row + 1]):
            document = table[placed[i]]
            state = _mix(seed + _STEP)
            state = _mix(state + np.uint64(document.epoch) * _STEP)
            state = _mix(state + np.uint64(document.number) * _STEP)
            state += np.uint64(document.position + 1) * _STEP
            to = min(at + (document.length + BLOCK - 1) // BLOCK * BLOCK, len(ids))
            source = tokens[document.start : document.start + to - at]
            _write_masked(source, state, rule, ids[at:to], targets[at:to])
            at += document.length
        ids[at:end] = pad_token
        targets[at:end] = rule.ignore_index
        attention_mask[row, : at - begin] = 1
        attention_mask[row, at - begin :] = 0
        count = 0
        row_labels = labels[row]
        for slot in range(row_len):
            count += 1 if row_labels[slot] != rule.ignore_index else 0
        num_targets[row] = count
    return num_targets


class KeyedMasking:
    """Masked-language-model labels that depend only on seed, epoch, document and position.

    Args:
        seed: at least 0 and below 2**64.
        vocab_size: number of ids, at least 1 and below 2**32. Ids of documents lie below it, and random words are drawn
            from these ids.
        special_token_ids: ids that are never hidden and never drawn; the mask token is one of them. A run of
            consecutive ids costs no more time than one id.

    Raises:
        ValueError: a value is out of range, or no word is left to draw.
        TypeError: a value is not an int.

    Attributes:
        seed: as given.
        vocab_size: as given.
        special_token_ids: as given, as a tuple.
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
        documents: DocumentArrays,
        layout: Layout,
        pad_token: int,
        mask_prob: float,
        mask_token: int,
        ignore_index: int,
        input_ids: NDArray[np.int64],
        labels: NDArray[np.int64],
        attention_mask: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Write the documents of each row end to end, masked, and pad the rest of the row. Padding is never a target.

        Args:
            documents: the documents, with ids below `vocab_size`.
            layout: which document lies in which row.
            pad_token: id for the slots without a document.
            mask_prob: share of the tokens to choose, 0 to 1; special tokens are passed over.
            mask_token: id of the mask token.
            ignore_index: label of a slot that is not a target.
            input_ids: int64 `(rows, row_len)`, written whole.
            labels: int64 `(rows, row_len)`, written whole.
            attention_mask: int64 `(rows, row_len)`, written whole: 1 for a document's token, 0 for padding.

        Returns:
            int64 `(rows,)`: targets of each row.
        """
        hidden, swapped, chosen = (round(share * mask_prob * 2**32) for share in (0.8, 0.9, 1.0))
        rule = MaskRule(hidden, swapped, chosen, mask_token, self._special, self._words, ignore_index)
        targets: NDArray[np.int64] = _fill_masked(
            documents.tokens,
            documents.table,
            layout.documents,
            layout.first,
            pad_token,
            np.uint64(self.seed),
            tuple(rule),
            input_ids,
            labels,
            attention_mask,
        )
        return targets
