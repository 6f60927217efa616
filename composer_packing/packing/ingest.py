"""Copying documents into the waiting buffer's arrays, and from full arrays to new ones. Each is one compiled call."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_TOKEN, DocumentTable, LossMask, Tokens


class Appended(NamedTuple):
    """What a source batch was found to hold. The caller must check the first five counts before it uses the rest.

    Attributes:
        total: sum of the lengths.
        least: smallest length, or 0 if all are above 0.
        longest: greatest length, or 0 if all are below 0.
        smallest: smallest token id.
        largest: largest token id.
        documents: documents and pieces written to the table.
        kept: their tokens.
        shortest: length of the shortest of them.
        over_long: documents that were longer than allowed.
        without_targets: documents left out because nothing in their kept tokens is to be learned.
        tokens_without_targets: tokens of the documents left out.
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


@compiled
def append_documents(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.int64],
    numbers: NDArray[np.int64],
    loss_mask: LossMask,
    tokens_to: Tokens,
    loss_mask_to: LossMask,
    documents: DocumentTable,
    start: int,
    max_document_len: int,
    kept_of_over_long: int,
) -> tuple[Any, ...]:
    """Copy the tokens of a source batch and write a table entry for each document or piece.

    Nothing is copied if the lengths do not add up to the tokens. If there is a loss mask, a document in which nothing
    is to be learned gets no entry. The first token of a document is never learned, as no token comes before it.

    Args:
        tokens: `(tokens,)`, of the source batch.
        lengths: int64 `(documents,)`, tokens of each document.
        numbers: int64 `(documents,)`, the source's number for each document.
        loss_mask: `(tokens,)`, of the source batch, or empty.
        tokens_to: `(tokens,)`, the free slots of the token array that get the tokens.
        loss_mask_to: the same slots of the loss mask, or empty.
        documents: the free entries of the table: at least one for each document and one for each `max_document_len`
            tokens. Their `epoch`, `batch` and `serial` are left to the caller.
        start: index of `tokens_to` in the token array.
        max_document_len: greatest length of a document or piece.
        kept_of_over_long: tokens that are kept of a longer document: `max_document_len` to truncate it, 0 to drop it,
            or so many that it comes in pieces.

    Returns:
        The fields of `Appended`.
    """
    total = least = longest = added = kept = num_over_long = without_targets = tokens_without_targets = 0
    smallest = largest = np.int64(0)
    shortest = max_document_len
    for length in lengths:
        total += length
        least = min(least, length)
        longest = max(longest, length)
    # With these three conditions no sum has overflowed.
    if least == 0 and longest <= len(tokens) and total == len(tokens):
        smallest, largest = _copy(tokens, tokens_to)
        _copy(loss_mask, loss_mask_to)
        begin = 0
        for i in range(len(lengths)):
            end = lengths[i]
            if end > max_document_len:
                num_over_long += 1
                end = min(end, kept_of_over_long)
            if end > 0 and len(loss_mask) > 0 and not loss_mask[begin + 1 : begin + end].any():
                without_targets += 1
                tokens_without_targets += lengths[i]
                end = 0
            position = 0
            while position < end:
                document = documents[added]
                document.start = start + begin + position
                document.length = min(end - position, max_document_len)
                document.number = numbers[i]
                document.position = position
                shortest = min(shortest, document.length)
                position += document.length
                has_next = position < end and (len(loss_mask) == 0 or loss_mask[begin + position] != 0)
                document.next_token = np.int64(tokens[begin + position]) if has_next else NO_TOKEN
                added += 1
            kept += end
            begin += lengths[i]
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
    )


@compiled
def _copy(tokens: NDArray[np.integer[Any]], tokens_to: Tokens) -> tuple[np.int64, np.int64]:
    """Copy to an array of the same length. Returns the smallest and the largest value."""
    smallest = largest = np.int64(0)
    if len(tokens):
        smallest = largest = np.int64(tokens[0])
    for i in range(len(tokens_to)):
        token = np.int64(tokens[i])
        smallest = min(smallest, token)
        largest = max(largest, token)
        tokens_to[i] = tokens[i]
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
    """Copy documents to the front of other arrays, without gaps.

    Args:
        tokens: the token array.
        loss_mask: its loss mask, or empty.
        documents: the table.
        order: int64 `(documents,)`, indices of the documents in the table, in the order to copy them.
        tokens_to: gets the tokens.
        loss_mask_to: gets the loss masks, or is empty.
        documents_to: gets the table entries, with their new `start`.
    """
    end = 0
    for i in range(len(order)):
        start, length = documents[order[i]].start, documents[order[i]].length
        _copy(tokens[start : start + length], tokens_to[end : end + length])
        _copy(loss_mask[start : start + length], loss_mask_to[end : end + length])
        documents_to[i] = documents[order[i]]
        documents_to[i].start = end
        end += length
