"""From the layout of a batch to its tensors: rows filled, labels written, in pinned memory if asked."""

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.batch.contract import Batch
from composer_packing.packing.document_table import DocumentTable, LossMask, Tokens
from composer_packing.packing.labels.next_tokens import write_next_tokens
from composer_packing.packing.labels.published_mlm import mask_in_place
from composer_packing.packing.layout import Layout, fill_rows
from composer_packing.packing.settings import LabelSettings


class RowWriter:
    """Writes batches.

    Args:
        row_len: slots in a row.
        labels: what each token's label is.
        pin_memory: put batches into pinned memory.

    Raises:
        ValueError: there is no GPU to pin memory for.
    """

    def __init__(self, row_len: int, labels: LabelSettings, pin_memory: bool) -> None:
        if pin_memory and not torch.cuda.is_available():
            raise ValueError(f"{pin_memory=} needs a GPU, but there is none")
        self._row_len = row_len
        self._labels = labels
        self._pin_memory = pin_memory

    def write(
        self,
        tokens: Tokens,
        loss_mask: LossMask,
        documents: DocumentTable,
        layout: Layout,
        mask_prob: float,
        rng: np.random.Generator,
    ) -> Batch:
        """A batch with the keys that `batch.contract` lists.

        Args:
            tokens: the tokens of all documents, and at least `BLOCK` more slots.
            loss_mask: the loss mask of these tokens, or empty.
            documents: the table.
            layout: which documents lie in which row.
            mask_prob: share of the tokens that become targets if tokens are masked, 0 to 1.
            rng: draws the masks that are not keyed.
        """
        rows = len(layout.num_tokens)
        (input_ids, ids), (attention_mask, is_token) = self._empty(rows), self._empty(rows)
        batch: Batch = {
            "input_ids": input_ids,
            "labels": None,
            "cu_seqlens": self._split_cu_seqlens(layout),
            "max_seqlen": layout.max_seqlen.tolist(),
        }
        placed = (documents, layout.documents, layout.first)
        settings = self._labels
        keyed_masking = None if settings.suppress_masking else settings.keyed_masking
        if keyed_masking is None:
            fill_rows(tokens, *placed, settings.pad_token_id, ids, is_token)
        if settings.suppress_masking:
            return batch
        labels, targets = self._empty(rows)
        batch["labels"] = labels
        batch["attention_mask"] = attention_mask
        masking = (mask_prob, settings.mask_token_id, settings.ignore_token_id)
        if not settings.is_mlm:
            num_targets = write_next_tokens(tokens, loss_mask, *placed, settings.ignore_token_id, targets)
        elif keyed_masking is not None:
            num_targets = keyed_masking.fill_masked(
                tokens, documents, layout, settings.pad_token_id, *masking, ids, targets, is_token
            )
        else:
            mask_in_place(ids, is_token, *masking, rng, targets)
            return batch
        batch["num_tokens"] = layout.num_tokens.tolist()
        batch["num_targets"] = num_targets.tolist()
        batch["num_documents"] = layout.num_documents.tolist()
        batch["longest_wait_batches"] = layout.longest_wait
        batch["displacement_documents"] = layout.displacement
        return batch

    def _empty(self, rows: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """A tensor for so many rows, and an array that shares its memory."""
        if self._pin_memory:
            tensor = torch.empty((rows, self._row_len), dtype=torch.int64, pin_memory=True)
            return tensor, tensor.numpy()
        # Writing to numpy's memory was measured to be faster than writing to PyTorch's.
        array = np.empty((rows, self._row_len), np.int64)
        return torch.from_numpy(array), array

    def _split_cu_seqlens(self, layout: Layout) -> list[torch.Tensor]:
        """`cu_seqlens` of each row."""
        cu_seqlens = torch.from_numpy(layout.cu_seqlens)
        if self._pin_memory:
            cu_seqlens = cu_seqlens.pin_memory()
        return list(torch.split_with_sizes(cu_seqlens, layout.entries_per_row.tolist()))
