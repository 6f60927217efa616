"""Documents as packing sees them: one array with all tokens, and a table that says where each document lies in the
array.

Three documents of 3, 1 and 2 tokens::

    tokens   11 12 13 21 31 32
    table    start 0, length 3 | start 3, length 1 | start 4, length 2
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]] | NDArray[np.int64]
"""Token ids of many documents: uint16, uint32 or int64."""

LossMask = NDArray[np.uint8]
"""One entry for each of these tokens: 1 if the token is to be learned, else 0. Empty if all are to be learned."""

DocumentTable = NDArray[np.void]
"""A table of documents: an array of `DOCUMENT`."""

DOCUMENT = np.dtype(
    [
        ("start", np.int64),  # index of its first token in the token array
        ("length", np.int64),  # in tokens, at least 1
        ("number", np.int64),  # the source's number for the document
        ("position", np.int64),  # position of its first token in the whole document; above 0 for a later piece
        ("epoch", np.int64),  # in which it was read
        ("serial", np.int64),  # documents and pieces that were read before it, over all epochs
        ("batch", np.int64),  # batches that were packed before it was read
        ("next_token", np.int64),  # token that follows a piece and is to be predicted, or NO_TOKEN
    ]
)
"""What packing knows of a document, or of a piece of a long document. The names are keys in checkpoints."""

BLOCK = 16
"""Tokens that compiled code may read at once. A token array has this many extra slots at its end, with any values."""

NO_TOKEN = -1
"""Stands for a token where there is none."""

NO_ROW = -1
"""Stands for the row of a document that fits no row."""
