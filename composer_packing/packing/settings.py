"""Settings of a packer in four groups: the shape of a batch, its labels, its schedules, and policies for documents.

Each group checks its own values. A packer only checks what no group can know alone.
"""

from dataclasses import dataclass

import torch

from composer_packing.batch.contract import IGNORE_INDEX
from composer_packing.common.arguments import check_ints, check_positive, check_ratio, parse_choice
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.schedules import BatchSizeWarmup, MaskRatioCooldown, PackingSchedules


@dataclass(frozen=True)
class BatchShape:
    """How many documents come in, and how large the batches are that go out.

    Attributes:
        src_batch_size: documents of a source batch, at most.
        out_batch_size: rows of a batch.
        out_pseq_len: slots of a row.
        buffer_size: documents that may wait for a row, more than `src_batch_size`. The documents of the batch that is
            being packed do not count, and the pieces of a long document count as one document.
        max_document_len: tokens of a document or piece, at most; None for as many as a row has slots. `OverLong` says
            what happens to longer documents.
        pin_memory: put the tensors of a batch into pinned memory, which a GPU copies faster.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is below 1, the buffer is too small, or `pin_memory` is set without a GPU.
    """

    src_batch_size: int
    out_batch_size: int
    out_pseq_len: int
    buffer_size: int
    max_document_len: int | None = None
    pin_memory: bool = False

    def __post_init__(self) -> None:
        check_positive(
            src_batch_size=self.src_batch_size,
            out_batch_size=self.out_batch_size,
            out_pseq_len=self.out_pseq_len,
            max_document_len=self.longest_document,
        )
        if self.buffer_size <= self.src_batch_size:
            raise ValueError(
                f"buffer_size={self.buffer_size} must exceed src_batch_size={self.src_batch_size}: the buffer would "
                f"never be filled"
            )
        if self.pin_memory and not torch.cuda.is_available():
            raise ValueError(f"pin_memory={self.pin_memory} needs a GPU, and this machine has none")

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document or piece that is packed."""
        return self.out_pseq_len if self.max_document_len is None else min(self.max_document_len, self.out_pseq_len)


@dataclass(frozen=True)
class LabelSettings:
    """What a model learns from a batch, and the token ids that are written for it.

    Attributes:
        objective: an `Objective`, or its value. Tokens are masked for `"mlm"` only.
        pad_token_id: id in the slots without a document.
        mask_token_id: id that hides a token.
        ignore_token_id: label of a slot that is not a target. The counts and models of this package require -100.
        mask_prob: share of the tokens that become targets, 0 to 1.
        seed: seed of the published masks; epoch `e` draws with `seed + e`. Keyed masks have a seed of their own.
        suppress_masking: give batches with `labels=None` and without `attention_mask`.
        keyed_masking: draws masks that depend only on seed, epoch, document and position. Every document then needs a
            number. None for the masks of the published packer.

    Raises:
        TypeError: an id is not an int.
        ValueError: the objective is unknown, `mask_prob` is out of range, or two values do not go together.
    """

    objective: Objective | str = Objective.MLM
    pad_token_id: int = -1
    mask_token_id: int = 0
    ignore_token_id: int = IGNORE_INDEX
    mask_prob: float = 0.3
    seed: int = 42
    suppress_masking: bool = False
    keyed_masking: KeyedMasking | None = None

    def __post_init__(self) -> None:
        check_ints(
            pad_token_id=self.pad_token_id, mask_token_id=self.mask_token_id, ignore_token_id=self.ignore_token_id
        )
        check_ratio("mask_prob", self.mask_prob)
        objective = parse_choice(Objective, "objective", self.objective)
        object.__setattr__(self, "objective", objective)
        keyed = self.keyed_masking
        if keyed is not None and self.mask_token_id not in keyed.special_token_ids:
            raise ValueError(f"mask_token_id={self.mask_token_id} must be one of {keyed.special_token_ids=}")
        if keyed is not None and objective is not Objective.MLM:
            raise ValueError(f"keyed_masking hides tokens, which objective={objective.value!r} does not")
        if self.has_counts and self.ignore_token_id != IGNORE_INDEX:
            raise ValueError(
                f"ignore_token_id={self.ignore_token_id} must be {IGNORE_INDEX} with keyed_masking, and with every "
                f"objective but 'mlm'"
            )

    @property
    def has_counts(self) -> bool:
        """Whether batches hold their counts of tokens, targets and documents; the published batches do not."""
        return self.keyed_masking is not None or self.objective is not Objective.MLM


@dataclass(frozen=True)
class ScheduleSettings:
    """Schedules of a packer, and the number of ranks that share them.

    Attributes:
        batch_size_warmup: options of the warmup, its minimum in rows of one rank; None for a constant batch size.
        mask_ratio_cooldown: options of the cooldown; None for a constant mask ratio.
        world_size: number of ranks that share the lengths of the schedules.

    Raises:
        TypeError: `world_size` is not an int.
        ValueError: `world_size` is below 1.
    """

    batch_size_warmup: BatchSizeWarmup | None = None
    mask_ratio_cooldown: MaskRatioCooldown | None = None
    world_size: int = 1

    def __post_init__(self) -> None:
        check_positive(world_size=self.world_size)

    def start(self, rows: int, mask_prob: float) -> PackingSchedules:
        """Schedules of a rank that has packed nothing yet.

        Args:
            rows: rows of a batch after the warmup.
            mask_prob: mask ratio before the cooldown.

        Raises:
            ValueError: the warmup starts above `rows`, or the cooldown ends above `mask_prob`.
        """
        warmup, cooldown = self.batch_size_warmup, self.mask_ratio_cooldown
        return PackingSchedules(
            rows,
            mask_prob,
            None if warmup is None else warmup.scheduler(rows, self.world_size),
            None if cooldown is None else cooldown.scheduler(mask_prob, self.world_size),
        )


@dataclass(frozen=True)
class DocumentPolicies:
    """What happens to documents that fit no row and to documents that are left at the end of an epoch.

    Attributes:
        tail: a `Tail`, or its value.
        over_long: an `OverLong`, or its value.

    Raises:
        ValueError: a value is unknown.
    """

    tail: Tail | str = Tail.DROP
    over_long: OverLong | str = OverLong.ERROR

    def __post_init__(self) -> None:
        object.__setattr__(self, "tail", parse_choice(Tail, "tail", self.tail))
        object.__setattr__(self, "over_long", parse_choice(OverLong, "over_long", self.over_long))
