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

# Compiling and a busy machine make single calls slow, which is no fault; CI draws the same cases each time.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Inputs and the batches and schedule values they must give, to the bit."""
    loaded: dict[str, Any] = json.loads((HERE / "golden" / "packing.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs keep the real corpus. The first run that needs it builds it, for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
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
