import re
from pathlib import Path

import pytest
import yaml

from composer_packing.config.loading import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_code_in_the_readme_runs_as_written(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.findall(r"^ *print\(.*\)  # (.+)$", code, re.MULTILINE)
    assert shown
    for text in shown:
        assert all(part in printed for part in text.split(" and ")), printed


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", README, re.DOTALL))
def test_every_yaml_in_the_readme_goes_with_a_run(text: str, tmp_path: Path) -> None:
    sizes = {"max_duration": "1ba", "global_train_batch_size": 2, "device_train_microbatch_size": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sizes | yaml.safe_load(text)))
    assert len(load_config(str(tmp_path / "run.yaml"), [], 1).data.sources) == 1


def test_every_file_in_the_readmes_tree_is_there_and_every_module_is_in_it() -> None:
    tree = next(block for block in README.split("```")[1::2] if block.startswith("\ntrain.py"))
    named = re.findall(r"[a-z_]+\.(?:py|yaml)\b", tree)
    there = {
        path.name
        for folder in ("composer_packing", "yamls", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.*")
    }
    assert {*named} <= there | {"train.py", "reference.py"}
    modules = {path.name for path in (ROOT / "composer_packing").rglob("*.py")} - {"__init__.py"}
    assert modules <= {*named}


def test_every_test_that_the_documentation_names_is_where_it_says() -> None:
    page = (ROOT / "docs" / "what_a_packed_batch_weighs.md").read_text()
    named = re.findall(r"`(test_\w+)`, `(tests/\w+\.py)`", page)
    assert len(named) == page.count("`test_") > 10
    for test, file in named:
        assert f"def {test}(" in (ROOT / file).read_text(), test
