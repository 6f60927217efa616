"""Where every token is that has been read."""

from dataclasses import dataclass


@dataclass
class TokenAccount:
    """Where the tokens of all documents read so far are: `read` is the sum of all others.

    Attributes:
        read: tokens read.
        waiting: in documents that wait for a row.
        emitted: in batches.
        truncated: cut off documents that were longer than a row.
        dropped: in documents that were dropped as longer than a row.
        left_over: in documents that still waited when an epoch ended whose tail is not carried.
        without_targets: in examples that were dropped as nothing that a row holds of them is to be learned.
        over_long_documents: not tokens, but documents that were longer than a row.
        documents_without_targets: not tokens, but the examples that were dropped.
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
        """The sum of all places of tokens: `read`, of an account that adds up."""
        return self.waiting + self.emitted + self.truncated + self.dropped + self.left_over + self.without_targets

    def since(self, before: "TokenAccount") -> "TokenAccount":
        """The difference to an earlier account."""
        return TokenAccount(**{name: number - getattr(before, name) for name, number in vars(self).items()})
