import json
import subprocess
import sys

SCRIPT = """
import json, os, signal, subprocess, tempfile, threading, time
from composer_packing.checkpointing import sigterm as stopping
from composer_packing.batch.lockstep import Lockstep

stopping.GRACE_SECONDS = 1
def TERM():
    os.kill(os.getpid(), signal.SIGTERM)
    while not callback._batches.stop_wanted:
        time.sleep(0.01)
STUCK = lambda seconds: threading.Event().wait(seconds)

def stuck_in_a_batch(callback):
    TERM()
    STUCK(20)

def batch_that_ends(callback):
    TERM()

def writing_a_checkpoint(callback):
    callback._is_due = lambda state, event: True
    assert callback.is_to_save(None, None)
    TERM()
    STUCK(3)

def stuck_after_a_checkpoint(callback):
    writing_a_checkpoint(callback)
    callback.before_dataloader(None, None)
    STUCK(20)

def stuck_before_the_batch_after_a_checkpoint(callback):
    callback._is_due = lambda state, event: True
    assert callback.is_to_save(None, None)
    callback.before_dataloader(None, None)
    TERM()
    STUCK(20)

def closing_after_the_last_batch(callback):
    TERM()
    assert callback.is_to_save(None, None)
    callback.before_dataloader(None, None)
    STUCK(3)

def stuck_outside_of_python(callback):
    import ctypes
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {os.getpid()}"])
    until = time.monotonic() + 20
    libc = ctypes.CDLL(None)
    while time.monotonic() < until:
        libc.sleep(20)  # Python runs no handler before it returns

started = {}
for case in (
    stuck_in_a_batch,
    batch_that_ends,
    writing_a_checkpoint,
    stuck_after_a_checkpoint,
    stuck_before_the_batch_after_a_checkpoint,
    closing_after_the_last_batch,
    stuck_outside_of_python,
):
    errors = tempfile.TemporaryFile()
    pid = os.fork()
    if pid == 0:
        os.dup2(errors.fileno(), 2)
        callback = stopping.StopAtSigterm(Lockstep([], prefetch=0), "1ba", stopping.UntilStopped([], None))
        callback.fit_start(None, None)
        case(callback)
        assert callback._batches.stop_wanted
        os._exit(0)
    started[case.__name__] = pid, errors
found = {}
for name, (pid, errors) in started.items():
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    errors.seek(0)
    found[name] = [code, errors.read().decode()]
print(json.dumps(found))
"""


def test_a_rank_that_is_stuck_ends_and_shows_where_it_is_unless_it_writes_a_checkpoint() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=400, check=True)
    found = json.loads(done.stdout)
    for name in ("batch_that_ends", "writing_a_checkpoint", "closing_after_the_last_batch"):
        assert found.pop(name) == [0, ""]
    for name, (code, errors) in found.items():
        assert code == 1, name
        assert "Timeout (0:00:01)!" in errors
        assert f"in {name}" in errors, "where it is stuck"
