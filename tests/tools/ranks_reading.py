"""A program of its own: what 1, 2 and 4 ranks are fed over three epochs and evaluate. Prints a JSON line.

Document `d` is made of the id `d + 5`, so that a token tells which document it is from.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from composer.utils import dist

from composer_packing.batch.contract import Batch
from composer_packing.data.tokenizer import Vocabulary
from composer_packing.training.batches import train_batches
from composer_packing.training.evaluation import eval_batches
from tests.tools.array_documents import DocumentDataset
from tests.tools.forked import on_ranks
from tests.tools.reference import RESULT, masked_documents
from tests.tools.runs import config_of

EPOCHS = 3
VOCABULARY = Vocabulary(1000, 0, 4, range(5))


def numbered(count: int) -> DocumentDataset:
    """Documents of 1 to 16 tokens."""
    lengths = np.random.default_rng(0).integers(1, 17, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return DocumentDataset(np.repeat(np.arange(5, count + 5, dtype=np.uint16), lengths), offsets, 16)


def told(batches: list[Batch]) -> list[Any]:
    """`[document, as it is seen, its labels]` of every document."""
    return [[original[0] - 5, seen, labels] for original, seen, labels in masked_documents(batches)]


def fed(count: int) -> dict[str, Any]:
    batches = train_batches(numbered(count), config_of(mlm_probability=0.5), VOCABULARY)
    train = [list(batches) for _ in range(EPOCHS)]
    batches.close()
    evaluation = eval_batches(numbered(count), config_of(), VOCABULARY)
    return {
        "train": [told(epoch) for epoch in train],
        "batches": [len(epoch) for epoch in train],
        "eval": told(evaluation),
        "eval_batches": len(evaluation),
    }


def ranks_fed() -> dict[int, Any]:
    """With many documents, and with fewer than there are ranks: what each rank is fed."""
    dist.initialize_dist("cpu")
    return {count: dist.all_gather_object(fed(count)) for count in (101, 3)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(RESULT + json.dumps({size: on_ranks(size, ranks_fed, Path(folder))[0] for size in (1, 2, 4)}))
