"""A program of its own: packed steps on 1, 2 and 4 ranks beside unpacked ones, and evaluation. Prints a JSON line.

Masked documents go through Hugging Face's model as one padded batch, examples of fine-tuning through ours one by one;
on every rank by itself.
"""

import copy
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer import Callback, Evaluator, Logger, State, Trainer
from composer.utils import dist

from composer_packing import GreedyBestFitSequencePacker
from composer_packing.batch.contract import IGNORE_INDEX
from composer_packing.batch.lockstep import Lockstep
from composer_packing.config.schema import TrainLoaderConfig
from composer_packing.packing.labels.keyed_mlm import KeyedMasking
from composer_packing.packing.options import Tail
from composer_packing.training.batches import train_batches
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.dataspec import packed_dataspec
from composer_packing.training.evaluation import eval_batches
from tests.tools.forked import on_ranks
from tests.tools.models import away_from_its_start, hugging_face
from tests.tools.packers import new_packer
from tests.tools.reference import RESULT, masked_documents
from tests.tools.runs import VOCAB_SIZE, VOCABULARY, config_of, documents_of, trainer_of

MASK, SPECIAL = 4, range(5)
LONGEST, COUNT = 40, 31

Document = dict[str, Any]
Share = Callable[[list[Document], int, int], list[Document]]


def documents(without_targets: int = 0) -> list[Document]:
    """Of 1 to 40 tokens; the first `without_targets` are made of special tokens, which are never hidden."""
    rng = np.random.default_rng(1)
    return [
        {
            "input_ids": rng.integers(*((0, 4) if number < without_targets else (5, VOCAB_SIZE)), length),
            "document": number,
        }
        for number, length in enumerate(rng.integers(1, LONGEST + 1, COUNT))
    ]


def packer_of(share: list[Document], row_len: int) -> GreedyBestFitSequencePacker:
    """Gives the whole share in one batch, of as many rows as it takes."""
    return new_packer(
        GreedyBestFitSequencePacker,
        [share],
        COUNT,
        COUNT,
        row_len,
        2 * COUNT,
        pad_token_id=0,
        mask_token_id=MASK,
        mask_prob=0.3,
        tail=Tail.EMIT,
        keyed_masking=KeyedMasking(3, VOCAB_SIZE, SPECIAL),
    )


