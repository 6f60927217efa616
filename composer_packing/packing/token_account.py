"""An account of all tokens: how many were read, and what became of them."""

from dataclasses import dataclass


@dataclass
class TokenAccount:
    """What became of the tokens of all documents that were read. `read` is the sum of the other token counts.

    Attributes:
        read: tokens read.
        waiting: tokens of documents that wait for a row.
        emitted: tokens in batches.
        truncated: tokens cut off documents that were too long.
        dropped: tokens of documents that were dropped because they were too long.
        left_over: tokens of documents that still waited when an epoch ended, if its tail is not carried.
        without_targets: tokens of documents that were dropped because nothing in them is to be learned.
        over_long_documents: number of documents that were too long.
        documents_without_targets: number of documents that were dropped because nothing in them is to be learned.
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
        """Sum of all token counts but `read`. The two are equal, unless a thread is just packing."""
        return self.waiting + self.emitted + self.truncated + self.dropped + self.left_over + self.without_targets

    def since(self, before: "TokenAccount") -> "TokenAccount":
        """The difference between this account and an earlier one."""
        return TokenAccount(**{name: number - getattr(before, name) for name, number in vars(self).items()})
