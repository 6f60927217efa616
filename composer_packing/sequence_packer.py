"""The sequence packer: source batches in, packed batches out.

A batch takes documents from the front of the waiting buffer and refills the buffer from the source until so
many have found no room that another source batch might overfill it; those wait for the next batch. An epoch
ends when a batch can no longer be given a document in every row; what becomes of the rest is a policy. With
default arguments the algorithm, the masks and the names are those of the packer published with ModernBERT
(Warner et al., 2024).
"""

import abc
import enum
import logging
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from composer_packing.batch import Batch
from composer_packing.keyed_masking import KeyedMasking
from composer_packing.masking import check_ratio, mask_in_place
from composer_packing.packing import NO_ROW, filled_rows
from composer_packing.schedules import MaskingSchedule, PackingSchedules, cooldown_from_options, warmup_from_options
from composer_packing.times import DurationLike
from composer_packing.waiting import SourceBatch, WaitingBuffer

log = logging.getLogger(__name__)


class Tail(str, enum.Enum):
    """What becomes of the documents that are left when an epoch's source ends and they cannot give every row one."""

    DROP = "drop"
    """They are not trained on in this epoch; their number is logged as a warning. As published."""
    CARRY = "carry"
    """They come first in the next epoch."""
    EMIT = "emit"
    """They come in batches of fewer rows, so that every document comes once."""


