"""Next-token labels: what each token of a document predicts, for causal training and for fine-tuning on responses.

The label of a token is the next token of its document. So the model must not shift labels again. The last token of a
document has no label, and no label comes from another document. If there is a loss mask, a label is kept only if the
labelled token is to be learned. Documents `a b c` and `d e f g`, without a loss mask and with one::

    input_ids   a  b  c  d  e  f  g  .        input_ids   a  b  c  d  e  f  g  .
                                              loss mask   0  1  1  0  0  1  1
    labels      b  c  -  e  f  g  -  -        labels      b  c  -  -  f  g  -  -

If a long document is split, the last token of a piece predicts the first token of the next piece.
"""

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_TOKEN, DocumentTable, LossMask, Tokens


@compiled
def _write_tokens_to_learn(tokens: Tokens, loss_mask: LossMask, ignore_index: int, labels: NDArray[np.int64]) -> int:
    """Copy the tokens to learn to `labels`. Returns their number. All arrays have the same length."""
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
    """Write the labels of rows that `layout.fill_rows` fills. Padding is never a target.

    Args:
        tokens: the tokens of all documents.
        loss_mask: the loss mask of these tokens, or empty.
        documents: the table.
        placed: `Layout.documents`.
        first: `Layout.first`.
        ignore_index: label of a slot that is not a target.
        labels: int64 `(rows, row_len)`, all of it is written.

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
                targets += _write_tokens_to_learn(
                    tokens[start:end], loss_mask[start:end], ignore_index, of_row[at:last]
                )
            has_next = document.next_token != NO_TOKEN
            of_row[last] = document.next_token if has_next else ignore_index
            targets += has_next
            at = last + 1
        of_row[at:] = ignore_index
        num_targets[row] = targets
    return num_targets
