"""What is said at the end of an epoch, and when it must be an error."""

import logging
from dataclasses import dataclass

from composer_packing.packing.options import OverLong, Tail
from composer_packing.packing.token_account import TokenAccount

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochReport:
    """How an epoch ended on one rank.

    Attributes:
        epoch: its number.
        account: where the tokens that were read in it are.
        num_read: documents read.
        num_emitted: documents in batches.
        num_waiting: documents that still wait.
        num_added: documents ever added to the waiting buffer, over all epochs.
        rows: of the batch that would have come next.
        row_len: slots of a row.
    """

    epoch: int
    account: TokenAccount
    num_read: int
    num_emitted: int
    num_waiting: int
    num_added: int
    rows: int
    row_len: int

    def say(self, tail: Tail, over_long: OverLong, has_others: bool, is_read_once: bool) -> None:
        """Say what became of the documents that were not packed.

        Args:
            tail: what becomes of those that are left.
            over_long: what became of those that were too long.
            has_others: there are further ranks.
            is_read_once: the source cannot be read again.

        Raises:
            ValueError: nothing can come of going on.
        """
        epoch, account, carries = self.epoch, self.account, tail is Tail.CARRY
        too_long, untrained = account.over_long_documents, account.documents_without_targets
        if too_long:
            level = logging.INFO if over_long is OverLong.SPLIT else logging.WARNING
            what = "epoch %d: %d documents were longer than a row (%s): %d tokens cut off, %d dropped"
            log.log(level, what, epoch, too_long, over_long.value, account.truncated, account.dropped)
        if untrained:
            what = "epoch %d: %d documents (%d tokens) were dropped: nothing that a row holds of them is to be learned"
            often = epoch > 0 and not self.num_read  # there may be a thousand such epochs
            log.log(logging.DEBUG if often else logging.WARNING, what, epoch, untrained, account.without_targets)
        if (too_long or untrained) and self.num_added == 0 and (tail is Tail.DROP or not has_others):
            raise ValueError(
                f"epoch {epoch}: every document was dropped: {too_long} are longer than a row of {self.row_len}, "
                f"of {untrained} nothing in a row is to be learned; take longer rows, another over_long or other masks"
            )
        # A carried epoch may well be empty: there may be fewer documents than ranks.
        if account.read == 0 and epoch > 0 and (not carries or is_read_once):
            raise ValueError(f"epoch {epoch}: the source gave nothing; it must be readable more than once")
        if carries:
            log.info("epoch %d: %d documents are carried into the next", epoch, self.num_waiting)
        elif self.num_emitted == 0 and tail is Tail.DROP:
            raise ValueError(
                f"epoch {epoch}: the source gave {self.num_read} documents, too few to put one in each of "
                f"{self.rows} rows of {self.row_len} slots; lower the batch size or the row length"
            )
        elif self.num_waiting:
            what = "epoch %d: %d of %d documents were left over at the end, too few for another batch"
            log.warning(what, epoch, self.num_waiting, self.num_read)
