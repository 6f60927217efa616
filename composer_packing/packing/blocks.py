"""Sample packing for fine-tuning: a whole list of sequences goes in, blocks of one length come out.

Sequences are written one after the other into blocks of `max_seq_length` slots, together with a mask of the tokens that
are to be learned: all tokens, or the responses of each example. There are three placements. Sequences `a`..`f` of 5, 4,
3, 6, 3 and 2 tokens in blocks of eight slots::

    split, the default    aaaaabbb   bcccdddd   ddeeeff.                a sequence may continue in the next block
    next block            aaaaa...   bbbbccc.   dddddd..   eeeff...     split=False: it begins the next block
    best fit              aaaaaccc   bbbbeee.   ddddddff                split=False, best_fit=True: any open block

Best fit takes the block with the least room that still holds the sequence. On a tie it takes the block that has had
this room for the longest time. The number of open blocks has no bound, and a sequence costs the same time however many
blocks are open.
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
from composer_packing.packing.document_table import DOCUMENT, DocumentTable, LossMask
from composer_packing.packing.layout import fill_rows, lay_out
from composer_packing.packing.token_arrays import concatenate_ids, concatenate_loss_masks

log = logging.getLogger(__name__)


class PackedBlocks(NamedTuple):
    """Packed blocks, in the order in which they were begun. Sequences within a block keep their order.

    Attributes:
        blocks: int64 `(blocks, max_seq_length)`, the token ids.
        loss_masks: int64 `(blocks, max_seq_length)`: 1 for a token to learn, 0 for any other token and for padding. An
            entry belongs to the token in its own slot. If you shift the masks to get next-token labels, leave out the
            first token of each segment of `cu_seqlens`; otherwise a sequence is predicted from the one before it.
        cu_seqlens: int32 `(segments + 1,)` for each block: 0, the end of each sequence or piece, and `max_seq_length`
            if padding follows. With these boundaries attention stays inside sequences.
        num_truncated: sequences that were cut to `max_seq_length` tokens, even if they were dropped afterwards.
        num_dropped: examples that were left out because no response token was left, or because they had none.
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
    """Pack sequences into blocks, with masks of the tokens that are to be learned.

    A sequence that is longer than a block is first cut to the length of a block. An example without a response token
    after that is dropped. One warning says how many. Empty sequences are skipped. A token may have the id of padding.

    Args:
        sequences: each a list, tuple, numpy array or CPU tensor of token ids.
        max_seq_length: slots in a block.
        padding_token_id: stands in the slots after the last token of a block.
        split: split a sequence that does not fit into the rest of a block. Otherwise all of it goes to the next block.
        best_fit: put each sequence into the open block with the least room that holds it. Needs `split=False`.
        loss_masks: for each sequence one value per token: 1 or True if the token is to be learned, else 0 or False.
        response_spans: instead of `loss_masks`: for each sequence the `(start, end)` of its response, without the end,
            or a list of such pairs.

    Raises:
        TypeError: a sequence or mask is not a flat sequence of integers, a span is not a pair of them, or a number is
        not
            an int.
        ValueError: an id is negative, `max_seq_length` is below 1 or not below 2**31, a sequence has no mask or spans,
        the
            length of a mask differs from its sequence's, a mask holds values other than 0 and 1, a span lies outside
            its sequence, or options do not fit each other.
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
        to_learn = concatenate_loss_masks(_to_list_of("loss_masks", loss_masks, lengths), lengths)
    elif response_spans is not None:
        to_learn = _read_spans(_to_list_of("response_spans", response_spans, lengths), lengths, starts)
    is_taken = kept > 0
    if to_learn is not None:
        before = np.concatenate([[0], np.cumsum(to_learn, dtype=np.int64)])
        is_taken &= before[starts + kept] > before[starts]
    num_truncated = int(np.count_nonzero(lengths > max_seq_length))
    num_dropped = int(np.count_nonzero(lengths) - np.count_nonzero(is_taken))
    if num_truncated or num_dropped:
        log.warning(
            "of %d sequences %d were cut to %d tokens, and %d were dropped because they have no response token left",
            *(len(lengths), num_truncated, max_seq_length, num_dropped),
        )

    place = _split_over_boundaries if split else _best_fit if best_fit else _next_block
    documents, row_of = place(_table(starts[is_taken], kept[is_taken]), max_seq_length)
    layout = lay_out(documents, np.arange(len(documents)), row_of, max_seq_length)
    blocks, learned = (np.empty((len(layout.num_tokens), max_seq_length), np.int64) for _ in range(2))
    fill_rows(tokens, documents, layout.documents, layout.first, padding_token_id, blocks, learned)
    if to_learn is not None:
        fill_rows(to_learn, documents, layout.documents, layout.first, 0, learned, np.empty_like(learned))
    bounds = itertools.pairwise([0, *np.cumsum(layout.entries_per_row).tolist()])
    cu_seqlens = [layout.cu_seqlens[first:end] for first, end in bounds]
    return PackedBlocks(blocks, learned, cu_seqlens, num_truncated, num_dropped)


def pack_sequences(
    sequences: Iterable[Any], max_seq_length: int, padding_token_id: int = 0, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks and loss masks as lists: `([[1, 2, 3, 4], [5, 6, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]])`.

    Args:
        sequences: as for `pack_blocks`. The example above packs `[[1, 2], [3, 4, 5], [6]]`.
        max_seq_length: slots in a block, 4 in the example.
        padding_token_id: stands in the slots after the last token of a block.
        options: further options of `pack_blocks`.

    Raises:
        TypeError: as from `pack_blocks`.
        ValueError: as from `pack_blocks`.
    """
    packed = pack_blocks(sequences, max_seq_length, padding_token_id, **options)
    return packed.blocks.tolist(), packed.loss_masks.tolist()


