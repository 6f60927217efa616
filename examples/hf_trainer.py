"""Packed rows under Hugging Face's Trainer; Composer need not be installed.

    python examples/hf_trainer.py

A row is one microbatch. A batch of the packer is one optimizer step. As in plain_pytorch.py, the gradient is the
gradient of the mean over all targets of the step. This needs Trainer's `num_items_in_batch`. In transformers 4.57:

- Trainer counts the labels that are not -100, in all microbatches of a step and on all ranks.
- It passes the number to a model that has `accepts_loss_kwargs = True`, or else a `forward` with `**kwargs`. A
  parameter with the name `num_items_in_batch` is not enough.
- Without the number, Trainer takes the mean over microbatches. Then a target weighs more in a row with fewer targets.
- `average_tokens_across_devices` must stay on, as it is by default.
- `max_grad_norm` clips the gradient; it is 1.0 by default.

The length of `cu_seqlens` differs from row to row, so that rows can be neither joined nor cut. So the collator returns
its only row, and `dispatch_batches` of accelerate, which is on by default for an IterableDataset, is turned off.

On several ranks, under torchrun, each rank packs all rows and trains on its share: a step of W ranks takes W batches.
A single process with several GPUs would cut rows, so make only one GPU visible.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not spin: the packing thread needs a core

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from packed_text import MODEL, ROWS, VOCAB_SIZE, packed_batches, texts
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from composer_packing import BufferedIterable, split_packed_batch
from composer_packing.batch.contract import Batch
from composer_packing.model.config import ModernBertConfig
from composer_packing.model.modernbert import ModernBertForMaskedLM


class PackedRows(IterableDataset[Batch]):
    """The rows of the packer's batches. Every `iter()` is an epoch."""

    def __init__(self, batches: BufferedIterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield from split_packed_batch(batch, microbatch_size=1, mark_dynamic=False)


class TrainerModel(nn.Module):
    """The model in the form that Trainer calls: with a row, and with the number of targets of the whole step."""

    accepts_loss_kwargs = True

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.bert = ModernBertForMaskedLM(config)
        self.tokens = self.slots = 0  # counted here and not in the dataset, as accelerate reads ahead

    def forward(self, num_items_in_batch: Tensor | int, **row: Any) -> dict[str, Tensor]:
        """The part of the row in the mean over all targets of the step."""
        self.tokens += row["num_tokens"]
        self.slots += len(row["input_ids"])
        inputs = (row[key] for key in ("input_ids", "cu_seqlens", "max_seqlen", "labels", "num_targets"))
        return {"loss": self.bert(*inputs).loss * row["num_targets"] / num_items_in_batch}


def make_trainer(model: TrainerModel, rows: PackedRows, folder: str, **settings: Any) -> Trainer:
    """Make a Trainer that takes a batch of the packer for each step. Nothing is written to `folder`."""
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ROWS,
        accelerator_config={"dispatch_batches": False, "split_batches": False, "even_batches": False},
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    return Trainer(model, arguments, data_collator=lambda rows: rows[0], train_dataset=rows)


def main() -> None:
    """Train for a few seconds and print the loss before and after."""
    torch.manual_seed(17)
    model = TrainerModel(MODEL)
    settings = {"max_steps": 60, "learning_rate": 3e-3, "logging_steps": 10, "logging_first_step": True}
    with contextlib.closing(packed_batches(texts())) as batches, tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, PackedRows(batches), folder, **settings)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trained = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {model.tokens:,} tokens of {VOCAB_SIZE} kinds"
    print(f"{trained}, packing efficiency {model.tokens / model.slots:.2%}")


if __name__ == "__main__":
    main()
