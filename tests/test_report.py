import pytest

from composer_packing.config import SchedulerConfig, TrainLoaderConfig
from composer_packing.model import ModernBertForMaskedLM
from composer_packing.report import start_lines
from tests.test_dataspec import config_of, documents_of


def test_the_start_says_what_will_be_trained_for_how_long() -> None:
    documents = documents_of(60)
    config = config_of(
        max_duration="2560tok",
        scheduler=SchedulerConfig("100tok", "500tok"),
        train_loader=TrainLoaderConfig(
            batch_size_warmup_min_size=4,
            batch_size_warmup_tokens="1000tok",
            masking_ratio_cooldown_start_tokens="2000tok",
            masking_ratio_cooldown_tokens="1000tok",
            final_masking_ratio=0.1,
        ),
    )
    model = ModernBertForMaskedLM(config.model)
    lines = start_lines(config, documents, model, "cpu", "fp32", world_size=2).splitlines()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert lines == [
        "device     2 x cpu, fp32, attention: PyTorch SDPA by document (no GPU)",
        f"model      {parameters:,} parameters, ln(vocabulary) = 4.16",
        f"data       60 documents, {documents.num_tokens:,} tokens; {documents.num_split} longer than 16 "
        "come in pieces",
        "batch      4 rows of 32 slots = 128 slots",
        f"duration   2,560 tokens = about 20 full batches = {2560 / documents.num_tokens:.2f} epochs",
        "schedule   learning rate up over 100 tokens, down over the last 500 tokens",
        "schedule   batch size 4 -> 8 sequences to 1,000 tokens",
        "schedule   mask ratio 0.3 -> 0.1 from 2,000 to 3,000 tokens, which is after the end of this run",
    ]


@pytest.mark.parametrize(
    ("length", "said"),
    [("20ba", "20 batches = about 20 full batches"), ("300sp", "300 documents = about {batches:,.0f} full batches")],
)
def test_a_duration_in_batches_or_documents_is_said_in_epochs_too(length: str, said: str) -> None:
    documents = documents_of(60)
    tokens = 20 * 128 if length == "20ba" else 300 * documents.num_tokens / len(documents)
    config = config_of(
        max_duration=length,
        train_loader=TrainLoaderConfig(batch_size_warmup_min_size=4, batch_size_warmup_tokens="30ba"),
    )
    lines = start_lines(
        config, documents, ModernBertForMaskedLM(config.model), "cpu", "fp32", world_size=1
    ).splitlines()
    epochs = tokens / documents.num_tokens
    assert f"duration   {said.format(batches=tokens / 128)} = {epochs:.2f} epochs" in lines
    after = ", which is after the end of this run" if length == "20ba" else ""
    assert lines[-1] == f"schedule   batch size 4 -> 8 sequences to 30 batches{after}"
