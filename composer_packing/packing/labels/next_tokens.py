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

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_TOKEN, DocumentTable, LossMask, Tokens


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
def write_next_tokens(
    tokens: Tokens,
    loss_mask: LossMask,
    documents: DocumentTable,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    ignore_index: int,
    labels: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Write the labels of rows that `packing.fill_rows` fills. Padding is no target.

    Args:
        tokens: all documents' tokens.
        loss_mask: theirs, or empty.
        documents: the table.
        placed: `Layout.documents`.
        first: `Layout.first`.
        ignore_index: label of what is no target.
        labels: int64 `(rows, row_len)`, written whole.

    Returns:
        int64 `(rows,)`, targets of each row.
    """
    num_targets = np.zeros(len(labels), np.int64)
    for row in range(len(labels)):
        of_row = labels[row]
        at = targets = 0
        for document in documents[placed[first[row] : first[row + 1]]]:
            start, end = document.start + 1, document.start + document.length
            last = at + document.length - 1
            if len(loss_mask) == 0:
                of_row[at:last] = tokens[start:end]
                targets += document.length - 1
            else:
                targets += _write_learned(tokens[start:end], loss_mask[start:end], ignore_index, of_row[at:last])
            has_next = document.next_token != NO_TOKEN
            of_row[last] = document.next_token if has_next else ignore_index
            targets += has_next
            at = last + 1
        of_row[at:] = ignore_index
        num_targets[row] = targets
    return num_targets
