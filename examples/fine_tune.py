"""Fine-tuning on chats with Composer, from Python instead of a YAML file.

    python examples/fine_tune.py [CHATS.jsonl]
    composer -n 2 examples/fine_tune.py [CHATS.jsonl]

Each line of the file has one of two forms::

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "response": "..."}

Without a file, the program makes up chats about sums. The model learns what the assistant says, and where the assistant
stops.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait must not spin: the packing thread needs a core

import json
import random
import sys
from functools import partial
from typing import Any

import torch
from composer import Callback, Logger, State, Trainer
from composer.utils import dist
from torch.utils.data import DataLoader

from composer_packing import Lockstep, SubsetSumSequencePacker, flat_source_batch
from composer_packing.data.chat_examples import ExampleTokenizer
from composer_packing.data.share_sampler import ShareSampler
from composer_packing.data.tokenizer import fast_tokenizer, train_tokenizer
from composer_packing.model.config import ModernBertConfig
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.dataspec import packed_dataspec

SEED = 17
GLOBAL_BATCH_SIZE = 32  # sequences of 64 tokens in a step of all ranks: 8 rows of 256 slots
MAX_SEQ_LEN = 64


def make_up_chats(count: int = 2000) -> list[dict[str, Any]]:
    """Chats about sums of numbers below ten."""
    rng = random.Random(SEED)
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    return [
        {
            "messages": [
                {"role": "user", "content": f"What is {one} plus {other}?"},
                {"role": "assistant", "content": f"{one} plus {other} is {one + other}."},
            ]
        }
        for one, other in pairs
    ]


def read_chats(path: str) -> list[dict[str, Any]]:
    """One chat from each line that is not blank. The program ends with a message if the file cannot be read."""
    chats = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                try:
                    chats += [json.loads(line)] if line.strip() else []
                except json.JSONDecodeError as error:
                    sys.exit(f"{path}, line {number}: {error}")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path}: {error}")
    return chats or sys.exit(f"{path}: holds no chats")


class PrintLoss(Callback):
    """Prints the loss per target of every tenth step."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Print the loss on the first rank."""
        step = state.timestamp.batch.value
        if step % 10 == 0 and dist.get_global_rank() == 0:
            print(f"step {step}: loss {state.total_loss_dict['loss/train/total']:.3f}", flush=True)


def main(arguments: list[str]) -> None:
    """Train for a few seconds."""
    chats = read_chats(arguments[0]) if arguments else make_up_chats()
    texts = [json.dumps(chat) for chat in chats]
    # In a real run: transformers.AutoTokenizer.from_pretrained(FOLDER), the tokenizer that the model was trained with.
    tokenizer = fast_tokenizer(train_tokenizer(texts, vocab_size=600))
    documents = ExampleTokenizer(tokenizer)(chats)

    torch.manual_seed(SEED)
    dist.initialize_dist("gpu" if torch.cuda.is_available() else "cpu")
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    loader: DataLoader[Any] = DataLoader(
        documents,  # type: ignore[arg-type] # a list is a map-style dataset too
        batch_size=GLOBAL_BATCH_SIZE // world_size,
        sampler=ShareSampler(documents, world_size, rank, SEED),
        collate_fn=partial(flat_source_batch, vocab_size=len(tokenizer), loss_masked=True),
        generator=torch.Generator(),
    )
    packer = SubsetSumSequencePacker.from_composer(
        loader,
        batch_size=GLOBAL_BATCH_SIZE // world_size,
        micro_batch_size=4,
        max_seq_len=MAX_SEQ_LEN,
        buffer_size=4 * GLOBAL_BATCH_SIZE,
        pad_token_id=tokenizer.pad_token_id,
        objective="sft",
        over_long="truncate",
        tail="carry",
        world_size=world_size,
    )
    batches = Lockstep(packer, prefetch=2)
    model = PackedLanguageModel(
        ModernBertConfig(len(tokenizer), 64, 96, num_hidden_layers=2, num_attention_heads=2, causal=True)
    )
    trainer = Trainer(
        model=model,
        train_dataloader=packed_dataspec(batches),
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
        max_duration="60ba",
        accumulate_train_batch_on_tokens=True,  # every target of a step weighs the same
        device_train_microbatch_size=1,  # one row
        callbacks=[PrintLoss()],
        progress_bar=False,
    )
    trainer.fit()
    batches.close()
    trainer.close()
    account = packer.token_account
    print(f"{account.emitted:,} tokens packed, {account.documents_without_targets} examples dropped")


if __name__ == "__main__":
    main(sys.argv[1:])
