"""The sequence packer: source batches in, packed batches out.

A batch takes documents from the front of the waiting buffer and refills the buffer from the source until so
many have found no room that another source batch might overfill it; those wait for the next batch. An epoch
ends when a batch can no longer be given a document in every row. The algorithm, the masks and
the names are those of the packer published with ModernBERT (Warner et al., 2024).
"""

import abc
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data.distributed import DistributedSampler

from composer_packing.batch import Batch
from composer_packing.masking import check_ratio, mask_in_place
from composer_packing.packing import NO_ROW, FilledRows, fill_rows
from composer_packing.schedules import (
    MaskingSchedule,
    TokenTime,
    cooldown_from_options,
    warmup_from_options,
)
from composer_packing.waiting import WaitingBuffer

log = logging.getLogger(__name__)

SourceBatch = Sequence[Mapping[str, Any]]
"""What the loader hands the packer: `{"input_ids": ids}` per document."""


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
        ignore_token_id: label of what is no target.
        mask_prob: share of tokens that become targets, 0 to 1.
        seed: of the masks; epoch `e` draws from `seed + e`.
        suppress_masking: give batches with `labels=None` and no `attention_mask`.
        batch_size_warmup_min_size: rows per batch at the start; None for no warmup.
        batch_size_warmup_tokens: global length of that warmup; goes with the minimum.
        masking_ratio_cooldown_tokens: global length of the mask-ratio cooldown; None for no cooldown.
        masking_ratio_cooldown_start_tokens: global tokens before it; None for 0.
        final_masking_ratio: ratio after it; goes with its length.
        masking_cooldown_schedule_type: `"linear"` or `"stair"`.
        masking_ratio_step_size: height of a stair; `"stair"` only.
        world_size: ranks that share the global tokens.

    Raises:
        ValueError: in the constructor where numbers do not go together; while iterating where a document
            does not fit a row or an epoch ends without a batch.
        TypeError: in the constructor where an id is no int; while iterating where a document is no flat
            sequence of ids.
        RuntimeError: from an iterator that goes on after a newer one was made.

    Attributes:
        epoch: number of the current epoch, -1 before the first.
        local_tokens: real tokens in the batches packed so far, over all epochs. Behind a `BufferedIterable`
            that is ahead of the trainer by the batches that are ready, and so are the schedules.
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
        batch_size_warmup_tokens: TokenTime | None = None,
        masking_ratio_cooldown_tokens: TokenTime | None = None,
        masking_ratio_cooldown_start_tokens: TokenTime | None = None,
        final_masking_ratio: float | None = None,
        masking_cooldown_schedule_type: MaskingSchedule | str = "linear",
        masking_ratio_step_size: float | None = None,
        world_size: int = 1,
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

        self._rows_schedule = warmup_from_options(
            out_batch_size, batch_size_warmup_min_size, batch_size_warmup_tokens, world_size
        )
        self._ratio_schedule = cooldown_from_options(
            mask_prob,
            final_masking_ratio,
            masking_ratio_cooldown_tokens,
            masking_ratio_cooldown_start_tokens,
            masking_cooldown_schedule_type,
            masking_ratio_step_size,
            world_size,
        )
        self.epoch = -1
        self.local_tokens = 0
        self._seqs_consumed = 0
        self._seqs_emitted = 0

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
        return self.out_batch_size if self._rows_schedule is None else self._rows_schedule(self.local_tokens)

    def __iter__(self) -> Iterator[Batch]:
        """Start an epoch; an iterator of an earlier one raises RuntimeError from then on."""
        self.epoch += 1
        self._seqs_consumed = 0
        self._seqs_emitted = 0
        sampler = getattr(self.src_iterable, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self.epoch)
        return self._batches(self.epoch, iter(self.src_iterable), np.random.default_rng(self.seed + self.epoch))

    def _batches(self, epoch: int, source: Iterator[SourceBatch], rng: np.random.Generator) -> Iterator[Batch]:
        waiting = WaitingBuffer()
        while True:
            if epoch != self.epoch:
                raise RuntimeError(f"epoch {epoch} of this packer is over: epoch {self.epoch} has been started")
            filled = self._pack(source, waiting)
            if filled is None:
                break
            yield self._finish(filled, rng)
        if self._seqs_consumed == 0 and epoch > 0:
            raise ValueError(f"epoch {epoch}: the source gave nothing; it must be readable more than once")
        if self._seqs_emitted == 0:
            raise ValueError(
                f"epoch {epoch}: the source gave {self._seqs_consumed} documents, too few to "
                f"put one in each of {self.rows_per_batch} rows of {self.out_pseq_len} slots; "
                f"lower the batch size or the row length"
            )
        left_over = self._seqs_consumed - self._seqs_emitted
        if left_over:
            log.warning(
                "epoch %d: %d of %d documents were left over at the end, too few for another batch",
                epoch,
                left_over,
                self._seqs_consumed,
            )

    def _pack(self, source: Iterator[SourceBatch], waiting: WaitingBuffer) -> FilledRows | None:
        """Take documents until no more find room; None where a row stays empty."""
        rows = self.rows_per_batch
        remaining_spaces = np.full(rows, self.out_pseq_len, np.int64)
        placements: list[NDArray[np.int64]] = []
        tried = 0
        skipped = 0
        while len(waiting) > tried or self._refill(source, waiting, self.buffer_size - skipped):
            row_of_document = self._place(waiting.lengths[tried:], remaining_spaces)
            placements.append(row_of_document)
            tried = len(waiting)
            skipped += int((row_of_document == NO_ROW).sum())
        if not placements or remaining_spaces.max() == self.out_pseq_len:
            return None

        row_of_document = np.concatenate(placements)
        input_ids = np.empty((rows, self.out_pseq_len), np.int64)
        attention_mask = np.empty_like(input_ids)
        segments = fill_rows(
            waiting.tokens,
            waiting.starts,
            waiting.lengths,
            row_of_document,
            input_ids,
            attention_mask,
            self.pad_token_id,
        )
        self._seqs_emitted += len(waiting) - skipped
        # Put back to the front one by one, the last skipped comes first.
        waiting.keep(np.flatnonzero(row_of_document == NO_ROW)[::-1])
        return FilledRows(input_ids, attention_mask, *segments)

    def _refill(self, source: Iterator[SourceBatch], waiting: WaitingBuffer, limit: int) -> int:
        """Read source batches, at most `limit` documents; give the number of non-empty ones."""
        added = 0
        while self.buffer_size - added > self.src_batch_size and added + self.src_batch_size <= limit:
            try:
                source_batch = next(source)
            except StopIteration:
                break
            added += waiting.append(source_batch)
            if len(source_batch) > self.src_batch_size:
                raise ValueError(
                    f"the source gave {len(source_batch)} documents at once; src_batch_size={self.src_batch_size}"
                )
        if added:
            longest = int(waiting.lengths[-added:].max())
            if longest > self.out_pseq_len:
                raise ValueError(
                    f"a document of {longest} tokens does not fit a row of {self.out_pseq_len} slots "
                    f"(src_max_seq_len={self.src_max_seq_len}); cut or split it before it is packed"
                )
        self._seqs_consumed += added
        return added

    @abc.abstractmethod
    def _place(self, lengths: NDArray[np.int64], remaining_spaces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Choose the row of each document, -1 for none, and lower `remaining_spaces` accordingly.

        Args:
            lengths: int64 `(documents,)`, in waiting order.
            remaining_spaces: int64 `(rows,)`, free slots of each row.
        """

    def _finish(self, filled: FilledRows, rng: np.random.Generator) -> Batch:
        """Mask the filled rows and make a batch of them."""
        batch: Batch = {
            "input_ids": torch.from_numpy(filled.input_ids),
            "labels": None,
            "cu_seqlens": [torch.from_numpy(row) for row in np.split(filled.cu_seqlens, filled.offsets[1:-1])],
            "max_seqlen": filled.longest.tolist(),
        }
        mask_prob = self.mask_prob if self._ratio_schedule is None else self._ratio_schedule(self.local_tokens)
        if not self.suppress_masking:
            labels = mask_in_place(
                filled.input_ids,
                filled.attention_mask == 1,
                mask_prob,
                self.mask_token_id,
                self.ignore_token_id,
                rng,
            )
            batch["labels"] = torch.from_numpy(labels)
            batch["attention_mask"] = torch.from_numpy(filled.attention_mask)
            if self._ratio_schedule is not None:
                batch["mask_prob"] = torch.tensor(mask_prob, dtype=torch.float32)
        self.local_tokens += int(filled.attention_mask.sum())
        return batch


def check_positive(**numbers: int) -> None:
    """Raise ValueError where a number is below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")
