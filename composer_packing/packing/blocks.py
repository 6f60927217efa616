"""Blocks for fine-tuning: a whole list of sequences is packed at once, into blocks of a fixed length.

Sequences are laid end to end in blocks of `max_seq_length` slots. A loss mask says which of their tokens are to be
learned: all tokens, or the responses of each example. There are three placements. Sequences `a` to `f` of 5, 4, 3, 6, 3
and 2 tokens in blocks of eight slots::

    split (default)   aaaaabbb   bcccdddd   ddeeeff.               a sequence may go over the boundary of a block
    next block        aaaaa...   bbbbccc.   dddddd..   eeeff...    split=False: it begins the next block instead
    best fit          aaaaaccc   bbbbeee.   ddddddff               split=False, best_fit=True: any open block

Best fit takes the block with the least room that still holds the sequence. On a tie it takes the block that has had
this room for longest. Any number of blocks may be open, and a sequence costs no more time if many are.
"""

import array
import itertools
import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.arguments import check_ints, check_positive
from composer_packing.common.errors import one_line
from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import DOCUMENT, DocumentArrays, DocumentTable, LossMask
from composer_packing.packing.layout import fill_rows, lay_out
from composer_packing.packing.token_arrays import concatenate_ids, concatenate_loss_masks

log = logging.getLogger(__name__)


class PackedBlocks(NamedTuple):
    """Blocks in the order in which they were begun. The sequences of a block keep the order in which they came.

    Attributes:
        blocks: int64 `(blocks, max_seq_length)`, the token ids.
        loss_masks: int64 `(blocks, max_seq_length)`: 1 for a token to learn, 0 for another token and for padding. They
            belong to the tokens themselves. If you shift them to make next-token labels, leave out the first token of
            each segment of `cu_seqlens`: otherwise a sequence is predicted from the sequence before it.
        cu_seqlens: int32 `(segments + 1,)` for each block: 0, the end of each sequence or piece of a sequence, and
            `max_seq_length` if padding follows. With it, attention stays inside sequences.
        num_truncated: sequences that were cut to `max_seq_length` tokens, also if they were dropped afterwards.
        num_dropped: examples that were left out because they had no response token, or none that was kept.
    """

    blocks: NDArray[np.int64]
    loss_masks: NDArray[np.int64]
    cu_seqlens: list[NDArray[np.int32]]
    num_truncated: int
    num_dropped: int


