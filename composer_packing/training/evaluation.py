"""Evaluation: the held-out batches, when they are evaluated, and the loss."""

from collections.abc import Callable, Sequence

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
from composer_packing.packing.source_batch import FlatSourceBatch
from composer_packing.training.batches import make_packer

EVAL_SEED = 0
"""Seed of the masks in evaluation. It is not the seed of the run, so that the losses of different runs compare."""


def eval_batches(documents: Documents, config: TrainConfig, vocabulary: Vocabulary) -> list[Batch]:
    """Pack this rank's share of the held-out documents, once for all evaluations.

    At most `eval_loader.max_documents` documents are taken, evenly spread over all. Each of them is in exactly one
    batch. Its masks depend only on its number in the dataset. Every rank gets the same number of batches: a rank that
    has fewer gets rows of padding, which do not count in the loss.

    Args:
        documents: the held-out documents of all ranks.
        config: the run.
        vocabulary: of their tokenizer.

    Raises:
        ConfigError: no token is a target on any rank, or the packer refuses the documents.
    """
    source = _source_batches(documents, config)
    packer = make_packer(source, config, vocabulary, config.eval_loader.mlm_probability, EVAL_SEED, Tail.EMIT)
    try:
        batches = [with_counts(batch) for batch in packer]
    except ValueError as error:
        raise ConfigError(f"documents to evaluate on: {error}") from error
    account = packer.token_account
    assert account.read == account.emitted + account.truncated + account.without_targets
    targets = sum(get_num_targets_in_packed_batch(batch) for batch in batches)
    of_all_ranks = dist.all_gather_object((len(batches), targets))
    if not any(targets for _, targets in of_all_ranks):
        raise ConfigError(_nothing_to_predict(config, _num_documents(documents, config)))
    most = max(count for count, _ in of_all_ranks)
    padding = with_counts(_row_of_padding(config.row_len, vocabulary.pad_token_id))
    return batches + [padding] * (most - len(batches))


def _num_documents(documents: Documents, config: TrainConfig) -> int:
    return min(len(documents), config.eval_loader.max_documents)


def _source_batches(documents: Documents, config: TrainConfig) -> Sequence[FlatSourceBatch]:
    """This rank's share of the documents to evaluate on."""
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    chosen = np.linspace(0, len(documents), _num_documents(documents, config), endpoint=False).astype(np.int64)
    share, size = chosen[rank::world_size], config.device_batch_size(world_size)
    return [documents.__getitems__(share[start : start + size]) for start in range(0, len(share), size)]


def _nothing_to_predict(config: TrainConfig, num_documents: int) -> str:
    if config.objective == Objective.MLM:
        cause = f"eval_loader.mlm_probability={config.eval_loader.mlm_probability}: raise it, or"
    else:
        cause = f"objective={config.objective}:"
    return f"{cause} give more documents: no token of the {num_documents} held-out documents is a target"


def _row_of_padding(row_len: int, pad_token_id: int) -> Batch:
    return {
        "input_ids": torch.full((1, row_len), pad_token_id),
        "labels": torch.full((1, row_len), IGNORE_INDEX),
        "cu_seqlens": [torch.tensor([0, row_len], dtype=torch.int32)],
        "max_seqlen": [row_len],
        "attention_mask": torch.zeros((1, row_len), dtype=torch.int64),
    }


def evaluation_times(interval: str) -> Callable[[State, Event], bool]:
    """When to evaluate: after each interval, and after the last batch.

    Left to itself, Composer would evaluate for the last time after the last checkpoint. That checkpoint could then not
    say whether the last evaluation was interrupted.

    Args:
        interval: time between evaluations, such as `1000tok`, `50sp` or `10ba`.
    """
    times: Callable[[State, Event], bool] = create_interval_scheduler(
        interval, checkpoint_events=False, final_events={Event.BATCH_END}
    )
    return times


def evaluate(trainer: Trainer) -> float:
    """Evaluate now; returns the loss as `eval_loss` does."""
    trainer.eval()
    return eval_loss(trainer)


def eval_loss(trainer: Trainer) -> float:
    """Cross entropy of the last evaluation, in nats per target over all ranks. Every rank must call this."""
    return float(trainer.state.eval_metrics["eval"]["LanguageCrossEntropy"].compute())
