from dataclasses import replace

import pytest

from composer_packing.config.schema import SchedulerConfig, TrainConfig, TrainLoaderConfig
from composer_packing.data.open_source import Split, TrainingData
from composer_packing.data.tokenizer import TextTokenizer, fast_tokenizer, train_tokenizer
from composer_packing.model.config import ModernBertConfig
from composer_packing.model.modernbert import ModernBertForMaskedLM
from composer_packing.training.monitor import RunSummary
from composer_packing.training.report import end_lines, finished_line, start_lines, stopped_line
from tests.tools import ROOT
from tests.tools.array_documents import DocumentDataset
from tests.tools.runs import config_of, documents_of


def data_of(documents: DocumentDataset) -> TrainingData:
    tokenizer = TextTokenizer(fast_tokenizer(train_tokenizer(["Few words."], 300)))
    train, val = (
        Split(split, len(split), split.num_tokens, f"{len(split)} documents")
        for split in (documents, documents_of(7, longest=16))
    )
    return TrainingData(tokenizer, train, val)


def test_the_start_says_what_will_be_trained_and_for_how_long() -> None:
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
    lines = start_lines(config, data_of(documents), model, "cpu", "fp32", world_size=2).splitlines()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert lines == [
        "device     2 x cpu, fp32, attention: PyTorch SDPA by document (no GPU)",
        f"model      {parameters:,} parameters, ln(vocabulary) = 4.16",
        "objective  mlm, predict 30% of the tokens",
        f"data       {len(documents)} documents",
        "held out   7 of 7 documents to evaluate on",
        "batch      4 rows of 32 slots = 128 slots",
        f"duration   2,560 tokens = about 20 full batches = {2560 / documents.num_tokens:.2f} epochs",
        "schedule   learning rate rises over 100 tokens, falls over the last 500 tokens",
        "schedule   batch size 4 -> 8 sequences by 1,000 tokens",
        "schedule   mask ratio 0.3 -> 0.1 from 2,000 to 3,000 tokens, which is after the end of this run",
    ]


def test_the_start_says_what_is_predicted_and_where_it_starts_from() -> None:
    documents = documents_of(60)
    model = ModernBertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, causal=True)
    config = config_of(objective="sft", model=model, load_path="runs/a.pt", load_weights_only=True)
    lines = start_lines(
        config, data_of(documents), ModernBertForMaskedLM(model), "cpu", "fp32", world_size=1
    ).splitlines()
    assert lines[2:5] == [
        "objective  sft, predict the tokens of each response",
        "weights    from runs/a.pt; data, clock and optimizer start from the beginning",
        f"data       {len(documents)} documents",
    ]
    config.load_weights_only = False
    lines = start_lines(
        config, data_of(documents), ModernBertForMaskedLM(model), "cpu", "fp32", world_size=1, first_batch=1200
    ).splitlines()
    assert lines[3] == "resumed    after batch 1,200, from runs/a.pt"
    config = config_of(objective="causal", model=model)
    lines = start_lines(
        config, data_of(documents_of(60)), ModernBertForMaskedLM(model), "cpu", "fp32", world_size=1
    ).splitlines()
    assert lines[2] == "objective  causal, predict the token after each"


@pytest.mark.parametrize(
    ("length", "said"),
    [("20ba", "20 batches = about 20 full batches"), ("300sp", "300 documents = about {batches:,.0f} full batches")],
)
def test_a_duration_in_batches_or_documents_is_given_in_epochs_too(length: str, said: str) -> None:
    documents = documents_of(60)
    tokens = 20 * 128 if length == "20ba" else 300 * documents.num_tokens / len(documents)
    config = config_of(
        max_duration=length,
        train_loader=TrainLoaderConfig(batch_size_warmup_min_size=4, batch_size_warmup_tokens="30ba"),
    )
    lines = start_lines(
        config, data_of(documents), ModernBertForMaskedLM(config.model), "cpu", "fp32", world_size=1
    ).splitlines()
    epochs = tokens / documents.num_tokens
    assert f"duration   {said.format(batches=tokens / 128)} = {epochs:.2f} epochs" in lines
    after = ", which is after the end of this run" if length == "20ba" else ""
    assert lines[-1] == f"schedule   batch size 4 -> 8 sequences by 30 batches{after}"


SUMMARY = RunSummary(
    num_documents=1234,
    num_tokens=56_789,
    num_batches=12,
    packing_efficiency=0.99987,
    tokens_per_second=4321.9,
    data_wait_share=0.00123,
    longest_wait_batches=2,
    mean_displacement=13.6,
)


def test_the_end_says_what_was_trained_on_and_how() -> None:
    assert end_lines(SUMMARY, 8.3456, 4.2222, "runs/a/ep1.pt").splitlines() == [
        "trained on           1,234 documents and pieces, 56,789 tokens, 12 batches",
        "packing efficiency   0.9999 of the slots held a token",
        "order of the data    documents moved past 14 others on average and waited 2 batches at most",
        "tokens per second    4,322",
        "waiting for data     0.12% of the time",
        "evaluation loss      8.346 -> 4.222",
        "checkpoint           runs/a/ep1.pt",
    ]


def test_a_finished_or_stopped_run_says_how_to_continue() -> None:
    config = TrainConfig(run_name="a", save_folder="runs/a", load_path="old.pt", max_duration="9ba")
    line = "finished   old.pt has reached max_duration=9ba; "
    assert finished_line(config, resumes_own_run=True) == (
        f"{line}another run_name or save_overwrite=true trains from the beginning"
    )
    assert finished_line(replace(config, save_folder="s3://runs/a"), resumes_own_run=True, loss=4.5) == (
        f"evaluation loss      4.500\n{line}another run_name trains from the beginning"
    )
    assert finished_line(config, resumes_own_run=False) == (
        f"{line}a longer max_duration continues from there, load_weights_only=true starts again with its weights"
    )
    stopped = "stopped    by SIGTERM after batch "
    assert stopped_line(config, 7, "a.pt") == f"{stopped}7; the same command resumes from a.pt"
    assert stopped_line(replace(config, run_name=None), 7, "a.pt") == f"{stopped}7; resume with load_path=a.pt"
    in_store = replace(config, save_folder="s3://runs/a", autoresume=False)
    assert stopped_line(in_store, 7, "s3://a.pt") == f"{stopped}7; resume with another run_name and load_path=s3://a.pt"
    assert stopped_line(config, 0, None) == f"{stopped}0; there is no checkpoint yet"


def test_the_readme_shows_a_run_as_it_prints_now() -> None:
    readme = (ROOT / "README.md").read_text()
    shown = next(block for block in readme.split("```")[1::2] if block.startswith("\ndevice"))
    last_lines = shown.strip().splitlines()[-len(end_lines(SUMMARY, 1, 1, None).splitlines()) :]
    assert [line[:21] for line in last_lines] == [line[:21] for line in end_lines(SUMMARY, 1, 1, None).splitlines()]
