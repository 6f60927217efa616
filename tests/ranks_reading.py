"""Run by `composer -n 2`: what two ranks read, mask and evaluate. Prints one JSON line on the first rank."""

import json

import numpy as np
from composer.utils import dist

from composer_packing.batch import IGNORE_INDEX
from composer_packing.dataspec import eval_batches, train_batches
from tests.reference import originals
from tests.test_dataspec import config_of, documents_of
from train import leave

COUNT = 101


def main() -> None:
    dist.initialize_dist("cpu")
    documents = documents_of(COUNT, longest=16)
    config = config_of()
    batches = train_batches(documents, config)
    train = list(batches)
    batches.close()
    evaluation = eval_batches(documents, config)
    masks = np.concatenate([(batch["labels"][0] != IGNORE_INDEX).numpy() for batch in train[:3]])
    mine = {
        "train": originals(train),
        "eval": originals(evaluation),
        "eval_batches": len(evaluation),
        "masks": masks.tolist(),
    }
    ranks = dist.all_gather_object(mine)
    if dist.get_global_rank() == 0:
        print(json.dumps({"documents": [documents[i]["input_ids"].tolist() for i in range(COUNT)], "ranks": ranks}))


main()
leave(0)
