"""Next-token labels: what each token of a document predicts, for causal training and fine-tuning on responses.

The label of a token is the token that follows it in its document, so that a model must not shift again. The last
one of a document has no label, and none comes from another document. Where there is a loss mask, a label is kept if
the token it names is to be learned. Documents `a b c` and `d e f g` without one, and with one::

    input_ids   a  b  c  d  e  f  g  .        input_ids   a  b  c  d  e  f  g  .
                                              loss mask   0  1  1  0  0  1  1
    labels      b  c  -  e  f  g  -  -        labels      b  c  -  -  f  g  -  -

A piece of a longer document predicts with its last token what follows in the next piece.
"""

import numpy as np
from numpy.typing import NDArray

from composer_packing.compiling import compiled
from composer_packing.documents import NO_TOKEN, Documents, LossMask, Tokens


@compiled
def _write_learned(tokens: Tokens, loss_mask: LossMask, ignore_index: int, labels: NDArray[np.int64]) -> int:
    """Copy those tokens to `labels` that are to be learned, and give their number; all arrays are equally long."""
    count = 0
    for i in range(len(labels)):
        is_target = loss_mask[i] != 0
        labels[i] = np.int64(tokens[i]) if is_target else ignore_index
        count += is_target
    return count


@compiled
def fill_with_next_tokens(
    tokens: Tokens,
    loss_mask: LossMask,
    documents: Documents,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    pad_token_id: int,
    ignore_index: int,
    input_ids: NDArray[np.int64],
    labels: NDArray[np.int64],
    attention_mask: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Write the documents of each row end to end with their labels, and pad the rest. Padding is no target.

    Args:
        tokens: all documents' tokens.
        loss_mask: of all documents' tokens, or empty.
        documents: the table.
        placed: `Layout.documents`.
        first: `Layout.first`.
        pad_token_id: what stands in the slots no document holds.
        ignore_index: label of what is no target.
        input_ids: int64 `(rows, row_len)`, written whole.
        labels: the same.
        attention_mask: the same: 1 where a document's token lies.

    Returns:
        int64 `(rows,)`, targets of each row.
    """
    num_targets = np.zeros(len(input_ids), np.int64)
    for row in range(len(input_ids)):
        ids, of_row = input_ids[row], labels[row]
        at = targets = 0
        for document in documents[placed[first[row] : first[row + 1]]]:
            start, end = document.start, document.start + document.length
            last = at + document.length - 1
            ids[at : last + 1] = tokens[start:end]
            if len(loss_mask) == 0:
                of_row[at:last] = tokens[start + 1 : end]
                targets += document.length - 1
            else:
                targets += _write_learned(
                    tokens[start + 1 : end], loss_mask[start + 1 : end], ignore_index, of_row[at:last]
                )
            has_next = document.next_token != NO_TOKEN
            of_row[last] = document.next_token if has_next else ignore_index
            targets += has_next
            at = last + 1
        ids[at:] = pad_token_id
        of_row[at:] = ignore_index
        attention_mask[row, :at] = 1
        attention_mask[row, at:] = 0
        num_targets[row] = targets
    return num_targets
