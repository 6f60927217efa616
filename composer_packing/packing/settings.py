"""The settings of a packer in four groups: the shape of its batches, their labels, its schedules, its policies.

`SequencePacker.from_composer` takes the same settings one by one, under their published names. Each group checks the
rules about its own settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from composer_packing.batch.contract import IGNORE_INDEX
from composer_packing.common.arguments import check_ints, check_positive, check_ratio, parse_choice
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.options import Objective, OverLong, Tail
from composer_packing.packing.schedules import (
    BatchSizeWarmup,
    BatchSizeWarmupScheduler,
    MaskingRatioCooldownScheduler,
    MaskRatioCooldown,
    PackingSchedules,
)


@dataclass(frozen=True)
class BatchShape:
    """How many documents come in, and how many rows of how many slots go out.

    Attributes:
        src_batch_size: documents in a source batch, at most.
        out_batch_size: rows in a batch.
        out_pseq_len: slots in a row.
        buffer_size: documents that may wait, in addition to those of the batch that is being packed. All pieces of a
            document count as one.
        max_document_len: greatest length of a document or piece, in tokens. None for the length of a row.

    Raises:
        ValueError: a size is below 1, or the buffer cannot hold more than a source batch.
        TypeError: a size is not an int.
    """

    src_batch_size: int
    out_batch_size: int
    out_pseq_len: int
    buffer_size: int
    max_document_len: int | None = None

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

    @property
    def longest_document(self) -> int:
        """Greatest length of a document or piece, in tokens: at most a row."""
        return self.out_pseq_len if self.max_document_len is None else min(self.max_document_len, self.out_pseq_len)


@dataclass(frozen=True)
class LabelSettings:
    """What each token's label is, and which ids stand for what.

    Attributes:
        objective: masked language model, next token, or next token where the loss mask says so.
        pad_token_id: stands in slots that hold no document.
        mask_token_id: stands for a hidden token.
        ignore_token_id: label of a slot that is not a target. The counts and the model of this package know -100 only.
        mask_prob: share of the tokens that become targets if the objective is `"mlm"`, 0 to 1.
        seed: seed of the masks. Epoch `e` draws from `seed + e`.
        suppress_masking: give batches with `labels=None` and without `attention_mask`.
        keyed_masking: draws masks that depend only on seed, epoch, document and position. `seed` is not used then.

    Raises:
        ValueError: a value is out of range, or the settings do not fit each other.
        TypeError: an id is not an int.
    """

    objective: Objective = Objective.MLM
    pad_token_id: int = -1
    mask_token_id: int = 0
    ignore_token_id: int = IGNORE_INDEX
    mask_prob: float = 0.3
    seed: int = 42
    suppress_masking: bool = False
    keyed_masking: KeyedMasking | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "objective", parse_choice(Objective, "objective", self.objective))
        check_ints(
            pad_token_id=self.pad_token_id, mask_token_id=self.mask_token_id, ignore_token_id=self.ignore_token_id
        )
        check_ratio("mask_prob", self.mask_prob)
        if self.keyed_masking is not None:
            special_token_ids: Sequence[int] = self.keyed_masking.special_token_ids
            if self.mask_token_id not in special_token_ids:
                raise ValueError(
                    f"mask_token_id={self.mask_token_id} must be one of keyed_masking.{special_token_ids=}"
                )
            if not self.is_mlm:
                raise ValueError(f"keyed_masking hides tokens, which objective={self.objective.value!r} does not")
        if (self.keyed_masking is not None or not self.is_mlm) and self.ignore_token_id != IGNORE_INDEX:
            raise ValueError(
                f"ignore_token_id={self.ignore_token_id} must be {IGNORE_INDEX} if masks are keyed or the objective is "
                f"not 'mlm'"
            )

    @property
    def is_mlm(self) -> bool:
        """Whether tokens are masked."""
        return self.objective is Objective.MLM

    @property
    def has_loss_mask(self) -> bool:
        """Whether the source gives a loss mask with its tokens."""
        return self.objective is Objective.SFT


@dataclass(frozen=True)
class ScheduleSettings:
    """What changes during the training.

    Attributes:
        warmup: batch-size warmup, in rows; None for a constant size.
        cooldown: mask-ratio cooldown; None for a constant ratio.
        world_size: number of ranks that share the global durations.

    Raises:
        ValueError: `world_size` is below 1.
        TypeError: `world_size` is not an int.
    """

    warmup: BatchSizeWarmup | None = None
    cooldown: MaskRatioCooldown | None = None
    world_size: int = 1

    def __post_init__(self) -> None:
        check_positive(world_size=self.world_size)

    def start(self, rows: int, labels: LabelSettings) -> PackingSchedules:
        """The schedules at the start of the training.

        Args:
            rows: rows per batch after the warmup.
            labels: gives the mask ratio before the cooldown.

        Raises:
            ValueError: a schedule does not fit the rows, the mask ratio or the objective.
        """
        rows_schedule = ratio_schedule = None
        if self.warmup is not None:
            self.warmup.check_maximum("out_batch_size", rows)
            rows_schedule = BatchSizeWarmupScheduler(
                self.warmup.batch_size_warmup_min_size, rows, self.warmup.batch_size_warmup_tokens, self.world_size
            )
        if self.cooldown is not None:
            if not labels.is_mlm:
                raise ValueError(
                    f"final_masking_ratio={self.cooldown.final_masking_ratio}: with "
                    f"objective={labels.objective.value!r} nothing is masked"
                )
            self.cooldown.check_initial("mask_prob", labels.mask_prob)
            ratio_schedule = MaskingRatioCooldownScheduler(
                labels.mask_prob,
                self.cooldown.final_masking_ratio,
                self.cooldown.masking_ratio_cooldown_tokens,
                self.cooldown.masking_ratio_cooldown_start_tokens,
                self.cooldown.shape,
                self.cooldown.masking_ratio_step_size,
                self.world_size,
            )
        return PackingSchedules(rows, labels.mask_prob, rows_schedule, ratio_schedule)


@dataclass(frozen=True)
class Policies:
    """What becomes of documents that do not simply fit.

    Attributes:
        tail: what becomes of the documents that are left at the end of an epoch.
        over_long: what becomes of a document that is longer than `BatchShape.longest_document`.

    Raises:
        ValueError: a choice is unknown.
    """

    tail: Tail = Tail.DROP
    over_long: OverLong = OverLong.ERROR

    def __post_init__(self) -> None:
        object.__setattr__(self, "tail", parse_choice(Tail, "tail", self.tail))
        object.__setattr__(self, "over_long", parse_choice(OverLong, "over_long", self.over_long))
