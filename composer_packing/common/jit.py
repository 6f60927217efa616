"""Compiling: what moves tokens is compiled once, kept on disk, and runs without the interpreter's lock."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile `function` with numba, without the interpreter's lock, cached on disk where that works.

    What is cached holds the constants of other files as they were when it was compiled, and numba looks at the
    function's own file only. Who changes such a constant must empty the cache.
    """
    try:
        jitted: Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written: a read-only install without a HOME
        jitted = numba.njit(nogil=True)(function)
    return jitted
