"""Packed rows under Hugging Face's Trainer; Composer need not be installed.

    python examples/hf_trainer.py

A row is a microbatch, a batch of the packer one optimizer step. As in plain_pytorch.py the gradient is that of the
mean over all targets of the step. It rests on Trainer's `num_items_in_batch` (as of transformers 4.57): Trainer
counts the labels that are not -100 in all microbatches of a step and on all ranks, and hands the number to a model
that has `accepts_loss_kwargs = True` or, failing that, a `forward` with `**kwargs`; a parameter of that name alone
does not do. Without it Trainer takes the mean over microbatches, and a target weighs more in a row with few of them.
`average_tokens_across_devices`, on by default, must stay on; `max_grad_norm`, 1.0 by default, clips the gradient.

`cu_seqlens` has another length in every row, so rows can be neither joined nor cut up: the collator takes the one
row as it is, and accelerate's `dispatch_batches`, which an IterableDataset turns on, is turned off. On several ranks,
under torchrun, each packs all rows and trains on its share: W ranks make a step of W batches. One process with
several GPUs would cut rows up; make one visible.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # waiting threads must not spin: the packer's wants a core too

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
    """The rows of the packer's batches, an epoch at every `iter()`."""

    def __init__(self, batches: BufferedIterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield from split_packed_batch(batch, microbatch_size=1, mark_dynamic=False)


class TrainerModel(nn.Module):
    """The model as Trainer calls it: with a row, and with the number of targets of the whole step."""

    accepts_loss_kwargs = True

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.bert = ModernBertForMaskedLM(config)
        self.tokens = self.slots = 0  # counted here, as accelerate reads ahead

    def forward(self, num_items_in_batch: Tensor | int, **row: Any) -> dict[str, Tensor]:
        """The row's part of the mean over all targets of the step."""
        self.tokens += row["num_tokens"]
        self.slots += len(row["input_ids"])
        inputs = (row[key] for key in ("input_ids", "cu_seqlens", "max_seqlen", "labels", "num_targets"))
        return {"loss": self.bert(*inputs).loss * row["num_targets"] / num_items_in_batch}


def make_trainer(model: TrainerModel, rows: PackedRows, folder: str, **settings: Any) -> Trainer:
    """A Trainer whose step is a batch of the packer; `folder` stays empty."""
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
    """Train for a few seconds and say what came of it."""
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
