"""Locks that a forked child finds free: a fork waits for who is inside, or replaces the lock.

A child has only the thread that forked. A lock that another thread held would never be released
there, and what it guards may be half changed.
"""

from __future__ import annotations

import os
import threading
import time
import weakref

_PATIENCE_S = 1.0
"""How long a fork waits for threads to leave, all locks together."""


class Forkable:
    """Has a lock that forks respect."""

    _rank = 0
    """Who holds a lock takes only those of a higher rank."""

    def __init__(self) -> None:
        """Make the lock."""
        self._lock: threading.RLock = threading.RLock()
        _known[id(self)] = self

    def _after_fork(self, consistent: bool) -> None:
        """Begin anew in a child.

        Args:
            consistent: Nobody was inside; otherwise the lock was replaced.
        """


_known: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()
_forking = threading.local()


def _all() -> list[Forkable]:
    found = [reference() for reference in _known.valuerefs()]
    owners = [owner for owner in found if owner is not None]
    return sorted(owners, key=lambda owner: (owner._rank, id(owner)))


def _before() -> None:
    deadline = time.monotonic() + _PATIENCE_S
    _forking.held = [
        owner
        for owner in _all()
        if owner._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))
    ]


def _after_in_parent() -> None:
    for owner in reversed(_forking.held):
        owner._lock.release()
    _forking.held = []


def _after_in_child() -> None:
    held = {id(owner) for owner in _forking.held}
    _after_in_parent()
    for owner in _all():
        if id(owner) not in held:
            owner._lock = threading.RLock()
        owner._after_fork(id(owner) in held)


os.register_at_fork(
    before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
