"""What collects is closed before Python calls finalizers at exit."""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
_open: list[weakref.finalize[Any, Any]] = []


def closing(owner: object, close: Callable[..., object], *args: Any) -> weakref.finalize[Any, Any]:
    """Return a finalizer of ``owner`` that is called before those of `weakref` at exit.

    At exit, `weakref` looks through all finalizers. If another thread makes or drops one meanwhile,
    as those that collect do with every batch, an error ends that, and no finalizer is called.
    """
    finalizer = weakref.finalize(owner, close, *args)
    with _lock:
        if not _open:
            atexit.unregister(_close)
            atexit.register(_close)  # after `weakref` has done so: what is last is called first
        _open[:] = [each for each in _open if each.alive] + [finalizer]
    return finalizer


def _close() -> None:
    while _open:
        try:
            _open.pop()()
        except Exception:
            sys.excepthook(*sys.exc_info())
