"""Choices: what is learned, how rows are filled, and what happens to documents that do not fit."""

import enum


class Objective(str, enum.Enum):
    """What the label of a token is."""

    MLM = "mlm"
    """Masked language model: some tokens are hidden, and the label of a hidden token is the token itself."""
    CAUSAL = "causal"
    """The label of a token is the token that follows it in its document."""
    SFT = "sft"
    """As `CAUSAL`, for tokens that the loss mask of the source marks. Documents without a marked token are dropped."""


class PackingStrategy(str, enum.Enum):
    """How documents find their row. A YAML file names the strategy; in Python, each strategy is a packer class."""

    BEST_FIT = "best_fit"
    """Greedy best fit, one document after another: `GreedyBestFitSequencePacker`. This is the published strategy."""
    SUBSET_SUM = "subset_sum"
    """Rows are filled to the last slot from many waiting documents at once: `SubsetSumSequencePacker`."""


class OverLong(str, enum.Enum):
    """What happens to a document that is longer than a row. Every policy but `ERROR` is logged once per epoch."""

    ERROR = "error"
    """The packer raises an error that shows the length of the document and of a row."""
    TRUNCATE = "truncate"
    """Only its first tokens, as many as fill a row, are trained on."""
    SPLIT = "split"
    """It is cut into pieces. Each piece but the last is as long as a row, and each is packed like a document."""
    DROP = "drop"
    """It is not trained on."""


class Tail(str, enum.Enum):
    """What happens to the documents that still wait when an epoch ends, because they cannot give every row one."""

    DROP = "drop"
    """They are not trained on in this epoch, and a warning gives their number. This is the published behaviour."""
    CARRY = "carry"
    """They come first in the next epoch."""
    EMIT = "emit"
    """They come in batches with fewer rows, so every document comes once per epoch."""
