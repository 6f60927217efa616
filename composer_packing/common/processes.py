"""How the process of a rank ends: with its exit code, whatever the launcher and gloo do meanwhile."""

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

PR_SET_PDEATHSIG = 1
"""Linux: which signal a process gets when the thread that started it ends."""


def end_with_parent(parent: int, number: int) -> None:
    """See to it that this process gets a signal when its parent ends, be it by SIGKILL, or now if it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def ignore_signals_but_parents(parent: int) -> None:
    """See to it that this process ends when its parent does, or at SIGTERM from there, and at no other such signal.

    Where a scheduler sends SIGTERM to all processes, or a terminal SIGINT, a rank still has to write its checkpoint or
    to end in order, and must not see its workers die.
    """
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait, name=f"{__name__}.wait", daemon=True).start()


def run_and_exit(main: Callable[[list[str]], int], arguments: list[str], launcher: int | None = None) -> NoReturn:
    """End the process with the exit code that `main` gives; an error is shown first, and the code is 1.

    Args:
        main: is given the arguments.
        arguments: of the command.
        launcher: the process id of the parent with which this rank is to end, as by SIGTERM.
    """
    try:
        if launcher is not None:
            end_with_parent(launcher, signal.SIGTERM)
        code = main(arguments)
    except SystemExit as ended:  # Composer makes these of SIGINT and SIGTERM, the code being 128 and the signal
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    exit_process(code)


def exit_process(code: int) -> NoReturn:
    """End the process as `sys.exit` does, but without taking the interpreter down: gloo's threads would abort it.

    They may free tensors of the last collective when it is gone, and a run that went well would seem to have failed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when another rank has failed; this one ends
    for child in multiprocessing.active_children():
        if not child.daemon:  # would be waited for: one in which Composer uploads, where an upload has failed
            child.kill()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
