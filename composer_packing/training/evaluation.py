"""Evaluation: its batches, its times, and its loss."""

from collections.abc import Callable

import numpy as np
import torch
from composer import Event, State, Trainer
from composer.utils import create_interval_scheduler, dist

from composer_packing.batch.contract import IGNORE_INDEX, Batch, with_counts
from composer_packing.batch.microbatches import get_num_targets_in_packed_batch
from composer_packing.common.errors import ConfigError
from composer_packing.config.schema import TrainConfig
from composer_packing.data.open_source import Documents
from composer_packing.data.tokenizer import Vocabulary
from composer_packing.packing.options import Objective, Tail
from composer_packing.training.batches import make_packer


def evaluation_times(interval: str) -> Callable[[State, Event], bool]:
    """When to evaluate: at an interval, and behind the last batch.

    Composer itself would do the last behind the last checkpoint, which could not tell then that it was broken off.
    """
    times: Callable[[State, Event], bool] = create_interval_scheduler(
        interval, checkpoint_events=False, final_events={Event.BATCH_END}
    )
    return times


def evaluate(trainer: Trainer) -> float:
    """Evaluate now, and give the loss."""
    trainer.eval()
    return eval_loss(trainer)


def eval_loss(trainer: Trainer) -> float:
    """Cross entropy per target of the last evaluation, over all ranks; every rank must ask."""
    return float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())


EVAL_SEED = 0
"""Evaluation masks do not follow the seed of a run, so that runs compare."""


def eval_batches(documents: Documents, config: TrainConfig, vocabulary: Vocabulary) -> list[Batch]:
    """This rank's share of the documents in batches, with masks made once.

    Every document is in exactly one batch, up to `eval_loader.max_documents` of them, evenly over all; its masks depend
    on nothing but its place in the dataset. Ranks get equally many batches: those that have fewer are given rows of
    padding, which weigh nothing.

    Args:
        documents: what all ranks share.
        config: the run.
        vocabulary: of their tokenizer.

    Raises:
        ConfigError: there is no target to evaluate, or the packer refuses the documents.
    """
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    count = min(len(documents), config.eval_loader.max_documents)
    share = np.linspace(0, len(documents), count, endpoint=False).astype(np.int64)[rank::world_size]
    step = config.device_batch_size(world_size)
    source = [documents.__getitems__(share[at : at + step]) for at in range(0, len(share), step)]
    packer = make_packer(source, config, vocabulary, config.eval_loader.mlm_probability, EVAL_SEED, Tail.EMIT)
    try:
        batches = [with_counts(batch) for batch in packer]  # once, not at every evaluation
    except ValueError as error:
        raise ConfigError(f"documents to evaluate on: {error}") from error
    account = packer.token_account
    assert account.read == account.emitted + account.truncated + account.without_targets
    targets = sum(get_num_targets_in_packed_batch(batch) for batch in batches)
    ranks = dist.all_gather_object((len(batches), targets))
    if not any(targets for _, targets in ranks):
        of_mlm = config.objective == Objective.MLM
        mlm_probability = config.eval_loader.mlm_probability
        what = f"eval_loader.{mlm_probability=}: raise it, or" if of_mlm else f"objective={config.objective}:"
        raise ConfigError(f"{what} give more documents: no token of {count} that are held out is a target")
    most = max(count for count, _ in ranks)
    padding = with_counts(_row_of_padding(config.row_len, vocabulary.pad_token_id))
    return batches + [padding] * (most - len(batches))


def _row_of_padding(row_len: int, pad_token_id: int) -> Batch:
    return {
        "input_ids": torch.full((1, row_len), pad_token_id),
        "labels": torch.full((1, row_len), IGNORE_INDEX),
        "cu_seqlens": [torch.tensor([0, row_len], dtype=torch.int32)],
        "max_seqlen": [row_len],
        "attention_mask": torch.zeros((1, row_len), dtype=torch.int64),
    }
