"""Packed rows in a training loop of plain PyTorch; Composer need not be installed.

    python examples/plain_pytorch.py

Rows hold different numbers of targets. The gradient is the gradient of the mean over all targets of the step, as the
mean of each row is weighted by the row's share of the targets.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not spin: the packing thread needs a core

import contextlib
import itertools

import torch
from packed_text import MODEL, VOCAB_SIZE, packed_batches, texts

from composer_packing import get_num_tokens_in_packed_batch, split_packed_batch
from composer_packing.batch.contract import Batch
from composer_packing.model.modernbert import ModernBertForMaskedLM

STEPS = 60


def accumulate(model: ModernBertForMaskedLM, batch: Batch, device: torch.device) -> float:
    """Add the gradient of a step to the parameters' gradients. Returns the mean loss over all targets of the step."""
    total = 0.0
    for row in split_packed_batch(batch, microbatch_size=1, mark_dynamic=False):  # the model is not compiled
        ids, cu_seqlens, labels = (row[key].to(device) for key in ("input_ids", "cu_seqlens", "labels"))
        row_loss = model(ids, cu_seqlens, row["max_seqlen"], labels, row["num_targets"]).loss
        loss = row_loss * row["num_targets"] / sum(batch["num_targets"])
        loss.backward()
        total += loss.item()
    return total


def main() -> None:
    """Train for a few seconds and print the loss before and after."""
    torch.manual_seed(17)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = ModernBertForMaskedLM(MODEL).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, tokens, slots = [], 0, 0
    with contextlib.closing(packed_batches(texts())) as epoch:
        batches = itertools.chain.from_iterable(itertools.repeat(epoch))  # each `iter(epoch)` is a new epoch
        for batch in itertools.islice(batches, STEPS):
            losses.append(accumulate(model, batch, device))
            optimizer.step()
            optimizer.zero_grad()
            tokens += get_num_tokens_in_packed_batch(batch)
            slots += batch["input_ids"].numel()
            if len(losses) % 10 == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f}", flush=True)
    trained = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {tokens:,} tokens of {VOCAB_SIZE} kinds"
    print(f"{trained}, packing efficiency {tokens / slots:.2%}")


if __name__ == "__main__":
    main()
