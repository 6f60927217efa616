"""README.md and docs/: what they show runs, and what they name exists."""

import pydoc
import re
import runpy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import composer_packing
from composer_packing.common.errors import ConfigError
from composer_packing.config.loading import load_config
from composer_packing.data.prepare.command import _parser
from tests.tools import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PACKAGE = Path(composer_packing.__file__).parent


class Block(NamedTuple):
    """A fenced block of a page; `kind` is what stands behind its fence."""

    page: Path
    line: int
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in found]


def prose_of(page: Path) -> str:
    """A page without its fenced blocks and comments."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]

SNIPPETS = [
    pytest.param(block, id=block.name, marks=[pytest.mark.slow] if "Trainer(" in block.text else [])
    for block in BLOCKS
    if block.kind == "python"
]

TOOLS = "make|python|composer|pip"


def commands() -> list[tuple[str, str]]:
    """Every command that a page shows, in a block or within a sentence, and where."""
    shown = [
        (block.name, line.removeprefix("$ ").partition("  #")[0].strip())
        for block in BLOCKS
        if block.kind == ""
        for line in block.text.splitlines()
        if re.match(rf"(\$ )?({TOOLS}) ", line)
    ]
    inline = [
        (page.name, command) for page in PAGES for command in re.findall(rf"`((?:{TOOLS}) [^`]+)`", prose_of(page))
    ]
    return list(dict.fromkeys([*shown, *inline]))


@pytest.mark.parametrize("block", SNIPPETS)
def test_python_code_runs_as_written_and_prints_what_it_says(
    block: Block, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.name, "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.MULTILINE)
    assert shown
    for text in shown:
        assert all(part in printed for part in text.split(" and ")), printed


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "yaml"], ids=lambda block: block.name)
def test_every_yaml_block_belongs_to_a_run(block: Block, tmp_path: Path) -> None:
    sizes = {"max_duration": "1ba", "global_train_batch_size": 2, "device_train_microbatch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sizes | yaml.safe_load(block.text)))
    assert len(load_config(str(tmp_path / "run.yaml"), [], 1).data.sources) == 1


@pytest.mark.parametrize(("where", "command"), commands())
def test_every_command_has_targets_options_files_and_keys_that_exist(
    where: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tool, *words = shlex.split(command)
    if ">" in words:
        words = words[: words.index(">")]
    metadata = (ROOT / "pyproject.toml").read_text()
    if tool == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif tool == "pip":
        assert words[0] == "install"
        for extra in re.findall(r"\[(.+)\]", command):
            assert all(f"\n{name} = [" in metadata for name in extra.split(","))
        assert all(f'"{word}>=' in metadata for word in words[1:] if word != "-e" and not word.startswith("."))
    elif words[:2] == ["-m", "composer_packing.prepare"]:
        _parser().parse_args(words[2:])  # an unknown option would end the process
    else:
        ranks = int(words[1]) if words[0] == "-n" else 1
        program, *arguments = words[2:] if words[0] == "-n" else words
        assert (ROOT / program).is_file()
        if program == "train.py" and (command not in SHOWN_ERRORS):
            load_config(arguments[0], arguments[1:], ranks)


SHOWN_ERRORS = {
    command: error
    for block in BLOCKS
    for command, error in re.findall(r"^\$ (python train\.py .*)\ntrain\.py: (.*)$", block.text, re.MULTILINE)
}


@pytest.mark.parametrize("command", SHOWN_ERRORS)
def test_every_shown_mistake_gives_the_shown_error(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, _, file, *overrides = shlex.split(command)
    with pytest.raises(ConfigError, match=re.escape(SHOWN_ERRORS[command]) + "$"):
        load_config(file, overrides, 1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_of_prepare_that_a_page_names_exists(page: Path) -> None:
    known = {option for action in _parser()._actions for option in action.option_strings}
    assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose_of(page))} <= known


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    for name in re.findall(r"`((?:tests|benchmarks|yamls|examples|docs|composer_packing)/[\w./*-]*)`", prose_of(page)):
        assert list(ROOT.glob(name.rstrip("/"))), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_test_that_a_page_names_is_in_the_file_that_it_names(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`(test_\w+)`, `(tests/[\w/]+\.py)`", text)
    assert len(named) == text.count("`test_")
    for test, file in named:
        assert f"def {test}(" in (ROOT / file).read_text(), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_dotted_name_that_a_page_shows_can_be_imported(page: Path) -> None:
    for name in re.findall(r"`(composer_packing(?:\.\w+)+)`", prose_of(page)):
        assert pydoc.locate(name) is not None, name


def test_every_module_that_the_changelog_says_is_new_can_be_imported() -> None:
    rows = re.findall(r"^\| `composer_packing.* \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for name in re.findall(r"`(composer_packing[\w.]*)`", " ".join(rows)):
        assert pydoc.locate(name) is not None, name


def test_every_key_of_a_run_that_a_page_names_exists() -> None:
    tables = (DOCS / "configuration.md").read_text()
    known = {*re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE)}
    for heading in re.findall(r"^## (`.*)$", tables, re.MULTILINE):
        known |= {*re.findall(r"`([\w.]+)`", heading)}
    roots = "train_loader|eval_loader|scheduler|optimizer|data|model"
    for page in PAGES:
        for key in re.findall(rf"`((?:{roots})\.\w[\w.]*?)(?:[:=][^`]*)?`", prose_of(page)):
            assert key in known, (page.name, key)


def test_the_tables_of_the_configuration_are_those_of_the_schema() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert runpy.run_path(str(DOCS / "make_configuration.py"))["make_page"](page) == page, "run make configuration"


def test_the_page_of_metrics_lists_every_metric_of_a_batch() -> None:
    logged = re.findall(r'"(packing/\w+)"', (PACKAGE / "training" / "monitor.py").read_text())
    listed = re.findall(r"^\| `(packing/\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(logged))


def test_every_class_that_the_page_of_internals_names_is_used_in_the_package() -> None:
    text = (DOCS / "internals.md").read_text()
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    named = {*re.findall(r"\b[A-Z][a-z]+[A-Z]\w+", text)} - {"ModernBERT", "PyTorch", "OMP_WAIT_POLICY"}
    assert len(named) > 15
    assert {name for name in named if not re.search(rf"\b{name}\b", source)} == set()


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
