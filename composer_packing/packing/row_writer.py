"""From the layout of a batch to the batch: tensors filled and masked, in pinned memory if asked."""

import numpy as np
import torch
from numpy.typing import NDArray

from composer_packing.batch.contract import IGNORE_INDEX, Batch
from composer_packing.common.arguments import check_ints
from composer_packing.packing.document_table import DocumentTable, LossMask, Tokens
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.labels.next_tokens import write_next_tokens
from composer_packing.packing.labels.published_mlm import mask_in_place
from composer_packing.packing.layout import Layout, fill_rows
from composer_packing.packing.options import Objective


class RowWriter:
    """Writes batches; nothing changes from one to the next but what is in them.

    Args:
        objective: what a token's label is.
        row_len: slots per row.
        pad_token_id: what stands in slots without a document.
        mask_token_id: what stands for a hidden token.
        ignore_token_id: label of what is no target.
        suppress_masking: give batches with `labels=None` and no `attention_mask`, whatever the objective.
        keyed_masking: draws the masks in the place of numpy.
        pin_memory: put batches into pinned memory.

    Raises:
        TypeError: an id is no int.
        ValueError: the keyed masks might hide the mask token or do not go with the objective, `ignore_token_id` does
            not go with either, or there is no GPU to pin memory for.
    """

    def __init__(
        self,
        objective: Objective,
        row_len: int,
        pad_token_id: int,
        mask_token_id: int,
        ignore_token_id: int,
        suppress_masking: bool,
        keyed_masking: KeyedMasking | None,
        pin_memory: bool,
    ) -> None:
        check_ints(pad_token_id=pad_token_id, mask_token_id=mask_token_id, ignore_token_id=ignore_token_id)
        if keyed_masking is not None and mask_token_id not in keyed_masking.special_token_ids:
            raise ValueError(f"{mask_token_id=} must be one of {keyed_masking.special_token_ids=}")
        if keyed_masking is not None and objective is not Objective.MLM:
            raise ValueError(f"keyed_masking hides tokens, which objective={objective.value!r} does not")
        is_counted = keyed_masking is not None or objective is not Objective.MLM
        if is_counted and ignore_token_id != IGNORE_INDEX:
            raise ValueError(
                f"{ignore_token_id=} must be {IGNORE_INDEX} where masks are keyed or the objective is not 'mlm'"
            )
        if pin_memory and not torch.cuda.is_available():
            raise ValueError(f"{pin_memory=} needs a GPU, and there is none here")
        self._objective = objective
        self._row_len = row_len
        self._pad_token_id = pad_token_id
        self._mask_token_id = mask_token_id
        self._ignore_token_id = ignore_token_id
        self._suppress_masking = suppress_masking
        self._keyed_masking = keyed_masking
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
        """A batch, as the table of `batch` says.

        Args:
            tokens: all documents' tokens, and `BLOCK` more.
            loss_mask: theirs, or empty.
            documents: the table.
            layout: which of them lie in which row.
            mask_prob: share of tokens that become targets where tokens are masked, 0 to 1.
            rng: draws the masks where no keyed ones are.
        """
        rows = len(layout.num_tokens)
        (input_ids, ids), (attention_mask, is_token) = self._empty(rows), self._empty(rows)
        batch: Batch = {
            "input_ids": input_ids,
            "labels": None,
            "cu_seqlens": self._split(layout),
            "max_seqlen": layout.max_seqlen.tolist(),
        }
        placed = (documents, layout.documents, layout.first)
        keyed_masking = None if self._suppress_masking else self._keyed_masking
        if keyed_masking is None:
            fill_rows(tokens, *placed, self._pad_token_id, ids, is_token)
        if self._suppress_masking:
            return batch
        labels, targets = self._empty(rows)
        batch["labels"] = labels
        batch["attention_mask"] = attention_mask
        masking = (mask_prob, self._mask_token_id, self._ignore_token_id)
        if self._objective is not Objective.MLM:
            num_targets = write_next_tokens(tokens, loss_mask, *placed, self._ignore_token_id, targets)
        elif keyed_masking is not None:
            num_targets = keyed_masking.fill_masked(
                tokens, documents, layout, self._pad_token_id, *masking, ids, targets, is_token
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
        """A tensor for rows, and the array that shares its memory."""
        if self._pin_memory:
            tensor = torch.empty((rows, self._row_len), dtype=torch.int64, pin_memory=True)
            return tensor, tensor.numpy()
        # numpy's memory was measured to be faster to write to than torch's.
        array = np.empty((rows, self._row_len), np.int64)
        return torch.from_numpy(array), array

    def _split(self, layout: Layout) -> list[torch.Tensor]:
        """`cu_seqlens` of each row."""
        cu_seqlens = torch.from_numpy(layout.cu_seqlens)
        if self._pin_memory:
            cu_seqlens = cu_seqlens.pin_memory()
        return list(torch.split_with_sizes(cu_seqlens, layout.segments.tolist()))
