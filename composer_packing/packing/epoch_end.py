"""The end of an epoch: what is logged about its documents, and when an epoch must be an error."""

import logging
from dataclasses import dataclass

from composer_packing.packing.options import OverLong, Tail
from composer_packing.packing.settings import DocumentPolicies
from composer_packing.packing.token_account import TokenAccount

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpochEnd:
    """What one rank has counted at the end of an epoch.

    Attributes:
        epoch: number of the epoch.
        account: where the tokens are that were read in the epoch.
        num_read: documents read in the epoch.
        num_emitted: documents in the batches of the epoch.
        num_waiting: documents that still wait for a row.
        num_added: documents added to the waiting buffer in all epochs.
    """

    epoch: int
    account: TokenAccount
    num_read: int
    num_emitted: int
    num_waiting: int
    num_added: int


def log_dropped_documents(end: EpochEnd, policies: DocumentPolicies) -> None:
    """Log how many documents of the epoch were too long for a row, and how many had no target."""
    account, over_long = end.account, OverLong(policies.over_long)
    if account.over_long_documents:
        log.log(
            logging.INFO if over_long is OverLong.SPLIT else logging.WARNING,
            "epoch %d: %d documents were longer than a row (%s): %d tokens cut off, %d dropped",
            end.epoch,
            account.over_long_documents,
            over_long.value,
            account.truncated,
            account.dropped,
        )
    if account.documents_without_targets:
        # A rank may have a thousand epochs in a row that give nothing to learn.
        is_frequent = end.epoch > 0 and end.num_read == 0
        log.log(
            logging.DEBUG if is_frequent else logging.WARNING,
            "epoch %d: %d documents (%d tokens) were dropped: a row would hold none of their tokens to learn",
            end.epoch,
            account.documents_without_targets,
            account.without_targets,
        )


def check_epoch_end(
    end: EpochEnd, policies: DocumentPolicies, *, rows: int, row_len: int, has_other_ranks: bool, is_read_once: bool
) -> None:
    """Raise ValueError if the epoch gave nothing and the next epochs cannot give more.

    Args:
        end: what was counted.
        policies: policies of the packer.
        rows: rows of the batch that would have come next.
        row_len: slots of a row.
        has_other_ranks: other ranks share the documents.
        is_read_once: the source is an iterator, which cannot be read again.
    """
    account, carries = end.account, policies.tail is Tail.CARRY
    num_over_long, num_without_targets = account.over_long_documents, account.documents_without_targets
    # This rank alone may have got such documents, while other ranks, or this one in the next epoch, get others.
    are_all = policies.tail is Tail.DROP or not has_other_ranks
    if (num_over_long or num_without_targets) and end.num_added == 0 and are_all:
        raise ValueError(
            f"epoch {end.epoch}: every document was dropped: {num_over_long} are longer than a row of {row_len}, and "
            f"of {num_without_targets} a row would hold no token to learn; use longer rows, another over_long policy "
            f"or other loss masks"
        )
    # A rank that carries its tail may read nothing in an epoch: there may be fewer documents than ranks.
    if account.read == 0 and end.epoch > 0 and (not carries or is_read_once):
        raise ValueError(f"epoch {end.epoch}: the source gave nothing; it must be readable more than once")
    if policies.tail is Tail.DROP and end.num_emitted == 0:
        raise ValueError(
            f"epoch {end.epoch}: the source gave {end.num_read} documents, too few to put one in each of {rows} rows "
            f"of {row_len} slots; use a smaller batch or shorter rows"
        )


def log_waiting_documents(end: EpochEnd, policies: DocumentPolicies) -> None:
    """Log how many documents are carried into the next epoch, or left over."""
    if policies.tail is Tail.CARRY:
        log.info("epoch %d: %d documents are carried into the next epoch", end.epoch, end.num_waiting)
    elif end.num_waiting:
        log.warning(
            "epoch %d: %d of %d documents were left over at the end, too few for another batch",
            end.epoch,
            end.num_waiting,
            end.num_read,
        )
