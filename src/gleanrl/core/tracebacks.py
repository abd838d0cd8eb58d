"""Tracebacks as users see them: without the frames of this library, unless it is at fault.

``GLEANRL_TRACEBACK=full`` in the environment keeps all frames.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from gleanrl.core.errors import GleanError

P = ParamSpec("P")
R = TypeVar("R")
_LIBRARIES = frozenset({"cloudpickle", "numpy", "tensordict", "torch", *sys.stdlib_module_names})
"""What this library calls as users do: an error from there may be the fault of either."""


def for_users(function: Callable[P, R]) -> Callable[P, R]:
    """Have what users call raise errors without the frames of this library."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def hide_frames(error: BaseException) -> None:
    """Take the frames of this library out of ``error``, its causes and contexts.

    An error that is not a `GleanError` and comes from this library's own code is a bug of ours: it
    keeps all frames.
    """
    if os.environ.get("GLEANRL_TRACEBACK") == "full" or not _is_users(error):
        return
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _without_ours(one.__traceback__)
            todo += [one.__cause__, one.__context__]


def _is_users(error: BaseException) -> bool:
    if isinstance(error, GleanError | KeyboardInterrupt):
        return True
    packages = [_package(entry) for entry in _entries(error.__traceback__)]
    callers = [package for package in packages if package not in _LIBRARIES]
    return bool(callers) and callers[-1] != "gleanrl"


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: TracebackType | None = None
    for entry in reversed(list(_entries(traceback))):
        if _package(entry) != "gleanrl":
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _package(entry: TracebackType) -> str:
    return str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
