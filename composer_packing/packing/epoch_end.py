"""The end of an epoch: what is logged of the documents that were not packed, and when training cannot continue."""

import logging
from dataclasses import dataclass

from composer_packing.packing.options import OverLong, Tail
from composer_packing.packing.settings import Policies
from composer_packing.packing.token_account import TokenAccount

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochEnd:
    """How an epoch ended on one rank.

    Attributes:
        epoch: number of the epoch.
        account: what became of the tokens that were read in it.
        num_read: documents read.
        num_emitted: documents in batches.
        num_waiting: documents that still wait.
        num_added: documents ever added to the waiting buffer, over all epochs.
        rows: rows of the batch that would have come next.
        row_len: slots in a row.
    """

    epoch: int
    account: TokenAccount
    num_read: int
    num_emitted: int
    num_waiting: int
    num_added: int
    rows: int
    row_len: int


def log_and_check_epoch(end: EpochEnd, policies: Policies, has_other_ranks: bool, is_read_once: bool) -> None:
    """Log what became of the documents that were not packed, and raise if a further epoch cannot give a batch either.

    Args:
        end: how the epoch ended.
        policies: what becomes of long documents and of the tail.
        has_other_ranks: whether other ranks train too. They may have documents when this rank has none.
        is_read_once: whether the source can be read only once.

    Raises:
        ValueError: every document was dropped, the source gave nothing, or the documents are too few for one batch.
    """
    epoch, account = end.epoch, end.account
    carries = policies.tail is Tail.CARRY
    too_long, untrained = account.over_long_documents, account.documents_without_targets
    if too_long:
        level = logging.INFO if policies.over_long is OverLong.SPLIT else logging.WARNING
        what = "epoch %d: %d documents were too long (over_long=%s): %d tokens cut off, %d tokens dropped"
        log.log(level, what, epoch, too_long, policies.over_long.value, account.truncated, account.dropped)
    if untrained:
        what = "epoch %d: %d documents (%d tokens) were dropped: nothing in their kept tokens is to be learned"
        repeats = epoch > 0 and not end.num_read  # a thousand such epochs may follow one another
        log.log(logging.DEBUG if repeats else logging.WARNING, what, epoch, untrained, account.without_targets)
    if (too_long or untrained) and end.num_added == 0 and not (carries and has_other_ranks):
        raise ValueError(
            f"epoch {epoch}: every document was dropped: {too_long} are longer than a row of {end.row_len} slots, in "
            f"{untrained} nothing is to be learned; give longer rows, another over_long policy or other loss masks"
        )
    # An epoch may be empty if documents are carried: there may be fewer documents than ranks.
    if account.read == 0 and epoch > 0 and (not carries or is_read_once):
        raise ValueError(f"epoch {epoch}: the source gave nothing; it must be readable more than once")
    if carries:
        log.info("epoch %d: %d documents are carried into the next epoch", epoch, end.num_waiting)
    elif end.num_emitted == 0 and policies.tail is Tail.DROP:
        raise ValueError(
            f"epoch {epoch}: the source gave {end.num_read} documents, too few to put one into each of "
            f"{end.rows} rows of {end.row_len} slots; lower the batch size or the row length"
        )
    elif end.num_waiting:
        what = "epoch %d: %d of %d documents were left over at the end, too few for another batch"
        log.warning(what, epoch, end.num_waiting, end.num_read)
