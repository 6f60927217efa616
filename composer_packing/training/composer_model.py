"""The encoder in the form that Composer takes: forward, loss and metrics of one packed row."""

from typing import Any

import torch
from composer.metrics import LanguageCrossEntropy, MaskedAccuracy
from composer.models import ComposerModel
from torch import Tensor
from torchmetrics import Metric

from composer_packing.batch.contract import Batch
from composer_packing.model.config import ModernBertConfig
from composer_packing.model.modernbert import LanguageModelOutput, ModernBertForMaskedLM


class PackedLanguageModel(ComposerModel):
    """Language model that trains on the microbatches that `split_packed_batch` makes: one packed row each.

    Evaluation gives every target the same weight, whatever its row and rank.

    Args:
        config: shape of the encoder.
    """

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.model = ModernBertForMaskedLM(config)

    def forward(self, batch: Batch) -> LanguageModelOutput:
        """Predict the targets of one row."""
        output: LanguageModelOutput = self.model(
            batch["input_ids"],
            batch["cu_seqlens"],
            batch["max_seqlen"],
            batch["labels"],
            batch.get("num_targets"),
        )
        return output

    def loss(self, outputs: LanguageModelOutput, batch: Batch) -> Tensor:
        """Mean cross entropy over the row's targets. Composer weighs the row by the number of its targets."""
        assert outputs.loss is not None
        return outputs.loss

    def eval_forward(self, batch: Batch, outputs: LanguageModelOutput | None = None) -> LanguageModelOutput:
        """Predict the targets of one row, unless `outputs` already holds the prediction."""
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool = False) -> dict[str, Metric]:
        """Cross entropy and accuracy in evaluation; no metrics in training."""
        return {} if is_train else {type(m).__name__: m for m in (LanguageCrossEntropy(), MaskedAccuracy())}

    def update_metric(self, batch: Any, outputs: LanguageModelOutput, metric: Metric) -> None:
        """Add the targets of one row to a metric."""
        assert outputs.targets is not None
        if len(outputs.targets):  # the metrics cannot reshape a row without targets
            metric.update(outputs.logits.to(torch.float32), outputs.targets)