def pack_blocks(
    sequences: Iterable[Any],
    max_seq_length: int,
    padding_token_id: int = 0,
    *,
    split: bool = True,
    best_fit: bool = False,
    loss_masks: Iterable[Any] | None = None,
    response_spans: Iterable[Any] | None = None,
) -> PackedBlocks:
    """Pack sequences into blocks, and say which of their tokens are to be learned.

    A sequence that is longer than a block is first cut to the length of a block. An example without a response token
    in what is kept is dropped. One warning gives the numbers of both. Empty sequences are passed over. A token may have
    the id of padding: padding is known by its position, not by its id.

    Args:
        sequences: a list, tuple, numpy array or CPU tensor of token ids each.
        max_seq_length: slots of a block.
        padding_token_id: id in the slots after the last token of a block.
        split: split a sequence that does not fit the rest of a block. Otherwise the whole sequence goes to another
            block.
        best_fit: put each sequence into the open block with the least room that holds it; needs `split=False`.
        loss_masks: for each sequence a mask of the same length, 1 or True for a token to learn and 0 or False for
            another. None if all tokens are to be learned.
        response_spans: instead of masks, for each sequence the `(start, end)` of its response, without the end, or a
            list of such pairs.

    Raises:
        TypeError: a sequence or mask is not a flat sequence of integers, a span is not a pair of integers, or a number
            is not an int.
        ValueError: an id is negative; `max_seq_length` is below 1 or not below 2**31; the number of masks or spans is
            not the number of sequences; a mask has another length than its sequence, or another value than 0 and 1; a
            span does not lie in its sequence; or options do not go together.
    """
    check_positive(max_seq_length=max_seq_length)
    check_ints(padding_token_id=padding_token_id)
    if max_seq_length >= 2**31:  # cu_seqlens is int32
        raise ValueError(f"{max_seq_length=} must be below 2**31")
    if best_fit and split:
        raise ValueError(f"{best_fit=} needs split=False, got {split=}")
    if loss_masks is not None and response_spans is not None:
        raise ValueError("loss_masks and response_spans must not both be given")
    tokens, lengths = concatenate_ids("each sequence", _to_list("sequences", sequences))
    starts = np.cumsum(lengths) - lengths

    kept = np.minimum(lengths, max_seq_length)
    to_learn = None
    if loss_masks is not None:
        to_learn = concatenate_loss_masks(_one_per_sequence("loss_masks", loss_masks, lengths), lengths)
    elif response_spans is not None:
        to_learn = _read_spans(_one_per_sequence("response_spans", response_spans, lengths), lengths, starts)
    is_taken = kept > 0
    if to_learn is not None:
        before = np.concatenate([[0], np.cumsum(to_learn, dtype=np.int64)])
        is_taken &= before[starts + kept] > before[starts]
    num_truncated = int(np.count_nonzero(lengths > max_seq_length))
    num_dropped = int(np.count_nonzero(lengths) - np.count_nonzero(is_taken))
    if num_truncated or num_dropped:
        log.warning(
            "of %d sequences, %d were cut to %d tokens and %d were dropped because they had no response token left",
            len(lengths),
            num_truncated,
            max_seq_length,
            num_dropped,
        )

    place = _split_over_boundaries if split else _best_fit if best_fit else _next_block
    table, row_of = place(_table(starts[is_taken], kept[is_taken]), max_seq_length)
    layout = lay_out(table, np.arange(len(table)), row_of, max_seq_length)
    blocks, learned = (np.empty((len(layout.num_tokens), max_seq_length), np.int64) for _ in range(2))
    no_mask = np.empty(0, np.uint8)
    fill_rows(DocumentArrays(tokens, no_mask, table), layout, padding_token_id, blocks, learned)
    if to_learn is not None:
        fill_rows(DocumentArrays(to_learn, no_mask, table), layout, 0, learned, np.empty_like(learned))
    bounds = itertools.pairwise([0, *np.cumsum(layout.segments).tolist()])
    cu_seqlens = [layout.cu_seqlens[first:end] for first, end in bounds]
    return PackedBlocks(blocks, learned, cu_seqlens, num_truncated, num_dropped)


