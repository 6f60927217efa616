"""The command as a user types it, in child processes."""

import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from composer_packing.config.loading import load_config
from composer_packing.data.mds.documents import MdsDocuments
from composer_packing.data.tokenizer import load_tokenizer
from composer_packing.model.modernbert import ModernBertForMaskedLM
from tests.tools import ROOT
from tests.tools.running import COMPOSER, SHORT, Done, figure, is_alive, result_of, run, training

NO_CACHE_FOLDER = ["yamls/pretrain.yaml", "data.cache_folder=Makefile/x"]


@pytest.fixture(scope="module")
def two_ranks(cache: Path) -> Done:
    """One short run on two ranks. Several tests look at it."""
    return run(
        *(COMPOSER, "-n", "2", "train.py", "yamls/pretrain.yaml", *SHORT, "run_name=short"),
        *(f"data.cache_folder={cache}", f"save_folder={cache}/{{run_name}}", "eval_interval=0.5dur"),
    )


@pytest.fixture(scope="module")
def forked(two_ranks: Done, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """More runs, without the launcher: one program imports Composer for all of them."""
    folders = [f"data.cache_folder={cache}", f"save_folder={cache}/{{run_name}}"]
    short = [*SHORT, *folders]
    causal = f"load_path={cache}/causal/latest-rank0.pt"
    runs: dict[str, tuple[int, list[str]]] = {
        "finished": (1, ["yamls/pretrain.yaml", *short, "run_name=short"]),
        "no cache folder": (1, [*NO_CACHE_FOLDER, f"save_folder={cache}/nothing"]),
        "causal": (2, ["yamls/causal.yaml", *short, "max_duration=40_000tok"]),
        "sft": (2, ["yamls/sft.yaml", *short, "max_duration=30_000tok", causal]),
    }
    folder = str(tmp_path_factory.mktemp("forked"))
    done = result_of(sys.executable, "-m", "tests.tools.ranks_of_runs", folder, json.dumps([*runs.values()]))
    return {name: Done(*each) for name, each in zip(runs, done, strict=True)}


@pytest.mark.slow
def test_two_ranks_train_and_say_what_they_did(two_ranks: Done) -> None:
    assert two_ranks.code == 0, two_ranks.err
    out = two_ranks.out
    assert "2 x cpu, fp32, attention: PyTorch SDPA by document" in out
    before, after = figure(r"evaluation loss +([\d.]+) -> ([\d.]+)", out)
    assert before == pytest.approx(math.log(4096), abs=0.1)
    assert after < before - 0.5
    documents, tokens, batches = figure(
        r"trained on +([\d,]+) documents and pieces, ([\d,]+) tokens, ([\d,]+) batches", out
    )
    assert 60_000 <= tokens < 66_000
    assert tokens / 4096 <= batches < tokens / 4055, "eight rows of 512 slots at the start of the warmup, 99 % full"
    assert documents > batches
    assert figure(r"packing efficiency +([\d.]+)", out)[0] > 0.99
    moved, waited = figure(r"documents moved past (\d+) others on average and waited (\d+) batches at most", out)
    assert moved < 20
    assert waited < 10
    assert 0 <= figure(r"waiting for data +([\d.]+)%", out)[0] <= 100
    assert figure(r"tokens per second +([\d,]+)", out)[0] > 0


@pytest.mark.slow
def test_the_checkpoint_holds_the_trained_weights(two_ranks: Done, cache: Path) -> None:
    path = re.search(r"checkpoint +(\S+)", two_ranks.out)
    assert path
    state = torch.load(ROOT / path[1], weights_only=False)["state"]
    model = ModernBertForMaskedLM(load_config(str(ROOT / "yamls" / "pretrain.yaml"), [], 1).model)
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in state["model"].items()}, strict=True)
    (folder,) = cache.glob("docs-*-256")
    documents = MdsDocuments(folder / "val", load_tokenizer(str(folder / "tokenizer")))
    ids = torch.from_numpy(documents.__getitems__(range(100)).tokens[:1000].astype("int64"))
    loss = model(ids, torch.tensor([0, 1000]).int(), 1000, ids).loss
    assert loss is not None
    assert loss.item() < math.log(4096) - 0.5, "the model has learned which words are frequent"


@pytest.mark.slow
def test_a_run_that_is_finished_says_so(two_ranks: Done, forked: dict[str, Done]) -> None:
    assert two_ranks.code == 0
    again = forked["finished"]
    assert again.code == 0
    (line,) = again.out.splitlines()
    assert re.fullmatch(
        r"finished   \S+-rank0.pt has reached max_duration=60000tok; another run_name or .* from the beginning", line
    )


