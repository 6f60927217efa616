"""What several test modules need."""

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from hypothesis import settings
from moto.server import ThreadedMotoServer

# Tests run in two processes at once, and many start two ranks: with more threads each they would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch, which no line above imports, reads it when it is loaded

# Compiling and a busy machine make single calls slow, which is no fault. In CI each run draws the same examples.
# Elsewhere examples are random: one that fails is printed, kept in .hypothesis, and comes first in the next run.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("here")

SLOWEST_FIRST = (
    *("train", "best_fit", "killed", "ranks", "object_store", "redealing", "docstrings", "examples", "prepare"),
    *("open_source", "before_rooms", "resuming", "streams", "workers", "waiting_buffer", "background", "processes"),
)
"""Modules that start first, so that no process is left alone with a long module at the end."""

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": number for number, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Inputs and the batches and schedule values they must give, to the bit."""
    loaded: dict[str, Any] = json.loads((HERE / "golden" / "packing.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the real corpus. The first run that needs the corpus builds it, for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "cache"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def object_store() -> Iterator[Any]:
    """A client of an empty object store on the loopback; the environment leads to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("S3_ENDPOINT_URL", f"http://{host}:{port}")
            for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x"), ("DEFAULT_REGION", "us-east-1")):
                patch.setenv(f"AWS_{name}", value)
            yield boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    finally:
        server.stop()


@pytest.fixture(scope="session")
def quick_collections() -> None:
    """What has been imported is not looked at again by every `gc.collect()`, which takes most of a second."""
    gc.freeze()


@pytest.fixture
def no_thread_is_left(quick_collections: None) -> Iterator[None]:
    """Fails a test behind which there are other threads than before it."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)  # one that has been told to end, or has done its last work, may still be about to
    assert set(threading.enumerate()) == before
