"""All errors that GleanRL raises of its own, and their appearance to users.

Users see tracebacks without the frames of this library, unless it is at fault;
``GLEANRL_TRACEBACK=full`` in the environment keeps all frames.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
WORKER_NAME = "worker {}"
"""The usual name of a worker in messages; ``{}`` stands for its number."""
_LIBRARIES = frozenset({"cloudpickle", "numpy", "tensordict", "torch", *sys.stdlib_module_names})
"""Modules that this library calls as users do, so that an error may be the fault of either."""


class GleanError(Exception):
    """Base of all errors of the library."""


class _UnquotedKeyError(KeyError):
    def __str__(self) -> str:
        """Return the message itself (`KeyError` would quote it)."""
        return str(self.args[0]) if self.args else ""


class ConfigError(GleanError, ValueError):
    """An argument is wrong, or two of them contradict each other."""


class ArgumentTypeError(ConfigError, TypeError):
    """An argument is missing, unknown or of a wrong type."""


class UnknownEnvError(ConfigError, _UnquotedKeyError):
    """No environment is registered under the given id."""


class MissingEntryError(ConfigError, _UnquotedKeyError):
    """A state lacks an entry."""


class EnvError(GleanError, RuntimeError):
    """An environment returned something its declared spaces do not allow."""


class PolicyError(GleanError, RuntimeError):
    """The policy does not fit the environment: keys, shapes or dtypes."""


class PolicyTypeError(PolicyError, TypeError):
    """The policy cannot be called with the entries of the environment."""


class WeightsError(GleanError, ValueError):
    """Weights do not fit the model they are meant for."""


class UnknownModelError(WeightsError, _UnquotedKeyError):
    """No model runs under the given id."""


class ReplayError(GleanError, RuntimeError):
    """A replay buffer cannot carry out the call in its present state."""


class ClosedError(GleanError, RuntimeError):
    """The collector was shut down and cannot carry out the call."""


class WorkerError(GleanError, RuntimeError):
    """User code raised in a worker; carries the worker, message and remote traceback."""

    headline: str = ""
    """The message, without the traceback."""


class WorkerDied(GleanError, RuntimeError):
    """A worker process ended without a command to end."""

    worker: int | None
    """The index of the worker, if it was a worker with a number."""

    def __init__(self, *args: object, worker: int | None = None) -> None:
        super().__init__(*args)
        self.worker = worker


class CollectorTimeout(GleanError, TimeoutError):
    """Something took longer than its deadline."""


class CheckFailed(GleanError, AssertionError):
    """A check of `gleanrl.testing` found a fault in a part of the user's."""


def note(error: BaseException, text: str) -> None:
    """Add the origin to an error of the user's code; GleanRL's own errors contain it."""
    if not isinstance(error, GleanError):
        error.add_note(text)


def name_worker(error: BaseException, worker: int) -> None:
    """Name the worker in the note that `note` has added to ``error``."""
    notes: list[str] = getattr(error, "__notes__", [])
    notes[:] = [f"worker {worker}: {text}" for text in notes]


def refuse(
    module: str, names: Mapping[str, str], find: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``module``, whose errors say what to do in place of ``names``.

    ``find`` returns other names.
    """

    def missing(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module} has no {name}: {names[name]}", name=module)
        if find is not None:
            return find(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


def error_text(error: BaseException) -> str:
    """Return the message of ``error``, also if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as err:
        return f"(its message cannot be shown: {type(err).__name__} in __str__)"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a suggestion for an error about an argument ``name``, among ``known`` ones."""
    close = difflib.get_close_matches(name, known, 1, 0.65)
    return f"; did you mean {close[0]}=?" if close else ""


# -- tracebacks ----------------------------------------------------------------------------------


def for_users(function: Callable[P, R]) -> Callable[P, R]:
    """Make functions for users raise errors without the frames of this library.

    An argument that ``function`` does not take is an `ArgumentTypeError` that suggests another one.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if type(error) is TypeError:
                    _check_names(function, kwargs)
                raise
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def _check_names(function: Callable[..., object], given: Collection[str]) -> None:
    known = inspect.signature(function).parameters
    unknown = [name for name in given if name not in known]
    if unknown and all(one.kind is not one.VAR_KEYWORD for one in known.values()):
        owner, name = function.__qualname__.removesuffix(".__init__"), unknown[0]
        raise ArgumentTypeError(f"{owner} takes no {name}={did_you_mean(name, known)}") from None


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
