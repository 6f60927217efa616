"""Choices: what is learned, how rows are filled, and what becomes of documents that are too long or too few for another
batch.
"""

import enum


class Objective(str, enum.Enum):
    """What a token's label is."""

    MLM = "mlm"
    """Masked language model: some tokens are hidden, and their labels are what they were."""
    CAUSAL = "causal"
    """The label of a token is the one that follows it in its document."""
    SFT = "sft"
    """The same, if the source's loss mask says that it is to be learned. Documents without any such are dropped."""


class PackingStrategy(str, enum.Enum):
    """How documents find their row: which packer a run from a YAML file has."""

    BEST_FIT = "best_fit"
    """Greedy best fit, document by document: `GreedyBestFitSequencePacker`. As published."""
    SUBSET_SUM = "subset_sum"
    """Rows are filled to the last slot from many waiting documents at once: `SubsetSumSequencePacker`."""


class OverLong(str, enum.Enum):
    """What becomes of a document that is longer than a row. All but the first are counted, and logged once an epoch."""

    ERROR = "error"
    """The packer stops with an error that shows both lengths."""
    TRUNCATE = "truncate"
    """Its first tokens fill a row; the rest is not trained on."""
    SPLIT = "split"
    """It comes in pieces, each a document of its own, all but the last as long as a row. No token is lost."""
    DROP = "drop"
    """It is not trained on at all."""


class Tail(str, enum.Enum):
    """What becomes of the documents that are left when an epoch's source ends and they cannot give every row one."""

    DROP = "drop"
    """They are not trained on in this epoch; their number is logged as a warning. As published."""
    CARRY = "carry"
    """They come first in the next epoch."""
    EMIT = "emit"
    """They come in batches of fewer rows, so that every document comes once."""
