import subprocess
import sys

import pytest


def ended(script: str) -> tuple[int, str, str]:
    """Run a script; return its exit code, its output and its errors."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout, done.stderr


def test_a_run_ends_with_its_exit_code_and_its_handlers_but_keeps_the_interpreter_for_threads_that_need_it() -> None:
    """A thread of gloo that needs the interpreter after it has gone aborts a run at its end: a rare race."""
    script = """
import atexit, sys
from composer_packing.common.processes import exit_without_teardown
class Held:
    def __del__(self): print('torn down', flush=True)
held = Held()
atexit.register(print, 'handlers ran')
sys.stderr.write('last words')
exit_without_teardown(3)
"""
    assert ended(script) == (3, "handlers ran\n", "last words")


def test_a_rank_that_gets_sigterm_while_it_ends_ends_silently_with_its_own_exit_code() -> None:
    """When one rank has failed the launcher sends SIGTERM to the others, and ranks often fail together."""
    script = """
import atexit, os, signal
from composer_packing.common.processes import exit_without_teardown
atexit.register(print, 'handlers ran')
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
exit_without_teardown(2)
"""
    assert ended(script) == (2, "handlers ran\n", "")


def test_a_rank_ends_at_once_if_its_launcher_has_ended_during_the_imports() -> None:
    script = """
import os
from composer_packing.common.processes import run_and_exit
run_and_exit(lambda arguments: print('trained') or 0, [], launcher=os.getppid() {})
"""
    assert ended(script.format("+ 1")) == (-15, "", "")
    assert ended(script.format("")) == (0, "trained\n", "")


def test_the_end_does_not_wait_for_a_process_pool_that_nobody_has_shut_down() -> None:
    """Composer leaves such a pool after a failed upload."""
    script = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from composer_packing.common.processes import exit_without_teardown
pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'))
pool.submit(os.getpid).result()
exit_without_teardown(3)
"""
    assert ended(script) == (3, "", "")


@pytest.mark.parametrize(
    ("body", "code", "shown"),
    [
        ("return len(arguments)", 2, ""),
        ("raise OSError('disk')", 1, "OSError: disk"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
        ("sys.exit(143)", 143, ""),
        ("sys.exit('why')", 1, "why"),
        ("sys.exit()", 0, ""),
    ],
)
def test_a_run_exits_with_the_code_that_main_returns_or_shows_the_error_that_main_raises(
    body: str, code: int, shown: str
) -> None:
    script = f"""
import atexit, sys
from composer_packing.common.processes import run_and_exit
atexit.register(print, 'handlers ran')
def main(arguments):
    {body}
run_and_exit(main, ['one', 'two'])
"""
    ended_with, out, err = ended(script)
    assert (ended_with, out) == (code, "handlers ran\n")
    assert err.endswith(f"{shown}\n") if shown else err == ""
