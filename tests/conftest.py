"""What several test modules need."""

import gc
import json
import os
import threading
from collections.abc import Iterator
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


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fails a test behind which there are other threads than before it."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert set(threading.enumerate()) == before
