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
        "schedule   learning rate up to 100tok, down over the last 500tok",
        "schedule   batch size 4 -> 8 sequences to 1,000 tokens",
        "schedule   mask ratio 0.3 -> 0.1 from 2,000 to 3,000 tokens, which is after the end of this run",
    ]
