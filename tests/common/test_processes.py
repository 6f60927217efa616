import subprocess
import sys

import pytest


def ended(script: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a script."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_run_ends_with_its_exit_code_and_its_handlers_but_keeps_the_interpreter_for_threads_that_need_it() -> None:
    """What aborts a run at its end, a thread of gloo that asks for an interpreter that has gone, is a rare race."""
    script = """
import atexit, sys
from composer_packing.common.processes import leave
class Held:
    def __del__(self): print('torn down', flush=True)
held = Held()
atexit.register(print, 'handlers ran')
sys.stderr.write('last words')
leave(3)
"""
    assert ended(script) == (3, "handlers ran\n", "last words")


def test_a_rank_that_is_told_to_end_while_it_ends_does_so_in_silence_with_its_own_exit_code() -> None:
    """The launcher sends SIGTERM to every rank that is left when one has failed; they often fail together."""
    script = """
import atexit, os, signal
from composer_packing.common.processes import leave
atexit.register(print, 'handlers ran')
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
leave(2)
"""
    assert ended(script) == (2, "handlers ran\n", "")


def test_a_rank_ends_at_once_where_its_launcher_has_ended_while_it_imported() -> None:
    script = """
import os
from composer_packing.common.processes import run
run(lambda arguments: print('trained') or 0, [], launcher=os.getppid() {})
"""
    assert ended(script.format("+ 1")) == (-15, "", "")
    assert ended(script.format("")) == (0, "trained\n", "")


def test_a_process_of_a_pool_that_nobody_has_shut_down_is_not_waited_for() -> None:
    """Composer leaves its own so where an upload has failed."""
    script = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from composer_packing.common.processes import leave
pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'))
pool.submit(os.getpid).result()
leave(3)
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
def test_a_run_leaves_with_what_its_main_function_gives_or_shows_what_it_raises(
    body: str, code: int, shown: str
) -> None:
    script = f"""
import atexit, sys
from composer_packing.common.processes import run
atexit.register(print, 'handlers ran')
def main(arguments):
    {body}
run(main, ['one', 'two'])
"""
    ended_with, out, err = ended(script)
    assert (ended_with, out) == (code, "handlers ran\n")
    assert err.endswith(f"{shown}\n") if shown else err == ""
