"""From the layout of a batch to the batch: tensors with token ids, labels and counts."""

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.batch.contract import Batch
from composer_packing.packing.document_table import DocumentArrays
from composer_packing.packing.labels.next_tokens import write_next_tokens
from composer_packing.packing.labels.published_mlm import mask_in_place
from composer_packing.packing.layout import Layout, fill_rows
from composer_packing.packing.options import Objective
from composer_packing.packing.settings import BatchShape, LabelSettings


class RowWriter:
    """Writes batches, each into memory of its own.

    Args:
        shape: shape of a batch, and whether its memory is pinned.
        labels: objective, token ids and masks.
    """

    def __init__(self, shape: BatchShape, labels: LabelSettings) -> None:
        self._row_len = shape.out_pseq_len
        self._pin_memory = shape.pin_memory
        self._labels = labels

    def write(self, documents: DocumentArrays, layout: Layout, mask_prob: float, rng: np.random.Generator) -> Batch:
        """A batch with the keys of the batch contract.

        Args:
            documents: the waiting documents.
            layout: which document lies in which row.
            mask_prob: share of the tokens that become targets if tokens are masked, 0 to 1.
            rng: generator of the published masks.
        """
        rows, settings = len(layout.num_tokens), self._labels
        input_ids, ids = self._new_tensor(rows)
        attention_mask, is_token = self._new_tensor(rows)
        batch: Batch = {
            "input_ids": input_ids,
            "labels": None,
            "cu_seqlens": self._cu_seqlens(layout),
            "max_seqlen": layout.max_seqlen.tolist(),
        }
        if settings.suppress_masking:
            fill_rows(documents, layout, settings.pad_token_id, ids, is_token)
            return batch
        batch["labels"], targets = self._new_tensor(rows)
        batch["attention_mask"] = attention_mask
        masking = mask_prob, settings.mask_token_id, settings.ignore_token_id
        if settings.keyed_masking is not None:
            num_targets = settings.keyed_masking.fill_masked(
                documents, layout, settings.pad_token_id, *masking, ids, targets, is_token
            )
        else:
            fill_rows(documents, layout, settings.pad_token_id, ids, is_token)
            if settings.objective is Objective.MLM:
                mask_in_place(ids, is_token, *masking, rng, targets)
            else:
                num_targets = write_next_tokens(documents, layout, settings.ignore_token_id, targets)
        if settings.has_counts:
            batch["num_tokens"] = layout.num_tokens.tolist()
            batch["num_targets"] = num_targets.tolist()
            batch["num_documents"] = layout.num_documents.tolist()
            batch["longest_wait_batches"] = layout.longest_wait
            batch["displacement_documents"] = layout.displacement
        return batch

    def _new_tensor(self, rows: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """A tensor of int64 `(rows, row_len)` with any content, and the array that shares its memory."""
        if self._pin_memory:
            tensor = torch.empty((rows, self._row_len), dtype=torch.int64, pin_memory=True)
            return tensor, tensor.numpy()
        # Memory from numpy was measured to be faster to write to than memory from PyTorch.
        array = np.empty((rows, self._row_len), np.int64)
        return torch.from_numpy(array), array

    def _cu_seqlens(self, layout: Layout) -> list[torch.Tensor]:
        """Segment boundaries of each row."""
        cu_seqlens = torch.from_numpy(layout.cu_seqlens)
        if self._pin_memory:
            cu_seqlens = cu_seqlens.pin_memory()
        return list(torch.split_with_sizes(cu_seqlens, layout.segments.tolist()))
