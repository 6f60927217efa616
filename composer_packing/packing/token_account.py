"""The token account: where every token is that has been read."""

from dataclasses import dataclass


@dataclass
class TokenAccount:
    """Where the tokens of all documents read so far are.

    Every token that was read is counted in one of the other token counts: `read` is their sum.

    Attributes:
        read: tokens that were read.
        waiting: tokens of documents that wait for a row.
        emitted: tokens in batches.
        truncated: tokens cut off documents that were longer than a row.
        dropped: tokens of documents that were dropped because they were longer than a row.
        left_over: tokens of documents that still waited at the end of an epoch and were not carried into the next.
        without_targets: tokens of documents that were dropped because a row would hold none of their tokens to learn.
        over_long_documents: number of documents that were longer than a row.
        documents_without_targets: number of documents that `without_targets` counts the tokens of.
    """

    read: int = 0
    waiting: int = 0
    emitted: int = 0
    truncated: int = 0
    dropped: int = 0
    left_over: int = 0
    without_targets: int = 0
    over_long_documents: int = 0
    documents_without_targets: int = 0

    @property
    def placed(self) -> int:
        """Sum of the counts that say where a token is. It equals `read` if the account adds up."""
        return self.waiting + self.emitted + self.truncated + self.dropped + self.left_over + self.without_targets

    def since(self, before: "TokenAccount") -> "TokenAccount":
        """What was counted since an earlier account."""
        return TokenAccount(**{name: number - getattr(before, name) for name, number in vars(self).items()})
