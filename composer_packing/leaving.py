"""How the process of a rank ends: with its exit code, whatever the launcher and gloo do meanwhile."""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn


def run(main: Callable[[list[str]], int], arguments: list[str]) -> NoReturn:
    """End the process with the exit code that `main` gives; an error is shown first, and the code is 1."""
    try:
        code = main(arguments)
    except SystemExit as ended:  # Composer makes these of SIGINT and SIGTERM, the code being 128 and the signal
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process as `sys.exit` does, but without taking the interpreter down: gloo's threads would abort it.

    They may free tensors of the last collective when it is gone, and a run that went well would seem to have failed.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when another rank has failed; this one ends
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
