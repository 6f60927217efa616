"""The packer to use: greedy best fit, in Composer's terms."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from composer_packing.keyed_masking import KeyedMasking
from composer_packing.packing import place_documents
from composer_packing.schedules import MaskingSchedule
from composer_packing.sequence_packer import SequencePacker, Tail, check_positive
from composer_packing.times import DurationLike
from composer_packing.waiting import SourceBatch


class GreedyBestFitSequencePacker(SequencePacker):
    """Each document goes to the row with the least room that holds it; see `packing` for a picture."""

    @classmethod
    def from_composer(
        cls,
        src_iterable: Iterable[SourceBatch],
        batch_size: int = 512,
        micro_batch_size: int = 32,
        max_seq_len: int = 1024,
        buffer_size: int = 5120,
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
    ) -> "GreedyBestFitSequencePacker":
        """A packer in Composer's terms: a row takes the place of a microbatch of padded sequences.

        Args:
            src_iterable: gives source batches of `batch_size` documents.
            batch_size: sequences per optimizer step on this rank.
            micro_batch_size: sequences per microbatch; a row has `micro_batch_size * max_seq_len` slots.
            max_seq_len: longest document, in tokens.
            buffer_size: documents that may wait at most.
            batch_size_warmup_min_size: sequences per step at the start, a multiple of `micro_batch_size`.

        The other arguments are the constructor's.

        Raises:
            ValueError: sizes do not divide, or as the constructor says.
        """
        check_positive(batch_size=batch_size, micro_batch_size=micro_batch_size, max_seq_len=max_seq_len)
        if batch_size % micro_batch_size:
            raise ValueError(f"{batch_size=} must be a multiple of {micro_batch_size=}")
        if batch_size_warmup_min_size is not None:
            if batch_size_warmup_min_size % micro_batch_size:
                raise ValueError(f"{batch_size_warmup_min_size=} must be a multiple of {micro_batch_size=}")
            batch_size_warmup_min_size //= micro_batch_size
        return cls(
            src_iterable=src_iterable,
            src_batch_size=batch_size,
            src_max_seq_len=max_seq_len,
            out_batch_size=batch_size // micro_batch_size,
            out_pseq_len=micro_batch_size * max_seq_len,
            buffer_size=buffer_size,
            pad_token_id=pad_token_id,
            mask_token_id=mask_token_id,
            ignore_token_id=ignore_token_id,
            mask_prob=mask_prob,
            seed=seed,
            suppress_masking=suppress_masking,
            batch_size_warmup_min_size=batch_size_warmup_min_size,
            batch_size_warmup_tokens=batch_size_warmup_tokens,
            masking_ratio_cooldown_tokens=masking_ratio_cooldown_tokens,
            masking_ratio_cooldown_start_tokens=masking_ratio_cooldown_start_tokens,
            final_masking_ratio=final_masking_ratio,
            masking_cooldown_schedule_type=masking_cooldown_schedule_type,
            masking_ratio_step_size=masking_ratio_step_size,
            world_size=world_size,
            tail=tail,
            keyed_masking=keyed_masking,
        )

    def _place(self, lengths: NDArray[np.int64], remaining_spaces: NDArray[np.int64]) -> NDArray[np.int64]:
        placed: NDArray[np.int64] = place_documents(lengths, remaining_spaces)
        return placed
