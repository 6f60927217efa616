"""What a packed run reports: the values in force at every batch, and a summary at the end."""

import time
from dataclasses import dataclass

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from composer_packing.batch import Batch
from composer_packing.buffered import BufferedIterable


@dataclass(frozen=True)
class RunSummary:
    """Figures of a whole fit, over all ranks.

    Attributes:
        num_documents: documents trained on.
        num_tokens: real tokens trained on.
        num_batches: optimizer steps.
        packing_efficiency: share of slots that held a real token.
        tokens_per_second: real tokens by seconds of fit, evaluations left out.
        data_wait_share: share of those seconds that the slowest rank waited for a packed batch.
    """

    num_documents: int
    num_tokens: int
    num_batches: int
    packing_efficiency: float
    tokens_per_second: float
    data_wait_share: float


class PackingMonitor(Callback):
    """Logs this rank's packing at every batch and sums it up over ranks at the end.

    Logged: `packing/rows`, `packing/documents`, `packing/real_tokens`, `packing/targets`,
    `packing/efficiency`, `packing/data_wait_share` and, where it is scheduled, `packing/mask_prob`.

    Args:
        batches: what the trainer takes its batches from.

    Attributes:
        summary: None until the fit ends.
    """

    def __init__(self, batches: BufferedIterable[Batch]) -> None:
        self.summary: RunSummary | None = None
        self._batches = batches
        self._slots = 0
        self._tokens = 0
        self._documents = 0
        self._started = self._batch_started = self._eval_started = self._eval_seconds = 0.0
        self._waited_before = self._waited_before_batch = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock."""
        self._started = self._batch_started = time.perf_counter()
        self._waited_before = self._waited_before_batch = self._batches.wait_seconds
        self._eval_seconds = 0.0

    def eval_start(self, state: State, logger: Logger) -> None:
        """Stop the clock."""
        self._eval_started = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        """Start it again."""
        seconds = time.perf_counter() - self._eval_started
        self._eval_seconds += seconds
        self._batch_started += seconds

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the batch; all counts are host integers."""
        batch = state.batch
        slots, tokens, documents = (
            batch["input_ids"].numel(),
            sum(batch["num_tokens"]),
            sum(batch["num_documents"]),
        )
        self._slots += slots
        self._tokens += tokens
        self._documents += documents
        now, waited = time.perf_counter(), self._batches.wait_seconds
        metrics = {
            "packing/rows": len(batch["input_ids"]),
            "packing/documents": documents,
            "packing/real_tokens": tokens,
            "packing/targets": sum(batch["num_targets"]),
            "packing/efficiency": tokens / slots,
            "packing/data_wait_share": (waited - self._waited_before_batch) / (now - self._batch_started),
        }
        if "mask_prob" in batch:
            metrics["packing/mask_prob"] = batch["mask_prob"].item()
        logger.log_metrics(metrics)
        self._batch_started, self._waited_before_batch = now, waited

    def fit_end(self, state: State, logger: Logger) -> None:
        """Sum up over ranks."""
        seconds = time.perf_counter() - self._started - self._eval_seconds
        counts = torch.tensor([self._documents, self._tokens, self._slots], dtype=torch.int64)
        wait_share = torch.tensor([(self._batches.wait_seconds - self._waited_before) / seconds])
        counts, wait_share = state.device.tensor_to_device(counts), state.device.tensor_to_device(wait_share)
        dist.all_reduce(counts, reduce_operation="SUM")
        dist.all_reduce(wait_share, reduce_operation="MAX")
        documents, tokens, slots = counts.tolist()
        self.summary = RunSummary(
            num_documents=documents,
            num_tokens=tokens,
            num_batches=state.timestamp.batch.value,
            packing_efficiency=tokens / max(slots, 1),
            tokens_per_second=tokens / seconds,
            data_wait_share=wait_share.item(),
        )
