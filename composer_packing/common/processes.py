"""How a process ends: with its parent, at no other process's signal, and with the exit code of its own work."""

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
"""Option of Linux's `prctl`: the signal that a process gets when the thread that started the process ends."""


def signal_self_when_parent_ends(parent: int, signal_number: int) -> None:
    """Let this process get a signal when its parent ends, also when the parent is killed by SIGKILL.

    If the parent has already ended, the signal comes at once.

    Args:
        parent: process id of the parent.
        signal_number: the signal.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def end_only_by_parent(parent: int) -> None:
    """Let only the parent end this process: when the parent ends, or when the parent sends SIGTERM.

    SIGINT, and SIGTERM from any other process, are ignored. A scheduler sends SIGTERM to all processes, and a terminal
    sends SIGINT to all. The rank then still has to write its checkpoint or to end in order, and needs its workers.

    Args:
        parent: process id of the parent.
    """
    signal_self_when_parent_ends(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait_for_parents_signal() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=wait_for_parents_signal, name=f"{__name__}.wait", daemon=True).start()


def run_and_exit(main: Callable[[list[str]], int], arguments: list[str], launcher: int | None = None) -> NoReturn:
    """Run `main` and end the process with the exit code that `main` returns.

    If `main` raises an error, its traceback is printed and the exit code is 1.

    Args:
        main: takes the arguments and returns the exit code.
        arguments: arguments of the command.
        launcher: process id of the parent. When the parent ends, this process gets SIGTERM. None for no parent.
    """
    try:
        if launcher is not None:
            signal_self_when_parent_ends(launcher, signal.SIGTERM)
        code = main(arguments)
    except SystemExit as ended:  # Composer turns SIGINT and SIGTERM into SystemExit(128 + signal)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    exit_without_teardown(code)


def exit_without_teardown(code: int) -> NoReturn:
    """End the process as `sys.exit` does, exit handlers included, but do not take the interpreter down.

    Threads of gloo may free tensors of the last collective after the interpreter is gone. This aborts the process, and
    a run that went well would seem to have failed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends SIGTERM if another rank fails; keep our code
    for child in multiprocessing.active_children():
        if not child.daemon:  # the exit handlers would wait for it; a failed upload of Composer leaves such a process
            child.kill()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