def _table(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> DocumentTable:
    documents = np.zeros(len(starts), DOCUMENT)
    documents["start"], documents["length"] = starts, lengths
    return documents


def _split_over_boundaries(documents: DocumentTable, row_len: int) -> tuple[DocumentTable, NDArray[np.int64]]:
    """The pieces of the documents, and the row of each piece."""
    lengths = documents["length"]
    ends = np.cumsum(lengths)
    first_rows = (ends - lengths) // row_len
    # No document is longer than a row, so it has two pieces at most.
    heads = np.minimum(ends, (first_rows + 1) * row_len) - (ends - lengths)
    starts = np.stack([documents["start"], documents["start"] + heads], axis=1)
    lengths = np.stack([heads, lengths - heads], axis=1)
    rows = np.stack([first_rows, first_rows + 1], axis=1)
    return _table(starts[lengths > 0], lengths[lengths > 0]), rows[lengths > 0]


@compiled
def _next_block(documents: DocumentTable, row_len: int) -> tuple[DocumentTable, NDArray[np.int64]]:
    """The documents, and the row of each: the current row, or the next one if the document does not fit."""
    row_of = np.empty(len(documents), np.int64)
    row, room = -1, 0
    for index in range(len(documents)):
        length = documents[index].length
        if length > room:
            row, room = row + 1, row_len
        row_of[index] = row
        room -= length
    return documents, row_of


@compiled
def _best_fit(documents: DocumentTable, row_len: int) -> tuple[DocumentTable, NDArray[np.int64]]:
    """The documents, and the row of each by best fit. New rows are opened as needed.

    Rows with equal room stand in one queue. A binary tree over all rooms finds the least room that suffices: each node
    holds the largest room below it that some row has, or 0.
    """
    leaves = 1
    while leaves < row_len:
        leaves *= 2
    most = np.zeros(2 * leaves, np.int64)
    oldest, latest = np.empty(row_len, np.int64), np.empty(row_len, np.int64)
    next_in_queue = np.empty(len(documents), np.int64)
    row_of = np.empty(len(documents), np.int64)
    rows = 0
    for index in range(len(documents)):
        length = documents[index].length
        if most[1] < length:
            row, room = rows, row_len
            rows += 1
        else:
            at = 1
            while at < leaves:
                at = 2 * at if most[2 * at] >= length else 2 * at + 1
            room = at - leaves
            row = oldest[room]
            oldest[room] = next_in_queue[row]
            if row == latest[room]:
                _set_room(most, room, 0)
        row_of[index] = row
        room -= length
        if room > 0:
            if most[leaves + room] == 0:
                oldest[room] = row
                _set_room(most, room, room)
            else:
                next_in_queue[latest[room]] = row
            latest[room] = row
    return documents, row_of


@compiled
def _set_room(most: NDArray[np.int64], room: int, value: int) -> None:
    at = len(most) // 2 + room
    most[at] = value
    while at > 1:
        at //= 2
        most[at] = max(most[2 * at], most[2 * at + 1])


def _to_list(name: str, values: Iterable[Any]) -> list[Any]:
    """The values as a list, so that they can be read twice."""
    try:
        each = iter(values)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of sequences; got {one_line(values)}") from error
    return list(each)


def _to_list_of(name: str, values: Iterable[Any], lengths: NDArray[np.int64]) -> list[Any]:
    each = _to_list(name, values)
    if len(each) != len(lengths):
        raise ValueError(f"{name} must have one entry for each of {len(lengths)} sequences; got {len(each)}")
    return each


def _read_spans(all_spans: list[Any], lengths: NDArray[np.int64], starts: NDArray[np.int64]) -> LossMask:
    """A mask of all tokens: 1 for a token inside a span of its sequence."""
    pairs, counts = array.array("q"), array.array("q")
    for number, spans in enumerate(all_spans):
        try:
            is_single = len(spans) == 2 and (isinstance(spans[0], int) or getattr(spans[0], "ndim", 1) == 0)
            for first, end in (spans,) if is_single else spans:
                pairs.append(first)
                pairs.append(end)
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            raise TypeError(
                f"response_spans[{number}] must be one (start, end) or a list of them; got {one_line(spans)}"
            ) from error
        counts.append(len(pairs) // 2)
    firsts, ends = np.array(pairs).reshape(-1, 2).T
    of = np.repeat(np.arange(len(counts)), np.diff(counts, prepend=0))
    wrong = np.flatnonzero((firsts < 0) | (firsts > ends) | (ends > lengths[of]))
    if len(wrong):
        at = wrong[0]
        raise ValueError(
            f"response_spans[{of[at]}] must satisfy 0 <= start <= end <= {lengths[of[at]]}, the sequence's length; got "
            f"start={firsts[at]}, end={ends[at]}"
        )
    begun, ended = (np.bincount(starts[of] + at, minlength=lengths.sum() + 1) for at in (firsts, ends))
    to_learn: LossMask = (np.cumsum(begun - ended)[:-1] > 0).astype(np.uint8)
    return to_learn
