"""Compilation: functions that move tokens are compiled once, cached on disk, and run without the interpreter's lock."""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Return `function` compiled by numba. It runs without the interpreter's lock and is cached on disk if possible.

    A cached function keeps the constants of other files as they were when it was compiled: numba checks only the
    function's own file for changes. If you change such a constant, empty the cache.
    """
    try:
        jitted: Function = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache can be written: a read-only install without a HOME
        jitted = numba.njit(nogil=True)(function)
    return jitted
