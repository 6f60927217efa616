"""The examples run as a user runs them, without what they do not need, and weigh every target of a step alike."""

import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

COMPOSERS = ("composer", "streaming", "omegaconf")
"""What comes with the extra `train`, and which no example needs."""

HUGGING_FACES = ("transformers", "accelerate", "tokenizers")
"""What Hugging Face's Trainer needs."""

RUN = """
import runpy, sys, warnings
from pathlib import Path
example, *more = sys.argv[1:]
missing = [one for one in more if not one.endswith(".jsonl")]
sys.argv[1:] = [one for one in more if one.endswith(".jsonl")]
sys.modules.update(dict.fromkeys(missing))  # None stands for what cannot be imported
warnings.filterwarnings("error", module="composer_packing")
sys.path.insert(0, str(Path(example).parent))
runpy.run_path(example, run_name="__main__")
"""

ONE_STEP = """
import contextlib, copy, json, sys, tempfile
import torch
import torch.nn.functional as F
sys.path.insert(0, sys.argv[1])
from hf_trainer import PackedRows, TrainerModel, make_trainer
from packed_text import MODEL, packed_batches
from plain_pytorch import accumulate

# No two of these fit one row, so that rows are filled to different degrees.
texts = ["spam and eggs " * words for words in (19, 35, 22, 31) * 8]
with contextlib.closing(packed_batches(texts)) as first_epoch:
    batch = next(iter(first_epoch))
torch.manual_seed(17)
model = TrainerModel(MODEL).double()
start = [parameter.detach().clone() for parameter in model.parameters()]

losses = []
for row, labels in enumerate(batch["labels"]):
    logits = model.bert(batch["input_ids"][row], batch["cu_seqlens"][row], batch["max_seqlen"][row]).logits
    losses.append(F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)[labels != -100])
of_targets = torch.autograd.grad(torch.cat(losses).mean(), model.parameters(), retain_graph=True)
of_rows = torch.autograd.grad(torch.stack([loss.mean() for loss in losses]).mean(), model.parameters())

plain = copy.deepcopy(model.bert)
accumulate(plain, batch, torch.device("cpu"))
in_plain = [parameter.grad for parameter in plain.parameters()]

sgd = dict(max_steps=1, optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0)
with contextlib.closing(packed_batches(texts)) as batches, tempfile.TemporaryDirectory() as folder:
    make_trainer(model, PackedRows(batches), folder, **sgd).train()
in_trainer = [before - after.detach() for before, after in zip(start, model.parameters())]

def off(gradient):
    differences = [(one - other).norm() for one, other in zip(gradient, of_targets)]
    return float(torch.stack(differences).norm() / torch.stack([one.norm() for one in of_targets]).norm())

print(json.dumps([batch["num_targets"], off(in_plain), off(in_trainer), off(of_rows)]))
"""


def child(program: str, *arguments: str, timeout: int = 600) -> tuple[str, str]:
    """Output and errors of a Python program in a process of its own, which must end well."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def check_that_it_learned(shown: str) -> None:
    """The last line of an example: the loss starts at a guess among all words and ends far below."""
    found = re.search(r"loss (\S+) -> (\S+), [\d,]+ tokens of (\d+) kinds, packing efficiency (\S+)%$", shown.strip())
    assert found, shown
    first, last, words, efficiency = (float(number) for number in found.groups())
    assert abs(first - math.log(words)) < 0.5
    assert last < 0.7 * math.log(words)
    assert 98 < efficiency <= 100


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Output and errors of each example."""
    chats = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with chats.open("w") as file:
        for number in range(300):
            asked, told = f"What comes behind {number}?", f"Behind {number} comes {number + 1}."
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
            example = {"messages": chat} if number % 2 else {"prompt": f"{asked}\n", "response": told}
            file.write(json.dumps(example) + "\n")
    more = {
        "fine_tune": (str(chats),),
        "hf_trainer": COMPOSERS,
        "plain_pytorch": (*COMPOSERS, *HUGGING_FACES),
    }
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda name: child(RUN, str(EXAMPLES / f"{name}.py"), *more[name]), more)
        return dict(zip(more, ended, strict=True))


@pytest.mark.slow
def test_the_plain_loop_runs_where_composer_is_not_installed(told: dict[str, tuple[str, str]]) -> None:
    shown, errors = told["plain_pytorch"]
    check_that_it_learned(shown)
    assert errors == ""


@pytest.mark.slow
def test_hugging_faces_trainer_runs_where_composer_is_not_installed(told: dict[str, tuple[str, str]]) -> None:
    shown, errors = told["hf_trainer"]
    check_that_it_learned(shown)
    assert "composer_packing" not in errors


@pytest.mark.slow
def test_fine_tuning_learns_what_the_assistant_says(told: dict[str, tuple[str, str]]) -> None:
    shown, _ = told["fine_tune"]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", shown)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] / 2
    assert "0 examples dropped" in shown


@pytest.mark.slow
def test_every_target_of_a_step_weighs_the_same_in_both_examples_though_rows_hold_unequal_numbers() -> None:
    shown, _ = child(ONE_STEP, str(EXAMPLES))
    num_targets, off_in_plain, off_in_trainer, off_by_rows = json.loads(shown.splitlines()[-1])
    assert max(num_targets) > 1.3 * min(num_targets)
    assert max(off_in_plain, off_in_trainer) < 1e-6
    assert off_by_rows > 1e-2  # what a mean over rows would give: the comparison can tell


def test_importing_the_package_imports_nothing_that_only_training_or_others_need() -> None:
    outsiders = (*COMPOSERS, *HUGGING_FACES, "scipy", "pandas")
    shown, errors = child("import json, sys, composer_packing; print(json.dumps(sorted(sys.modules)))")
    assert set(outsiders) & set(json.loads(shown)) == set()
    assert errors == ""
