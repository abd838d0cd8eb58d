"""Ctrl-C comes between two changes of an engine's state or while it waits, never inside a change.

Python runs a signal's handler between any two instructions. An engine works for microseconds
between two waits, so SIGINT is kept until it waits or returns.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums, which take ten times as long
import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout

P = ParamSpec("P")
T = TypeVar("T")
_INT = int(signal.SIGINT)


class _State:
    """Of the main thread, the only one that handlers run in."""

    before: Callable[[int, Any], Any] | None = None
    """The handler of SIGINT from before, while SIGINT is deferred."""
    pending = False
    waiting = False


_state = _State()


def _note(number: int, frame: Any) -> None:
    if _state.waiting and _state.before is not None:
        _state.before(number, frame)
    else:
        _state.pending = True


class Deferred(contextlib.AbstractContextManager[None]):
    """Keeps SIGINT until the end of a ``with`` block, but for `interruptible` calls in it.

    Does nothing outside the main thread, inside another such block, or where no Python function
    handles SIGINT.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = None
        if _state.before is not None or threading.current_thread() is not threading.main_thread():
            return
        before = _signal.getsignal(_INT)
        if callable(before):
            _state.pending = _state.waiting = False
            _signal.signal(_INT, _note)
            _state.before = self._before = before

    def __exit__(self, *error: object) -> None:
        before = self._before
        if before is None:
            return
        _state.before = None
        if _signal.getsignal(_INT) is _note:  # else another handler was set meanwhile
            _signal.signal(_INT, before)
        if _state.pending:
            _state.pending = False
            before(_INT, None)


def interruptible(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what ``call`` returns, which changes nothing that would be lost with its result.

    SIGINT is handled at once meanwhile.
    """
    before = _state.before
    if before is None or threading.current_thread() is not threading.main_thread():
        return call(*args, **kwargs)
    try:
        _state.waiting = True
        if _state.pending:
            _state.pending = False
            before(_INT, None)
        return call(*args, **kwargs)
    finally:
        _state.waiting = False


def _in_child() -> None:
    """In a forked child, undo the deferral and the locks of threads that it does not have."""
    before, _state.before = _state.before, None
    if before is not None and _signal.getsignal(_INT) is _note:
        with contextlib.suppress(ValueError):
            _signal.signal(_INT, before)
    for lock in list(_locks):
        lock.forget_threads()


_locks: weakref.WeakSet[FairLock] = weakref.WeakSet()
os.register_at_fork(after_in_child=_in_child)


class FairLock:
    """A reentrant lock that a waiting thread gets before its last holder can take it again.

    With an ordinary lock, a thread that collects in the background and takes it again at once would
    keep all other threads out. A forked child is not kept out by its parent's threads. A signal's
    handler may take it at any moment, because nothing here is done in two steps.
    """

    def __init__(self) -> None:
        self._held, self._next = threading.RLock(), threading.RLock()
        """``_next`` is held by the one thread that waits for ``_held``; others wait for it."""
        _locks.add(self)

    def forget_threads(self) -> None:
        """Forget the holder and all waiting threads except the calling one."""
        if self._held.acquire(False):
            self._held.release()
        else:
            self._held = threading.RLock()
        self._next = threading.RLock()

    def acquire(self, timeout: float | None) -> bool:
        """Take the lock; return ``False`` if that takes longer than ``timeout`` seconds."""
        held, before = self._held, self._next
        if held._is_owned():  # type: ignore[attr-defined]  # as `threading.Condition` asks
            return held.acquire()
        deadline = None if before.acquire(False) else Deadline(timeout)
        if deadline is not None and not _taken(before, deadline):
            return False
        try:
            return held.acquire(False) or _taken(held, deadline or Deadline(timeout))
        finally:
            before.release()

    def release(self) -> None:
        """Let a waiting thread take the lock."""
        self._held.release()


def _taken(lock: threading.RLock, deadline: Deadline) -> bool:
    """Wait for ``lock``, which this thread does not hold."""
    try:
        left = -1 if deadline.seconds is None else deadline.left
        return interruptible(lock.acquire, True, left)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # else the lock was taken in that moment
            lock.release()
        raise


class Turn:
    """One turn: from the beginning of a ``with`` block to its end."""

    __slots__ = ("_timeout", "_turns")

    def __init__(self, turns: FairLock, timeout: float | None) -> None:
        self._turns, self._timeout = turns, timeout

    def __enter__(self) -> None:
        if not self._turns.acquire(self._timeout):
            raise CollectorTimeout(
                f"another thread has been using the collector for {self._timeout} s"
            )

    def __exit__(self, *error: object) -> None:
        self._turns.release()
