import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_code_in_the_readme_runs_as_written(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert "torch.Size([4, 256])" in capsys.readouterr().out


def test_every_file_the_readme_names_is_there() -> None:
    root = Path(__file__).parent.parent
    named = set(re.findall(r"\b[a-z_]+\.(?:py|yaml)\b", README)) - {"main.py"}
    there = {path.name for path in root.rglob("*.*") if ".venv" not in path.parts}
    assert named <= there
