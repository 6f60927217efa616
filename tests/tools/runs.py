"""Small configurations, documents and trainers."""

from typing import Any

import numpy as np
import torch
from composer import Trainer

from composer_packing.batch.lockstep import Lockstep
from composer_packing.checkpointing.packed_dataset import PackedDataset
from composer_packing.config.schema import TrainConfig
from composer_packing.data.tokenizer import Vocabulary
from composer_packing.model.config import ModernBertConfig
from composer_packing.training.composer_model import PackedLanguageModel
from composer_packing.training.dataspec import packed_dataspec
from tests.tools.array_documents import DocumentDataset

VOCAB_SIZE = 64
PAD_TOKEN_ID, MASK_TOKEN_ID = 0, 4
VOCABULARY = Vocabulary(VOCAB_SIZE, PAD_TOKEN_ID, MASK_TOKEN_ID, range(5))


def config_of(**changed: Any) -> TrainConfig:
    model = ModernBertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_out_dropout=0.0,
    )
    settings: dict[str, Any] = {
        "max_duration": "2000tok",
        "max_seq_len": 16,
        "global_train_batch_size": 8,
        "model": model,
    }
    return TrainConfig(**(settings | {"device_train_microbatch_size": 2} | changed))


def documents_of(count: int, longest: int = 40, seed: int = 0) -> DocumentDataset:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, longest, count))])
    return DocumentDataset(rng.integers(5, VOCAB_SIZE, offsets[-1]).astype(np.uint16), offsets, 16)


def read_as(kind: type[DocumentDataset], documents: DocumentDataset) -> DocumentDataset:
    """The same documents in a dataset of another kind."""
    return kind(documents._tokens, np.concatenate([documents._starts, documents._ends[-1:]]), 16)


def trainer_of(
    config: TrainConfig, batches: Lockstep | PackedDataset, model: PackedLanguageModel, **more: Any
) -> Trainer:
    settings = {"accumulate_train_batch_on_tokens": True, "max_duration": config.max_duration} | more
    return Trainer(
        model=model,
        train_dataloader=packed_dataspec(batches),
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        device_train_microbatch_size=1,
        device="cpu",
        progress_bar=False,
        **settings,
    )
