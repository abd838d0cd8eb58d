"""Exceptions of workers on their way to the learner, where they keep their class and traceback."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from gleanrl.core.errors import WorkerDied, WorkerError, error_text, hide_frames


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception on its way to the learner."""

    error: bytes | None
    """Class, arguments and attributes, pickled, if they can be."""
    kind: str
    message: str
    traceback: str
    """Without notes, which stay with the error."""
    notes: tuple[str, ...] = ()
    passed_on: bool = False
    """Whether it was raised in a worker of the worker: ``message`` says where, and what it is."""

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Take down ``error`` with its traceback."""
        try:
            pickled = cloudpickle.dumps((type(error), error.args, vars(error)))
        except Exception:  # of the user's exception
            pickled = None
        hide_frames(error)
        try:
            lines = traceback.TracebackException.from_exception(error)
            lines.__notes__ = []
            text = "".join(lines.format())
        except Exception as err:
            text = f"(the traceback cannot be shown: {type(err).__name__})"
        notes = tuple(map(str, getattr(error, "__notes__", ())))
        headline = error.headline if isinstance(error, WorkerError) else ""
        message = headline or error_text(error)
        return cls(pickled, type(error).__qualname__, message, text, notes, bool(headline))


def raised(worker: str, remote: RemoteError) -> BaseException:
    """Return an exception of ``worker`` as an error of both its own class and `WorkerError`."""
    said = remote.message if remote.passed_on else f"raised {remote.kind}: {remote.message}"
    headline = f"{worker}{':' if remote.passed_on else ''} {said}"
    text = headline
    if "\n  File " in remote.traceback:  # without frames it is the message once more
        text += f"\n\nTraceback in {worker}:\n{remote.traceback}"
    plain = WorkerError(text)
    plain.headline = headline
    notes = [f"{worker}: {note}" for note in remote.notes]
    for note in notes:
        plain.add_note(note)
    if remote.error is None:
        return plain
    try:
        kind, args, attributes = pickle.loads(remote.error)
        if issubclass(kind, StopIteration):  # a generator would replace it by another error
            return plain
        error = _made(kind, args)
        error.args = args
        vars(error).update(attributes, _text=text, headline=headline, __notes__=notes)
        if isinstance(error, WorkerDied):  # a worker of the worker's: none of ours
            error.worker = None
    except Exception:  # classes that cannot be loaded here, or not combined
        return plain
    return error


def _made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an error without its ``__init__``, which may take other arguments.

    Which built-in ``__new__`` is safe for both classes depends on their memory: not that of
    RuntimeError for an OSError, nor that of MemoryError.
    """
    for base in kind.__mro__:
        if "__new__" in vars(base):
            with contextlib.suppress(TypeError):
                error: BaseException = base.__new__(_both(kind), *args)
                return error
    raise TypeError(kind)


def _both(kind: type[BaseException]) -> type[BaseException]:
    if issubclass(kind, WorkerError):
        return kind
    body = {
        "__str__": lambda self: str(vars(self)["_text"]),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (WorkerError, kind), body)
