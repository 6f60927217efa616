"""What a packed run reports: the values in force at every batch, on the console if asked, and a summary at the end."""

import time
from dataclasses import dataclass

import torch
from composer import Callback, Logger, State
from composer.utils import dist

from composer_packing.batch.lockstep import Lockstep


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
        longest_wait_batches: batches packed while the document that waited longest was waiting for a row.
        mean_displacement: documents that a document was moved past on average, before or behind its place in
            reading order.
    """

    num_documents: int
    num_tokens: int
    num_batches: int
    packing_efficiency: float
    tokens_per_second: float
    data_wait_share: float
    longest_wait_batches: int
    mean_displacement: float


class PackingMonitor(Callback):
    """Logs the values in force at every batch, those of this rank, and sums them up over ranks at the end.

    Logged: `packing/rows`, `packing/documents`, `packing/real_tokens`, `packing/targets`, `packing/efficiency`,
    `packing/data_wait_share`, `packing/learning_rate`, where tokens are masked `packing/mask_prob`, and of batches that
    tell them `packing/longest_wait_batches` and `packing/mean_displacement`.

    Args:
        batches: what the trainer takes its batches from.
        mask_prob: the mask ratio of batches that do not tell theirs; None where no token is masked.

    Attributes:
        summary: None until the fit ends.
    """

    def __init__(self, batches: Lockstep, mask_prob: float | None) -> None:
        self.summary: RunSummary | None = None
        self._batches = batches
        self._mask_prob = mask_prob
        self._learning_rate = 0.0
        self._first_batch = self._slots = self._tokens = self._documents = 0
        self._longest_wait = self._displacement = 0
        self._started = self._batch_started = self._eval_started = self._eval_seconds = 0.0
        self._waited_before = self._waited_before_batch = 0.0

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start the clock and the sums."""
        self._first_batch = state.timestamp.batch.value
        self._slots = self._tokens = self._documents = 0
        self._longest_wait = self._displacement = 0
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

    def batch_start(self, state: State, logger: Logger) -> None:
        """Keep the learning rate of this batch; at its end the next one's is set."""
        self._learning_rate = float(state.optimizers[0].param_groups[0]["lr"])

    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the batch, which is still on the host, as its counts are."""
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
            "packing/learning_rate": self._learning_rate,
        }
        if self._mask_prob is not None:
            metrics["packing/mask_prob"] = float(batch.get("mask_prob", self._mask_prob))
        if "longest_wait_batches" in batch:
            longest_wait, displacement = batch["longest_wait_batches"], batch["displacement_documents"]
            self._longest_wait = max(self._longest_wait, longest_wait)
            self._displacement += displacement
            metrics["packing/longest_wait_batches"] = longest_wait
            metrics["packing/mean_displacement"] = displacement / documents
        logger.log_metrics(metrics)
        self._batch_started, self._waited_before_batch = now, waited

    def fit_end(self, state: State, logger: Logger) -> None:
        """Sum up over ranks."""
        seconds = time.perf_counter() - self._started - self._eval_seconds
        counts = torch.tensor([self._documents, self._tokens, self._slots, self._displacement], dtype=torch.int64)
        wait_share = (self._batches.wait_seconds - self._waited_before) / seconds
        longest = torch.tensor([wait_share, self._longest_wait], dtype=torch.float32)
        counts, longest = state.device.tensor_to_device(counts), state.device.tensor_to_device(longest)
        dist.all_reduce(counts, reduce_operation="SUM")
        dist.all_reduce(longest, reduce_operation="MAX")
        documents, tokens, slots, displacement = counts.tolist()
        self.summary = RunSummary(
            num_documents=documents,
            num_tokens=tokens,
            num_batches=state.timestamp.batch.value - self._first_batch,
            packing_efficiency=tokens / max(slots, 1),
            tokens_per_second=tokens / seconds,
            data_wait_share=longest[0].item(),
            longest_wait_batches=int(longest[1]),
            mean_displacement=displacement / max(documents, 1),
        )
