"""Moving documents: new ones behind those that wait, and those that wait to other arrays, each in one compiled call."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_TOKEN, DocumentTable, LossMask, Tokens


class Appended(NamedTuple):
    """What a source batch was found to hold; nothing of it counts before that has been checked.

    Attributes:
        total: sum of its lengths.
        least: the smallest of them, at most 0.
        longest: the largest of them, at least 0.
        smallest: its smallest token id.
        largest: its largest token id.
        documents: documents and pieces entered.
        kept: their tokens.
        shortest: the shortest of them.
        over_long: documents that were longer than a row.
        without_targets: documents left out because nothing of what would be kept of them is to be learned.
        tokens_without_targets: tokens of those.
        order: the waiting order with the new documents behind.
    """

    total: int
    least: int
    longest: int
    smallest: int
    largest: int
    documents: int
    kept: int
    shortest: int
    over_long: int
    without_targets: int
    tokens_without_targets: int
    order: NDArray[np.int64]


@compiled
def append_documents(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    loss_mask: LossMask,
    to: Tokens,
    loss_mask_to: LossMask,
    documents: DocumentTable,
    order: NDArray[np.int64],
    first: tuple[int, int, int, int, int],
    row_len: int,
    kept_of_over_long: int,
) -> tuple[Any, ...]:
    """Copy tokens to `to` and enter documents in the table, unless the lengths are wrong.

    Documents of which nothing is to be learned are left out of the table, where there is a loss mask.

    Args:
        tokens: of the source batch.
        lengths: int64 `(documents,)`, of its documents.
        numbers: int64 `(documents,)`, theirs.
        loss_mask: of the source batch's tokens, or empty.
        to: as many slots of the token array as there are tokens.
        loss_mask_to: the same slots of its loss mask, or empty.
        documents: the free part of the table: room for each document and each full row of tokens.
        order: int64 `(waiting,)`, the waiting order so far.
        first: what the first document gets: its place among all tokens and in the table, epoch, batch and serial.
        row_len: tokens that a document has at most.
        kept_of_over_long: how many tokens of a longer one are entered; more than a row's are in pieces.

    Returns:
        The fields of `Entered`.
    """
    start, place, epoch, batch, serial = first
    total = least = longest = added = kept = num_over_long = without_targets = tokens_without_targets = 0
    smallest = largest = np.int64(0)
    shortest = row_len
    for length in lengths:
        total += length
        least = min(least, length)
        longest = max(longest, length)
    if least == 0 and longest <= len(tokens) and total == len(tokens):  # so that no sum has wrapped
        smallest, largest = _copy(tokens, to)
        _copy(loss_mask, loss_mask_to)
        at = 0
        for i in range(len(lengths)):
            end = lengths[i]
            if end > row_len:
                num_over_long += 1
                end = min(end, kept_of_over_long)
            if end > 0 and len(loss_mask) > 0 and not loss_mask[at + 1 : at + end].any():
                without_targets += 1
                tokens_without_targets += lengths[i]
                end = 0
            position = 0
            while position < end:
                document = documents[added]
                document.start = start + at + position
                document.length = min(end - position, row_len)
                document.number = numbers[i]
                document.position = position
                document.epoch = epoch
                document.batch = batch
                document.serial = serial + added
                shortest = min(shortest, document.length)
                position += document.length
                goes_on = position < end and (len(loss_mask) == 0 or loss_mask[at + position] != 0)
                document.next_token = np.int64(tokens[at + position]) if goes_on else NO_TOKEN
                added += 1
            kept += end
            at += lengths[i]
    longer = np.empty(len(order) + added, np.int64)
    longer[: len(order)] = order
    for i in range(added):
        longer[len(order) + i] = place + i
    return (
        total,
        least,
        longest,
        smallest,
        largest,
        added,
        kept,
        shortest,
        num_over_long,
        without_targets,
        tokens_without_targets,
        longer,
    )


@compiled
def _copy(tokens: NDArray[np.integer[Any]], to: Tokens) -> tuple[np.int64, np.int64]:
    """Copy to an array of the same length; give the smallest and the largest."""
    smallest = largest = np.int64(0)
    if len(tokens):
        smallest = largest = np.int64(tokens[0])
    for i in range(len(to)):
        token = np.int64(tokens[i])
        smallest = min(smallest, token)
        largest = max(largest, token)
        to[i] = tokens[i]
    return smallest, largest


@compiled
def compact(
    tokens: Tokens,
    loss_mask: LossMask,
    documents: DocumentTable,
    order: NDArray[np.int64],
    tokens_to: Tokens,
    loss_mask_to: LossMask,
    documents_to: DocumentTable,
) -> None:
    """Copy documents to other arrays, one behind the other.

    Args:
        tokens: the token array.
        loss_mask: its loss mask, or empty.
        documents: the table.
        order: int64 `(documents,)`, places in it.
        tokens_to: gets their tokens, from its start on.
        loss_mask_to: gets their loss masks, or is empty.
        documents_to: gets their entries, from its start on.
    """
    end = 0
    for i in range(len(order)):
        start, length = documents[order[i]].start, documents[order[i]].length
        _copy(tokens[start : start + length], tokens_to[end : end + length])
        _copy(loss_mask[start : start + length], loss_mask_to[end : end + length])
        documents_to[i] = documents[order[i]]
        documents_to[i].start = end
        end += length