class SequencePacker(abc.ABC):
    """Packs documents into rows, masks them, and counts both. Where a document goes is the subclass's part.

    Iterating starts an epoch. There is no `len()`: training length is given in tokens or batches.

    Args:
        src_iterable: gives source batches, anew at every `iter()`. The sampler of a DataLoader is told the
            epoch where it is a `DistributedSampler`.
        src_batch_size: documents per source batch.
        src_max_seq_len: longest document of the source, in tokens; for error messages.
        out_batch_size: rows per batch.
        out_pseq_len: slots per row.
        buffer_size: documents that may wait at most.
        pad_token_id: what stands in slots without a document.
        mask_token_id: what stands for a hidden token.
        ignore_token_id: label of what is no target; counts and models of this package know -100 only.
        mask_prob: share of tokens that become targets, 0 to 1.
        seed: of the masks; epoch `e` draws from `seed + e`.
        suppress_masking: give batches with `labels=None` and no `attention_mask`.
        batch_size_warmup_min_size: rows per batch at the start; None for no warmup.
        batch_size_warmup_tokens: global length of that warmup, in any unit of `times`; goes with the minimum.
        masking_ratio_cooldown_tokens: global length of the mask-ratio cooldown, likewise; None for no cooldown.
        masking_ratio_cooldown_start_tokens: what comes before it; None for 0.
        final_masking_ratio: ratio after it; goes with its length.
        masking_cooldown_schedule_type: `"linear"` or `"stair"`.
        masking_ratio_step_size: height of a stair; `"stair"` only.
        world_size: ranks that share the global tokens.
        tail: what becomes of the documents that are left at the end of an epoch.
        keyed_masking: draws the masks in the place of numpy, from each document's number; then `seed` has no use.

    Raises:
        ValueError: in the constructor where numbers do not go together; while iterating where a document
            does not fit a row or an epoch ends without a batch (not where the tail is carried).
        TypeError: in the constructor where an id is no int; while iterating where a document is no flat
            sequence of ids, or has no number where masks need it.
        RuntimeError: from an iterator that goes on after a newer one was made.

    Attributes:
        epoch: number of the current epoch, -1 before the first.
    """

    def __init__(
        self,
        src_iterable: Iterable[SourceBatch],
        src_batch_size: int,
        src_max_seq_len: int,
        out_batch_size: int,
        out_pseq_len: int,
        buffer_size: int,
        pad_token_id: int = -1,
        mask_token_id: int = 0,
        ignore_token_id: int = -100,
        mask_prob: float = 0.3,
        seed: int = 42,
        suppress_masking: bool = False,
        batch_size_warmup_min_size: int | None = None,
        batch_size_warmup_tokens: DurationLike | None = None,
        masking_ratio_cooldown_tokens: DurationLike | None = None,
        masking_ratio_cooldown_start_tokens: DurationLike | None = None,
        final_masking_ratio: float | None = None,
        masking_cooldown_schedule_type: MaskingSchedule | str = "linear",
        masking_ratio_step_size: float | None = None,
        world_size: int = 1,
        tail: Tail = Tail.DROP,
        keyed_masking: KeyedMasking | None = None,
    ) -> None:
        check_positive(
            src_batch_size=src_batch_size,
            src_max_seq_len=src_max_seq_len,
            out_batch_size=out_batch_size,
            out_pseq_len=out_pseq_len,
            world_size=world_size,
        )
        if buffer_size <= src_batch_size:
            raise ValueError(f"{buffer_size=} must exceed {src_batch_size=}: the buffer would never be filled")
        check_ratio("mask_prob", mask_prob)
        for name, token_id in (("pad_token_id", pad_token_id), ("mask_token_id", mask_token_id)):
            if not hasattr(token_id, "__index__"):
                raise TypeError(f"{name}={token_id!r} must be an int")
        if keyed_masking is not None and mask_token_id not in keyed_masking.special_token_ids:
            raise ValueError(f"{mask_token_id=} must be one of {keyed_masking.special_token_ids=}")
        self.src_iterable = src_iterable
        self.src_batch_size = src_batch_size
        self.src_max_seq_len = src_max_seq_len
        self.out_batch_size = out_batch_size
        self.out_pseq_len = out_pseq_len
        self.buffer_size = buffer_size
        self.pad_token_id = pad_token_id
        self.mask_token_id = mask_token_id
        self.ignore_token_id = ignore_token_id
        self.mask_prob = mask_prob
        self.seed = seed
        self.suppress_masking = suppress_masking
        self.tail = tail
        self.keyed_masking = keyed_masking

        self._schedules = PackingSchedules(
            out_batch_size,
            mask_prob,
            warmup_from_options(out_batch_size, batch_size_warmup_min_size, batch_size_warmup_tokens, world_size),
            cooldown_from_options(
                mask_prob,
                final_masking_ratio,
                masking_ratio_cooldown_tokens,
                masking_ratio_cooldown_start_tokens,
                masking_cooldown_schedule_type,
                masking_ratio_step_size,
                world_size,
            ),
        )
        self.epoch = -1
        self._waiting = self._empty_buffer()
        self._source_ended = True
        self._seqs_consumed = 0
        self._seqs_emitted = 0

    @property
    def local_tokens(self) -> int:
        """Real tokens packed so far, over all epochs: ahead of the trainer by the batches that are ready."""
        return self._schedules.local["tok"]

    @property
    def seqs_consumed(self) -> int:
        """Non-empty documents read this epoch."""
        return self._seqs_consumed

    @property
    def seqs_emitted(self) -> int:
        """Documents in the batches given this epoch."""
        return self._seqs_emitted

    @property
    def rows_per_batch(self) -> int:
        """Rows of the batch that is packed next."""
        return self._schedules.rows

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch; an iterator of an earlier one raises RuntimeError from then on."""
        if self.tail is not Tail.CARRY:
            self._waiting = self._empty_buffer()
        elif not self._source_ended:
            log.warning("epoch %d was left before its source ended; what it had not given is not read", self.epoch)
        self._source_ended = False
        self.epoch += 1
        self._seqs_consumed = 0
        self._seqs_emitted = 0
        sampler = getattr(self.src_iterable, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self.epoch)
        return self._batches(self.epoch, iter(self.src_iterable), np.random.default_rng(self.seed + self.epoch))

    def _batches(self, epoch: int, source: Iterator[SourceBatch], rng: np.random.Generator) -> Iterator[Batch]:
        while True:
            if epoch != self.epoch:
                raise RuntimeError(f"epoch {epoch} of this packer is over: epoch {self.epoch} has been started")
            row_of_document = self._place_all(source)
            if row_of_document is None:
                break
            batch = self._finish(row_of_document, rng)
            placed = row_of_document != NO_ROW
            documents = int(placed.sum())
            self._seqs_emitted += documents
            self._schedules.advance(int(self._waiting.lengths[placed].sum()), documents)
            # As published: each is put back to the front, so that the last skipped comes first.
            self._waiting.keep(np.flatnonzero(~placed)[::-1])
            yield batch
        self._source_ended = True
        carries = self.tail is Tail.CARRY  # then an epoch may well be empty: there may be fewer documents than ranks
        if self._seqs_consumed == 0 and epoch > 0 and (not carries or isinstance(self.src_iterable, Iterator)):
            raise ValueError(f"epoch {epoch}: the source gave nothing; it must be readable more than once")
        if carries:
            log.info("epoch %d: %d documents are carried into the next", epoch, len(self._waiting))
            return
        if self._seqs_emitted == 0 and self.tail is Tail.DROP:
            raise ValueError(
                f"epoch {epoch}: the source gave {self._seqs_consumed} documents, too few to "
                f"put one in each of {self.rows_per_batch} rows of {self.out_pseq_len} slots; "
                f"lower the batch size or the row length"
            )
        if len(self._waiting):
            what = "epoch %d: %d of %d documents were left over at the end, too few for another batch"
            log.warning(what, epoch, len(self._waiting), self._seqs_consumed)

    def _place_all(self, source: Iterator[SourceBatch]) -> NDArray[np.int64] | None:
        """The row of each waiting document, -1 where it has to wait; None where a row stays empty that must not."""
        remaining_spaces = np.full(self.rows_per_batch, self.out_pseq_len, np.int64)
        placements: list[NDArray[np.int64]] = []
        tried = 0
        skipped = 0
        while len(self._waiting) > tried or self._refill(source, self.buffer_size - skipped):
            row_of_document = self._place(self._waiting.lengths[tried:], remaining_spaces)
            placements.append(row_of_document)
            tried = len(self._waiting)
            skipped += int((row_of_document == NO_ROW).sum())
        empty = remaining_spaces == self.out_pseq_len
        if empty.all() or (empty.any() and self.tail is not Tail.EMIT):
            return None
        return np.concatenate(placements)

    def _refill(self, source: Iterator[SourceBatch], limit: int) -> int:
        added = self._waiting.refill(source, limit, self.epoch)
        if added:
            longest = int(self._waiting.lengths[-added:].max())
            if longest > self.out_pseq_len:
                raise ValueError(
                    f"a document of {longest} tokens does not fit a row of {self.out_pseq_len} slots "
                    f"(src_max_seq_len={self.src_max_seq_len}); cut or split it before it is packed"
                )
        self._seqs_consumed += added
        return added

    def _empty_buffer(self) -> WaitingBuffer:
        return WaitingBuffer(self.src_batch_size, self.buffer_size, numbered=self.keyed_masking is not None)

    @abc.abstractmethod
    def _place(self, lengths: NDArray[np.int64], remaining_spaces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose the row of each document, -1 for none, and lower `remaining_spaces` accordingly.

        An empty row is taken only when those before it hold a document.

        Args:
            lengths: int64 `(documents,)`, in waiting order.
            remaining_spaces: int64 `(rows,)`, free slots of each row.
        """

    def _finish(self, row_of_document: NDArray[np.int64], rng: np.random.Generator) -> Batch:
        """Fill the rows, mask them, and make a batch of them."""
        waiting = self._waiting
        filled = filled_rows(
            waiting.tokens, waiting.starts, waiting.lengths, row_of_document, self.out_pseq_len, self.pad_token_id
        )
        batch: Batch = {
            "input_ids": torch.from_numpy(filled.input_ids),
            "labels": None,
            "cu_seqlens": [torch.from_numpy(row) for row in np.split(filled.cu_seqlens, filled.offsets[1:-1])],
            "max_seqlen": filled.longest.tolist(),
        }
        if self.suppress_masking:
            return batch
        mask_prob = self._schedules.mask_ratio
        arguments = (mask_prob, self.mask_token_id, self.ignore_token_id)
        if self.keyed_masking is None:
            labels = mask_in_place(filled.input_ids, filled.attention_mask == 1, *arguments, rng)
        else:
            labels = self.keyed_masking.mask_in_place(filled, waiting.epochs, waiting.numbers, *arguments)
        batch["labels"] = torch.from_numpy(labels)
        batch["attention_mask"] = torch.from_numpy(filled.attention_mask)
        if self._schedules.changes_mask_ratio:
            batch["mask_prob"] = torch.tensor(mask_prob, dtype=torch.float32)
        return batch


def check_positive(**numbers: int) -> None:
    """Raise ValueError where a number is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
