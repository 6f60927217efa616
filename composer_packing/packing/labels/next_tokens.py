"""Next-token labels: what each token of a document predicts, for causal training and fine-tuning on responses.

The label of a token is the token that follows it in its document, so a model must not shift the labels again. The last
token of a document has no label: no token predicts a token of another document. With a loss mask, a label is kept if
its token is to be learned. Documents `a b c` and `d e f g`, without and with a loss mask::

    input_ids   a  b  c  d  e  f  g  .        input_ids   a  b  c  d  e  f  g  .
                                              loss mask   0  1  1  0  0  1  1
    labels      b  c  -  e  f  g  -  -        labels      b  c  -  -  f  g  -  -

The last token of a piece predicts the first token of the next piece of the same document.
"""

import numpy as np
from numpy.typing import NDArray

from composer_packing.common.jit import compiled
from composer_packing.packing.document_table import NO_TOKEN, DocumentArrays, DocumentTable, LossMask, Tokens
from composer_packing.packing.ingest import copy_tokens
from composer_packing.packing.layout import Layout


def write_next_tokens(
    documents: DocumentArrays, layout: Layout, ignore_index: int, labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Write the labels of the rows that `fill_rows` fills. Padding is never a target.

    Args:
        documents: the documents.
        layout: which document lies in which row.
        ignore_index: label of a slot that is not a target.
        labels: int64 `(rows, row_len)`, written whole.

    Returns:
        int64 `(rows,)`: targets of each row.
    """
    return _write_next_tokens(*documents, layout.documents, layout.first, ignore_index, labels)


@compiled
def _write_next_tokens(
    tokens: Tokens,
    loss_mask: LossMask,
    table: DocumentTable,
    placed: NDArray[np.int64],
    first: NDArray[np.int64],
    ignore_index: int,
    labels: NDArray[np.int64],
) -> NDArray[np.int64]:
    num_targets = np.zeros(len(labels), np.int64)
    for row in range(len(labels)):
        row_labels = labels[row]
        at = targets = 0
        for document in table[placed[first[row] : first[row + 1]]]:
            start, end = document.start + 1, document.start + document.length
            last = at + document.length - 1
            if len(loss_mask) == 0:
                copy_tokens(tokens[start:end], row_labels[at:last])
                targets += document.length - 1
            else:
                targets += _write_targets(tokens[start:end], loss_mask[start:end], ignore_index, row_labels[at:last])
            has_next = document.next_token != NO_TOKEN
            row_labels[last] = document.next_token if has_next else ignore_index
            targets += has_next
            at = last + 1
        row_labels[at:] = ignore_index
        num_targets[row] = targets
    return num_targets


@compiled
def _write_targets(tokens: Tokens, loss_mask: LossMask, ignore_index: int, labels: NDArray[np.int64]) -> int:
    """Write the tokens to learn as labels, and give their number. All arrays have the same length."""
    count = 0
    for i in range(len(labels)):
        is_target = loss_mask[i] != 0
        labels[i] = np.int64(tokens[i]) if is_target else ignore_index
        count += is_target
    return count
