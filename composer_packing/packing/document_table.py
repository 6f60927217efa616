"""Documents as the packer stores them: one array of tokens, and a table that says where each document lies in it.

Documents `a` of 3 tokens and `b` of 2 tokens::

    tokens     11 12 13 21 22
    table      a: start 0, length 3, ...
               b: start 3, length 2, ...
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]] | NDArray[np.int64]
"""Token ids of many documents: uint16, uint32 or int64."""

LossMask = NDArray[np.uint8]
"""One entry per token: 1 for a token to learn, 0 for another. Empty if all tokens are to be learned."""

DocumentTable = NDArray[np.void]
"""A table of documents: an array of `DOCUMENT`."""

DOCUMENT = np.dtype(
    [
        ("start", np.int64),  # index of its first token in the token array
        ("length", np.int64),  # in tokens, at least 1
        ("number", np.int64),  # number that the source gave the document; pieces of a document share it
        ("position", np.int64),  # position of its first token in the whole document; above 0 for later pieces
        ("epoch", np.int64),  # epoch in which it was read
        ("serial", np.int64),  # how many documents and pieces were added before it
        ("batch", np.int64),  # how many batches had been packed when it was read
        ("next_token", np.int64),  # token that follows a piece and is to be predicted from it, or NO_TOKEN
    ]
)
"""What the packer knows of a document, or of a piece of a long document. The names are keys in checkpoints."""


class DocumentArrays(NamedTuple):
    """Documents: their tokens, their loss masks and their table.

    Attributes:
        tokens: `(slots,)`, tokens of all documents, and `BLOCK` more slots with any content.
        loss_mask: uint8 `(slots,)`, or empty.
        table: `DOCUMENT` `(documents,)`; an entry may be unused.
    """

    tokens: Tokens
    loss_mask: LossMask
    table: DocumentTable


BLOCK = 16
"""Tokens that a compiled loop reads at once, also beyond a document's end. So token arrays are longer by this."""

NO_TOKEN = -1
"""Stands for the next token of a document that has none."""

NO_ROW = -1
"""Stands for the row of a document that fits no row."""
