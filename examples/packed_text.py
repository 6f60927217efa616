"""The data and the model of two examples: packed docstrings, and a small model that predicts masked bytes.

Nothing is downloaded, and there is no tokenizer. The texts are numpy's docstrings. An id is the value of a byte plus
the number of special tokens.
"""

import random
from collections.abc import Sequence

from composer_packing import (
    BufferedIterable,
    KeyedMasking,
    OverLong,
    SubsetSumSequencePacker,
    Tail,
    flat_source_batch,
)
from composer_packing.batch.contract import Batch
from composer_packing.data.docstrings import extract as documentation
from composer_packing.model.config import ModernBertConfig

SPECIAL = PAD, CLS, SEP, MASK = range(4)
VOCAB_SIZE = len(SPECIAL) + 256
ROWS = 4
"""Rows of an optimizer step; one row is one microbatch."""

MODEL = ModernBertConfig(VOCAB_SIZE, 64, 96, num_hidden_layers=3, num_attention_heads=2, attn_out_dropout=0.0)


def texts() -> list[str]:
    """Docstrings, shuffled in the same way at every call."""
    files = [path for name, path in documentation.source_files() if name.startswith("numpy/")]
    found = list(documentation.documents(files))
    random.Random(0).shuffle(found)
    return found


def packed_batches(texts: Sequence[str]) -> BufferedIterable[Batch]:
    """Batches; every `iter()` is an epoch. `close()` ends the thread that packs them."""
    documents = [
        {"input_ids": [CLS, *(byte + len(SPECIAL) for byte in text.encode()), SEP], "document": number}
        for number, text in enumerate(texts)
    ]
    size = 4 * ROWS  # documents of a source batch; in a real run a DataLoader gives them, shuffled for each epoch
    source = [flat_source_batch(documents[i : i + size], VOCAB_SIZE, numbered=True) for i in range(0, len(texts), size)]
    packer = SubsetSumSequencePacker.from_composer(
        source,
        batch_size=size,
        micro_batch_size=size // ROWS,
        max_seq_len=128,  # a row has four times as many slots
        buffer_size=8 * size,
        pad_token_id=PAD,
        mask_token_id=MASK,
        keyed_masking=KeyedMasking(seed=17, vocab_size=VOCAB_SIZE, special_token_ids=SPECIAL),
        tail=Tail.CARRY,  # so that every batch has all its rows
        over_long=OverLong.SPLIT,
    )
    return BufferedIterable(packer, buffer_size=2)
