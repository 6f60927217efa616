"""Compiled loops that copy documents: from a source batch into the waiting buffer, and from old into new arrays.

A call of compiled code is given plain arrays and tuples, and gives plain tuples. With a NamedTuple instead, each call
would take some microseconds longer. The functions around the compiled code add and take off the names.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_TOKEN, DocumentArrays, DocumentTable, LossMask, Tokens


class FreePart(NamedTuple):
    """The part of the waiting buffer's arrays that a source batch is copied to.

    Attributes:
        tokens: as many slots of the token array as the source batch has tokens.
        loss_mask: the same slots of the loss mask, or empty.
        table: the unused entries of the table: one for each document and one for each full row of tokens, at least.
    """

    tokens: Tokens
    loss_mask: LossMask
    table: DocumentTable


class Arrival(NamedTuple):
    """What the table says of the first document of a source batch.

    Attributes:
        token_index: index of its first token in the token array.
        table_index: index of its entry in the table.
        epoch: epoch in which it was read.
        batch: how many batches had been packed when it was read.
        serial: how many documents and pieces were added before it.
    """

    token_index: int
    table_index: int
    epoch: int
    batch: int
    serial: int


class Measured(NamedTuple):
    """Lengths and token ids that a source batch was found to have.

    Attributes:
        total: sum of the lengths.
        shortest: smallest length, or 0 if all lengths are positive: a negative length shows here.
        longest: largest length, or 0 if there is no document.
        smallest_id: smallest token id; 0 if lengths are wrong.
        largest_id: largest token id; 0 if lengths are wrong.
    """

    total: int
    shortest: int
    longest: int
    smallest_id: int
    largest_id: int


class Entered(NamedTuple):
    """What was entered into the table from a source batch, and what was left out.

    Attributes:
        documents: documents and pieces entered.
        tokens: tokens of the documents and pieces entered.
        shortest: length of the shortest document or piece entered.
        over_long: documents that were longer than `longest_document`.
        without_targets: documents left out because none of their kept tokens is to be learned.
        tokens_without_targets: tokens of the documents left out.
    """

    documents: int
    tokens: int
    shortest: int
    over_long: int
    without_targets: int
    tokens_without_targets: int


class Appended(NamedTuple):
    """Result of `append_documents`. Nothing counts before the caller has checked `measured`.

    Attributes:
        measured: lengths and token ids of the source batch.
        entered: what was entered into the table.
        order: int64 `(waiting,)`, the waiting order with the new documents at its end.
    """

    measured: Measured
    entered: Entered
    order: NDArray[np.int64]


def append_documents(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    loss_mask: LossMask,
    free: FreePart,
    order: NDArray[np.int64],
    first: Arrival,
    longest_document: int,
    kept_of_over_long: int,
) -> Appended:
    """Copy a source batch into the waiting buffer, unless its lengths do not fit its tokens.

    Args:
        tokens: tokens of the source batch.
        lengths: int64 `(documents,)`, lengths of its documents.
        numbers: int64 `(documents,)`, numbers of its documents.
        loss_mask: loss mask of its tokens, or empty. With a loss mask, documents without a token to learn are left out.
        free: where to copy to.
        order: int64 `(waiting,)`, the waiting order so far.
        first: what the table says of the first document.
        longest_document: tokens of the longest document or piece that may be entered.
        kept_of_over_long: how many tokens are kept of a document that is longer; they are cut into pieces.
    """
    measured, entered, longer_order = _append_documents(
        tokens,
        lengths,
        numbers,
        loss_mask,
        free.tokens,
        free.loss_mask,
        free.table,
        order,
        tuple(first),
        longest_document,
        kept_of_over_long,
    )
    return Appended(Measured(*measured), Entered(*entered), longer_order)


@compiled
def _append_documents(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    loss_mask: LossMask,
    to: Tokens,
    loss_mask_to: LossMask,
    table: DocumentTable,
    order: NDArray[np.int64],
    first: tuple[int, ...],
    longest_document: int,
    kept_of_over_long: int,
) -> tuple[tuple[Any, ...], tuple[int, ...], NDArray[np.int64]]:
    """Give the fields of `Measured` and `Entered`, and the waiting order."""
    total = shortest = longest = 0
    for length in lengths:
        total += length
        shortest = min(shortest, length)
        longest = max(longest, length)
    smallest_id = largest_id = np.int64(0)
    arrival = Arrival(*first)
    entered: tuple[int, ...] = (0, 0, longest_document, 0, 0, 0)
    # The bound on the longest document makes sure that the sum has not wrapped around.
    if shortest == 0 and longest <= len(tokens) and total == len(tokens):
        smallest_id, largest_id = _copy_and_measure(tokens, to)
        copy_tokens(loss_mask, loss_mask_to)
        entered = _enter(tokens, lengths, numbers, loss_mask, table, arrival, longest_document, kept_of_over_long)
    num_entered = entered[0]
    longer_order = np.concatenate((order, np.arange(arrival.table_index, arrival.table_index + num_entered)))
    return (total, shortest, longest, smallest_id, largest_id), entered, longer_order


@compiled
def _copy_and_measure(tokens: NDArray[np.integer[Any]], to: Tokens) -> tuple[Any, Any]:
    """Copy tokens to an array of the same length, and give the smallest and the largest id."""
    smallest = largest = np.int64(0)
    if len(tokens):
        smallest = largest = np.int64(tokens[0])
    # One loop over the tokens instead of three.
    for i in range(len(to)):
        token = np.int64(tokens[i])
        smallest = min(smallest, token)
        largest = max(largest, token)
        to[i] = tokens[i]
    return smallest, largest


@compiled
def _enter(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    loss_mask: LossMask,
    table: DocumentTable,
    first: Arrival,
    longest_document: int,
    kept_of_over_long: int,
) -> tuple[int, ...]:
    """Enter the documents of a source batch into the table, long ones in pieces, and give the fields of `Entered`."""
    documents = kept = over_long = without_targets = tokens_without_targets = 0
    shortest = longest_document
    at = 0
    for i in range(len(lengths)):
        end = lengths[i]
        if end > longest_document:
            over_long += 1
            end = min(end, kept_of_over_long)
        # Nothing comes before the first token of a document, so it is never a target.
        if end > 0 and len(loss_mask) > 0 and not loss_mask[at + 1 : at + end].any():
            without_targets += 1
            tokens_without_targets += lengths[i]
            end = 0
        position = 0
        while position < end:
            document = table[documents]
            document.start = first.token_index + at + position
            document.length = min(end - position, longest_document)
            document.number = numbers[i]
            document.position = position
            document.epoch = first.epoch
            document.batch = first.batch
            document.serial = first.serial + documents
            shortest = min(shortest, document.length)
            position += document.length
            has_next = position < end and (len(loss_mask) == 0 or loss_mask[at + position] != 0)
            document.next_token = np.int64(tokens[at + position]) if has_next else NO_TOKEN
            documents += 1
        kept += end
        at += lengths[i]
    return documents, kept, shortest, over_long, without_targets, tokens_without_targets


def copy_documents(documents: DocumentArrays, order: NDArray[np.int64], to: DocumentArrays) -> None:
    """Copy documents to the start of other arrays, one after another.

    Args:
        documents: where to copy from.
        order: int64 `(documents,)`, indices into the table, in the order to copy.
        to: where to copy to; large enough.
    """
    _copy_documents(documents.tokens, documents.loss_mask, documents.table, order, to.tokens, to.loss_mask, to.table)


@compiled
def copy_tokens(tokens: NDArray[np.integer[Any]], to: NDArray[np.integer[Any]]) -> None:
    """Copy to an array of the same length. This loop was measured to be 20 to 40 times as fast as `to[:] = tokens`."""
    for i in range(len(to)):
        to[i] = tokens[i]


@compiled
def _copy_documents(
    tokens: Tokens,
    loss_mask: LossMask,
    table: DocumentTable,
    order: NDArray[np.int64],
    tokens_to: Tokens,
    loss_mask_to: LossMask,
    table_to: DocumentTable,
) -> None:
    end = 0
    for i in range(len(order)):
        start, length = table[order[i]].start, table[order[i]].length
        copy_tokens(tokens[start : start + length], tokens_to[end : end + length])
        copy_tokens(loss_mask[start : start + length], loss_mask_to[end : end + length])
        table_to[i] = table[order[i]]
        table_to[i].start = end
        end += length
