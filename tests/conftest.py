"""What several test modules need."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Compiling and a busy machine make single calls slow, which is no fault; CI draws the same cases each time.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Inputs and the batches and schedule values they must give, to the bit."""
    loaded: dict[str, Any] = json.loads((HERE / "golden_packing.json").read_text())
    return loaded