def padded(model: PackedLanguageModel, everything: list[Document]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of all documents as one padded batch."""
    masked = masked_documents(list(packer_of(everything, 2000)))
    shape = len(masked), LONGEST
    ids, labels, real = torch.zeros(shape).long(), torch.full(shape, IGNORE_INDEX), torch.zeros(shape).long()
    for row, (original, seen, wanted) in enumerate(masked):
        ids[row, : len(original)] = torch.tensor(seen)
        labels[row, : len(original)] = torch.tensor(wanted)
        real[row, : len(original)] = 1
    theirs = hugging_face(model.model.model.config)
    theirs.load_state_dict(model.model.state_dict(), strict=True)
    loss = theirs(input_ids=ids, attention_mask=real, labels=labels).loss
    loss.backward()
    return {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}, loss.item()


class Gradients(Callback):
    """Keeps the gradients of the last step; Composer clears them at the end."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.of = {name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None}


def step(
    model: PackedLanguageModel, packer: GreedyBestFitSequencePacker, on_tokens: bool = True
) -> tuple[dict[str, Any], float]:
    """Gradients and loss of one packed step."""
    model = copy.deepcopy(model)
    batches = Lockstep(packer, prefetch=1)
    gradients = Gradients()
    trainer = trainer_of(
        config_of(max_duration="1ba"),
        batches,
        model,
        callbacks=[gradients],
        accumulate_train_batch_on_tokens=on_tokens,
    )
    trainer.fit()
    batches.close()
    loss = trainer.state.total_loss_dict["loss/train/total"]
    trainer.engine.close()
    return {name.removeprefix("module.").removeprefix("model."): of for name, of in gradients.of.items()}, loss


def examples() -> list[Document]:
    """The documents with a loss mask on about a tenth of their tokens, one of them at least."""
    rng = np.random.default_rng(2)
    given = [document for document in documents() if len(document["input_ids"]) > 1]
    for document in given:
        mask = rng.random(len(document["input_ids"])) < 0.1
        mask[-1] |= not mask[1:].any()
        document["loss_mask"] = mask
    return given


def one_by_one(model: PackedLanguageModel, everything: list[Document]) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients and loss of all examples, each in a row of its own."""
    model = copy.deepcopy(model)
    targets, total = sum(document["loss_mask"][1:].sum() for document in everything), torch.tensor(0.0)
    for document in everything:
        ids, mask = torch.from_numpy(document["input_ids"]), torch.from_numpy(document["loss_mask"])
        logits = model.model(ids, torch.tensor([0, len(ids)], dtype=torch.int32), len(ids)).logits
        total = total + torch.nn.functional.cross_entropy(logits[:-1][mask[1:]], ids[1:][mask[1:]], reduction="sum")
    (total / targets).backward()
    return {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}, total.item() / targets


def fine_tuning(rank: int, world_size: int) -> dict[str, Any]:
    """How far packed steps of fine-tuning are from the examples on their own: gradient and loss of each case."""
    torch.manual_seed(0)
    model = PackedLanguageModel(dataclasses.replace(config_of().model, causal=True))
    found = {}
    everything = examples()
    gradient, loss = one_by_one(model, everything)
    for share in (evenly, one_and_the_rest):
        for row_len in (LONGEST, 97, 2000):
            mine = share(everything, rank, world_size)
            packer = new_packer(
                GreedyBestFitSequencePacker,
                [mine],
                COUNT,
                COUNT,
                row_len,
                2 * COUNT,
                pad_token_id=0,
                objective="sft",
                tail=Tail.EMIT,
            )
            packed, packed_loss = step(model, packer)
            case = f"{share.__name__}, rows of {row_len}"
            found[case] = [distance(packed, gradient), abs(packed_loss - loss) / loss]
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Length of the difference by the length of the other, over all parameters."""
    assert set(one) == set(other)
    flat = [torch.cat([gradients[name].flatten() for name in sorted(other)]) for gradients in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


class Fed(Callback):
    """What each batch of this rank held, counted document by document."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []

    def before_train_batch(self, state: State, logger: Logger) -> None:
        batch = state.batch
        masked = masked_documents([batch])
        self.batches.append(
            {
                "before": int(state.timestamp.token),
                "rows": len(batch["input_ids"]),
                "mask_prob": float(batch["mask_prob"]),
                "tokens": sum(len(original) for original, _, _ in masked),
                "documents": len(masked),
            }
        )


def clock() -> dict[str, Any]:
    """A run with every schedule: Composer's clock at its end, and what this rank was fed."""
    config = config_of(
        max_duration="12000tok",
        global_train_batch_size=32,
        train_loader=TrainLoaderConfig(
            batch_size_warmup_min_size=8,
            batch_size_warmup_tokens="6000tok",
            masking_ratio_cooldown_start_tokens="200sp",
            masking_ratio_cooldown_tokens="400sp",
            final_masking_ratio=0.1,
        ),
    )
    batches = train_batches(documents_of(150), config, VOCABULARY)
    fed = Fed()
    trainer = trainer_of(config, batches, PackedLanguageModel(config.model), callbacks=[fed])
    trainer.fit()
    batches.close()
    trainer.engine.close()
    now = trainer.state.timestamp
    return {"token": int(now.token), "sample": int(now.sample), "batch": int(now.batch), "fed": fed.batches}


def evenly(everything: list[Document], rank: int, world_size: int) -> list[Document]:
    return everything[rank::world_size]


def one_and_the_rest(everything: list[Document], rank: int, world_size: int) -> list[Document]:
    """The first rank has one document, the last all that are left."""
    return everything[rank:] if rank == world_size - 1 else everything[rank : rank + 1]


def compared() -> dict[str, Any]:
    """How far packed steps are from unpacked ones, and what else there is to say of them."""
    dist.initialize_dist("cpu")
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = away_from_its_start(PackedLanguageModel(config_of().model))

    found: dict[str, Any] = {"gradient": {}, "loss": {}}
    for without_targets in (0, 12):
        everything = documents(without_targets)
        gradient, loss = padded(model, everything)
        for share in (evenly, one_and_the_rest):
            for row_len in (LONGEST, 97, 2000):
                packed, packed_loss = step(model, packer_of(share(everything, rank, world_size), row_len))
                case = f"{without_targets} without targets, {share.__name__}, rows of {row_len}"
                found["gradient"][case] = distance(packed, gradient)
                found["loss"][case] = abs(packed_loss - loss) / loss
    unweighted, _ = step(model, packer_of(evenly(documents(), rank, world_size), LONGEST), on_tokens=False)
    found["weighted by documents"] = distance(unweighted, padded(model, documents())[0])

    nothing, loss = step(model, packer_of(evenly(documents(COUNT), rank, world_size), LONGEST))
    found["without any target"] = [loss, max(float(gradient.abs().max()) for gradient in nothing.values())]

    found["fine-tuning"] = fine_tuning(rank, world_size)

    found["evaluation"] = {}
    for micro in (1, 2, 4):
        config = config_of(device_train_microbatch_size=micro, global_train_batch_size=16)
        held_out = packed_dataspec(eval_batches(documents_of(61), config, VOCABULARY))
        trainer = Trainer(
            model=model, eval_dataloader=Evaluator(label="eval", dataloader=held_out), device="cpu", progress_bar=False
        )
        trainer.eval()
        metrics = trainer.state.eval_metrics["eval"]
        again = {name: float(metric.compute()) for name, metric in metrics.items()}
        trainer.eval()
        assert again == {name: float(metric.compute()) for name, metric in metrics.items()}
        found["evaluation"][micro] = [*again.values(), int(trainer.state.eval_timestamp.sample)]
        trainer.engine.close()
    found["clock"] = dist.all_gather_object(clock())
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(RESULT + json.dumps({size: on_ranks(size, compared, Path(folder))[0] for size in (1, 2, 4)}))
