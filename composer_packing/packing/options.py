"""Choices with a name: objective, packing strategy, and what becomes of long documents and of an epoch's tail."""

import enum


class Objective(str, enum.Enum):
    """What the label of a token is."""

    MLM = "mlm"
    """Masked language model: some tokens are hidden, and each of them is its own label."""
    CAUSAL = "causal"
    """The label of a token is the next token of its document."""
    SFT = "sft"
    """As `causal`, but only where the loss mask says that the next token is to be learned. A document in which nothing
    is to be learned is dropped."""


class PackingStrategy(str, enum.Enum):
    """How a document finds its row. A YAML file chooses its packer by this."""

    BEST_FIT = "best_fit"
    """The published strategy: greedy best fit, document by document. The packer is `GreedyBestFitSequencePacker`."""
    SUBSET_SUM = "subset_sum"
    """Each row is filled from many waiting documents at once. The packer is `SubsetSumSequencePacker`."""


class OverLong(str, enum.Enum):
    """What becomes of a document that is too long. Every choice but `error` counts such documents and logs them."""

    ERROR = "error"
    """Packing stops with an error that shows both lengths."""
    TRUNCATE = "truncate"
    """The first tokens are kept. The rest is not trained on."""
    SPLIT = "split"
    """The document comes in pieces. All but the last piece have the greatest length. No token is lost."""
    DROP = "drop"
    """The document is not trained on."""


class Tail(str, enum.Enum):
    """What becomes of the documents that are left at the end of an epoch, too few to put one into each row."""

    DROP = "drop"
    """They are not trained on in this epoch. A warning logs their number. The published packer does this."""
    CARRY = "carry"
    """They come first in the next epoch."""
    EMIT = "emit"
    """They come in batches with fewer rows, so that every document comes once per epoch."""