@pytest.mark.slow
def test_a_run_resumes_after_its_launcher_was_killed_or_told_to_end(two_ranks: Done, cache: Path) -> None:
    """Ranks end with their launcher, however it ends. They write a checkpoint first, and leave no process behind."""
    assert two_ranks.code == 0
    for sent, ends_with, resumed in ((signal.SIGKILL, -9, False), (signal.SIGTERM, 143, True)):
        with training(cache, "run_name=ended", "console_log_interval=1ba", "save_interval=1000ba") as process:
            assert process.stdout is not None
            assert process.stderr is not None
            told = time.monotonic()
            process.send_signal(sent)
            process.stderr.read()  # returns when the last process that holds it has ended
            out = process.stdout.read()
            assert time.monotonic() - told < 30
            assert process.wait(100) == ends_with
            assert re.search(r"stopped    by SIGTERM after batch \d+; the same command resumes from \S+.pt", out)
            assert ("resumed    after batch" in out) is resumed
            until = time.monotonic() + 60
            while is_alive(process.pid):
                assert time.monotonic() < until
                time.sleep(0.1)
    assert len(list((cache / "ended").glob("ep*.pt"))) == 2


@pytest.mark.slow
def test_fine_tuning_starts_from_a_causal_checkpoint_of_ours_on_two_ranks(forked: dict[str, Done], cache: Path) -> None:
    causal = forked["causal"]
    assert causal.code == 0, causal.err
    assert "objective  causal, predict the token after each" in causal.out
    before, after = figure(r"evaluation loss +([\d.]+) -> ([\d.]+)", causal.out)
    assert before == pytest.approx(math.log(4096), abs=0.1)
    assert after < before - 0.5

    sft = forked["sft"]
    assert sft.code == 0, sft.err
    assert f"weights    from {cache}/causal/latest-rank0.pt" in sft.out
    examples, cut, dropped = figure(
        r"data +([\d,]+) of [\d,]+ examples, .*; ([\d,]+) longer than 256 cut, (\d+) dr", sft.out
    )
    assert examples > 10_000 > cut > dropped
    start, end = figure(r"evaluation loss +([\d.]+) -> ([\d.]+)", sft.out)
    assert start < before - 0.5, "fine-tuning starts from the weights of the causal run"
    assert end < start


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (NO_CACHE_FOLDER, "data.cache_folder=Makefile/x: Not a directory: Makefile/x; give"),
        (["yamls/pretrain.yaml", "max_seq_len=7"], "max_seq_len=7: must be at least 8"),
        (["yamls/pretrain.yaml", "device_train_microbatch_size=auto"], "device_train_microbatch_size=auto: "),
        (
            ["yamls/pretrain.yaml", "global_train_batch_size=9"],
            "global_train_batch_size=9: must be a positive multiple of 2",
        ),
        (["yamls/pretrain.yaml", "sequnce_packing=true"], "there is no key sequnce_packing"),
        (["yamls/pretrain.yaml", "precision=amp_bf16", "device=cpu"], "precision=amp_bf16: on the cpu it must be fp32"),
    ],
)
def test_a_mistake_that_the_user_can_fix_is_one_line_without_a_traceback(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """A mistake in the configuration shows in this process; a folder is only looked at in a process of its own."""
    if arguments == NO_CACHE_FOLDER:
        code, _, err = request.getfixturevalue("forked")["no cache folder"]
    else:
        code, err = train.main(arguments), capsys.readouterr().err
    assert code == 2
    (line,) = err.strip().splitlines()
    assert words in line


@pytest.mark.slow
def test_a_record_one_rank_cannot_read_ends_both_with_the_error(two_ranks: Done, cache: Path) -> None:
    assert two_ranks.code == 0
    started = time.monotonic()
    done = run(
        *(COMPOSER, "-n", "2", "-m", "tests.tools.ranks_broken_record", "yamls/pretrain.yaml", "progress_bar=false"),
        *(f"data.cache_folder={cache}", f"save_folder={cache}/{{run_name}}"),
    )
    assert done.code != 0
    assert "OSError: record 1500 cannot be read" in done.out, "the launcher shows there what a failed rank printed"
    assert time.monotonic() - started < 200, "well below the five minutes after which a collective gives up"


@pytest.mark.slow
def test_ctrl_c_ends_the_launcher_its_ranks_and_their_workers_while_they_train(two_ranks: Done, cache: Path) -> None:
    assert two_ranks.code == 0
    with training(cache, "run_name=interrupted") as process:
        assert process.stderr is not None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.stderr.read()  # returns when the last process that holds it has ended
        assert process.wait(100) in (130, 143), "by SIGINT, or by the SIGTERM that the launcher sends after it"
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


@pytest.mark.slow
def test_the_launcher_reports_a_mistake_as_a_failure_and_shows_the_line() -> None:
    done = run(COMPOSER, "-n", "2", "train.py", "yamls/pretrain.yaml", "global_train_batch_size=18")
    assert done.code != 0
    shown = done.err + done.out  # the launcher shows the second rank's line on stdout, if that rank was first
    assert "global_train_batch_size=18: must be a positive multiple of 4, which is 2 ranks times" in shown
    assert "Traceback" not in shown


def test_without_arguments_the_usage_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        train.main([])
    assert ended.value.code == 2
    assert "usage: composer train.py FILE.yaml" in capsys.readouterr().err
