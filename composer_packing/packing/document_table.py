"""Documents as packing sees them: a token array, and a table that says where in it each of them lies."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]] | NDArray[np.int64]
"""Token ids of many documents: uint16, uint32 or int64."""

LossMask = NDArray[np.uint8]
"""One entry for each of these tokens, 1 where it is to be learned and 0 elsewhere; or empty, where all are."""

DocumentTable = NDArray[np.void]
"""A table of documents: an array of `DOCUMENT`."""

DOCUMENT = np.dtype(
    [
        ("start", np.int64),  # where it begins in the token array
        ("length", np.int64),  # in tokens, at least 1
        ("number", np.int64),  # what the source calls it
        ("position", np.int64),  # of its first token, where it is a piece of a longer document
        ("epoch", np.int64),  # in which it was read
        ("serial", np.int64),  # documents and pieces that were taken up before it
        ("batch", np.int64),  # batches packed before it was read
        ("next_token", np.int64),  # what follows a piece in its document and is to be predicted, or NO_TOKEN
    ]
)
"""What packing knows of a document."""

BLOCK = 16
"""Tokens that may be read at once: a token array has as many more behind its last document, whatever they are."""

NO_TOKEN = -1
"""What stands for a token where there is none."""

NO_ROW = -1
"""What stands for a row where a document fits none."""
