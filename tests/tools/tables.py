"""Tables of documents, from their lengths."""

import numpy as np

from composer_packing.packing.document_table import DOCUMENT, DocumentTable


def table(lengths: list[int]) -> DocumentTable:
    """A table of documents of these lengths, one after another."""
    documents = np.zeros(len(lengths), DOCUMENT)
    documents["length"] = lengths
    documents["start"] = np.cumsum(lengths) - lengths
    documents["serial"] = np.arange(len(lengths))
    return documents
