"""What a run reports of its packed batches: metrics at every batch, and a summary of the whole fit."""

import time
from dataclasses import dataclass

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from composer_packing.batch.contract import Batch
from composer_packing.batch.lockstep import Lockstep


@dataclass(frozen=True)
class RunSummary:
    """Figures of a whole fit, over all ranks.

    Attributes:
        num_documents: documents and pieces trained on.
        num_tokens: real tokens trained on.
        num_batches: optimizer steps.
        packing_efficiency: share of the slots that held a real token.
        tokens_per_second: real tokens per second of the fit, without the time of evaluations.
        data_wait_share: share of that time in which the slowest rank waited for a packed batch.
        longest_wait_batches: the longest that a document waited for a row, in batches.
        mean_displacement: by how many documents a document moved away from its turn in reading order, on average.
    """

    num_documents: int
    num_tokens: int
    num_batches: int
    packing_efficiency: float
    tokens_per_second: float
    data_wait_share: float
    longest_wait_batches: int
    mean_displacement: float


@dataclass
class _Totals:
    """Sums over the batches of this rank since the fit started."""

    documents: int = 0
    tokens: int = 0
    slots: int = 0
    displacement: int = 0
    longest_wait: int = 0

    def add(self, batch: Batch) -> None:
        self.documents += sum(batch["num_documents"])
        self.tokens += sum(batch["num_tokens"])
        self.slots += batch["input_ids"].numel()
        self.displacement += batch.get("displacement_documents", 0)
        self.longest_wait = max(self.longest_wait, batch.get("longest_wait_batches", 0))


class PackingMonitor(Callback):
    """Logs what each batch of this rank held, and sums up over all ranks when the fit ends.

    The metrics of a batch::

        packing/rows                  rows
        packing/documents             documents and pieces
        packing/real_tokens           real tokens
        packing/targets               tokens to predict
        packing/efficiency            share of the slots that hold a real token
        packing/data_wait_share       share of the step's time that this rank waited for the batch
        packing/learning_rate         learning rate of the step
        packing/mask_prob             mask ratio, if tokens are masked
        packing/longest_wait_batches  longest time that one of its documents waited for a row, in batches
        packing/mean_displacement     documents by which a document moved away from reading order, on average

    Only the packers of this package count the last two.

    Args:
        batches: gives the trainer its batches.
        mask_prob: mask ratio of batches that hold no `mask_prob`; None if no token is masked.

    Attributes:
        summary: figures of the fit; None until it ends.
    """

    def __init__(self, batches: Lockstep, mask_prob: float | None) -> None:
        self.summary: RunSummary | None = None
        self._batches = batches
        self._mask_prob = mask_prob
        self._learning_rate = 0.0
        self._totals = _Totals()
        self._first_batch = 0
        self._started = self._batch_started = self._eval_started = self._eval_seconds = 0.0
        self._waited_before = self._waited_before_batch = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock and the sums."""
        self._totals = _Totals()
        self._first_batch = state.timestamp.batch.value
        self._started = self._batch_started = time.perf_counter()
        self._waited_before = self._waited_before_batch = self._batches.wait_seconds
        self._eval_seconds = 0.0

    def eval_start(self, state: State, logger: Logger) -> None:
        """Stop the clock."""
        self._eval_started = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Start the clock again."""
        seconds = time.perf_counter() - self._eval_started
        self._eval_seconds += seconds
        self._batch_started += seconds

    def batch_start(self, state: State, logger: Logger) -> None:
        """Keep the learning rate of this batch: when the batch ends, Composer has set the next one."""
        self._learning_rate = float(state.optimizers[0].param_groups[0]["lr"])

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the metrics of the batch. The batch and its counts are still on the host."""
        batch = state.batch
        slots, tokens, documents = batch["input_ids"].numel(), sum(batch["num_tokens"]), sum(batch["num_documents"])
        now, waited = time.perf_counter(), self._batches.wait_seconds
        metrics = {
            "packing/rows": len(batch["input_ids"]),
            "packing/documents": documents,
            "packing/real_tokens": tokens,
            "packing/targets": sum(batch["num_targets"]),
            "packing/efficiency": tokens / slots,
            "packing/data_wait_share": (waited - self._waited_before_batch) / (now - self._batch_started),
            "packing/learning_rate": self._learning_rate,
        }
        if self._mask_prob is not None:
            metrics["packing/mask_prob"] = float(batch.get("mask_prob", self._mask_prob))
        if "longest_wait_batches" in batch:
            metrics["packing/longest_wait_batches"] = batch["longest_wait_batches"]
            metrics["packing/mean_displacement"] = batch["displacement_documents"] / documents
        logger.log_metrics(metrics)
        self._totals.add(batch)
        self._batch_started, self._waited_before_batch = now, waited

    def fit_end(self, state: State, logger: Logger) -> None:
        """Sum up over all ranks."""
        seconds = time.perf_counter() - self._started - self._eval_seconds
        mine = self._totals
        counts = torch.tensor([mine.documents, mine.tokens, mine.slots, mine.displacement], dtype=torch.int64)
        wait_share = (self._batches.wait_seconds - self._waited_before) / seconds
        largest = torch.tensor([wait_share, mine.longest_wait], dtype=torch.float32)
        counts, largest = state.device.tensor_to_device(counts), state.device.tensor_to_device(largest)
        dist.all_reduce(counts, reduce_operation="SUM")
        dist.all_reduce(largest, reduce_operation="MAX")
        documents, tokens, slots, displacement = counts.tolist()
        self.summary = RunSummary(
            num_documents=documents,
            num_tokens=tokens,
            num_batches=state.timestamp.batch.value - self._first_batch,
            packing_efficiency=tokens / max(slots, 1),
            tokens_per_second=tokens / seconds,
            data_wait_share=largest[0].item(),
            longest_wait_batches=int(largest[1]),
            mean_displacement=displacement / max(documents, 1),
        )