def pack_sequences(
    sequences: Iterable[Any], max_seq_length: int, padding_token_id: int = 0, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks and loss masks as lists.

    `pack_sequences([[1, 2], [3, 4, 5], [6]], 4)` gives `([[1, 2, 3, 4], [5, 6, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]])`.

    Args:
        sequences: see `pack_blocks`.
        max_seq_length: slots of a block.
        padding_token_id: id in the slots after the last token of a block.
        options: the other options of `pack_blocks`.

    Raises:
        TypeError: see `pack_blocks`.
        ValueError: see `pack_blocks`.
    """
    packed = pack_blocks(sequences, max_seq_length, padding_token_id, **options)
    return packed.blocks.tolist(), packed.loss_masks.tolist()


def _table(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> DocumentTable:
    table = np.zeros(len(starts), DOCUMENT)
    table["start"], table["length"] = starts, lengths
    return table


def _split_over_boundaries(table: DocumentTable, row_len: int) -> tuple[DocumentTable, NDArray[np.int64]]:
    """The sequences, split at the boundaries of blocks, and the row of each piece."""
    lengths = table["length"]
    ends = np.cumsum(lengths)
    first_rows = (ends - lengths) // row_len
    # No sequence is longer than a row, so each comes in two pieces at most. The second piece may be empty.
    heads = np.minimum(ends, (first_rows + 1) * row_len) - (ends - lengths)
    starts = np.stack([table["start"], table["start"] + heads], axis=1)
    lengths = np.stack([heads, lengths - heads], axis=1)
    rows = np.stack([first_rows, first_rows + 1], axis=1)
    return _table(starts[lengths > 0], lengths[lengths > 0]), rows[lengths > 0]


@compiled
def _next_block(table: DocumentTable, row_len: int) -> tuple[DocumentTable, NDArray[np.int64]]:
    """The sequences, and the row of each if only the latest block is open."""
    row_of = np.empty(len(table), np.int64)
    row, room = -1, 0
    for i in range(len(table)):
        length = table[i].length
        if length > room:
            row, room = row + 1, row_len
        row_of[i] = row
        room -= length
    return table, row_of


@compiled
def _best_fit(table: DocumentTable, row_len: int) -> tuple[DocumentTable, NDArray[np.int64]]:
    """The sequences, and the row of each by best fit over as many rows as it takes.

    There is a queue of rows for each amount of room: `oldest` and `latest` are its ends, and `next_in_queue` links its
    rows. A binary tree over the amounts of room finds the least room that suffices: a leaf holds its room if some row
    has this room and 0 if not, and a node holds the largest value below it.
    """
    leaves = 1
    while leaves < row_len:
        leaves *= 2
    largest = np.zeros(2 * leaves, np.int64)
    oldest, latest = np.empty(row_len, np.int64), np.empty(row_len, np.int64)
    next_in_queue = np.empty(len(table), np.int64)
    row_of = np.empty(len(table), np.int64)
    rows = 0
    for i in range(len(table)):
        length = table[i].length
        if largest[1] < length:
            row, room = rows, row_len
            rows += 1
        else:
            node = 1
            while node < leaves:
                node = 2 * node if largest[2 * node] >= length else 2 * node + 1
            room = node - leaves
            row = oldest[room]
            oldest[room] = next_in_queue[row]
            if row == latest[room]:
                _set_leaf(largest, room, 0)
        row_of[i] = row
        room -= length
        if room > 0:
            if largest[leaves + room] == 0:
                oldest[room] = row
                _set_leaf(largest, room, room)
            else:
                next_in_queue[latest[room]] = row
            latest[room] = row
    return table, row_of


@compiled
def _set_leaf(largest: NDArray[np.int64], leaf: int, value: int) -> None:
    """Set a leaf of the tree, and the nodes above it."""
    node = len(largest) // 2 + leaf
    largest[node] = value
    while node > 1:
        node //= 2
        largest[node] = max(largest[2 * node], largest[2 * node + 1])


def _to_list(name: str, values: Iterable[Any]) -> list[Any]:
    """The values as a list, which can be read twice."""
    try:
        each = iter(values)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of sequences; got {one_line(values)}") from error
    return list(each)


def _one_per_sequence(name: str, values: Iterable[Any], lengths: NDArray[np.int64]) -> list[Any]:
    """The values as a list, after checking that there is one for each sequence."""
    each = _to_list(name, values)
    if len(each) != len(lengths):
        raise ValueError(f"{name} must have one entry for each of {len(lengths)} sequences; got {len(each)}")
    return each


def _read_spans(all_spans: list[Any], lengths: NDArray[np.int64], starts: NDArray[np.int64]) -> LossMask:
    """The loss mask of all tokens: 1 for each token in a span of its sequence."""
    pairs, counts = array.array("q"), array.array("q")
    for index, spans in enumerate(all_spans):
        try:
            is_single = len(spans) == 2 and (isinstance(spans[0], int) or getattr(spans[0], "ndim", 1) == 0)
            for start, end in (spans,) if is_single else spans:
                pairs.append(start)
                pairs.append(end)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise TypeError(
                f"response_spans[{index}] must be one (start, end) or a list of them; got {one_line(spans)}"
            ) from error
        counts.append(len(pairs) // 2)
    span_starts, span_ends = np.array(pairs).reshape(-1, 2).T
    sequence_of = np.repeat(np.arange(len(counts)), np.diff(counts, prepend=0))
    wrong = np.flatnonzero((span_starts < 0) | (span_starts > span_ends) | (span_ends > lengths[sequence_of]))
    if len(wrong):
        span = wrong[0]
        sequence = sequence_of[span]
        raise ValueError(
            f"response_spans[{sequence}] must satisfy 0 <= start <= end <= {lengths[sequence]}, the sequence's length; "
            f"got start={span_starts[span]}, end={span_ends[span]}"
        )
    # A token is to be learned if more spans begin at or before it than end there.
    begin, end = (
        np.bincount(starts[sequence_of] + offsets, minlength=lengths.sum() + 1) for offsets in (span_starts, span_ends)
    )
    to_learn: LossMask = (np.cumsum(begin - end)[:-1] > 0).astype(np.uint8)
    return to_learn
