"""Locks that a fork respects.

A forked child has only the thread that forked. A lock that another thread held would never be
released there, and the data under it may be half changed: a fork waits until other threads have
left their locks, and the child replaces the locks that were still held.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

from gleanrl.core.deadline import Deadline

_FORK_TIMEOUT_S = 1.0
"""Seconds that a fork waits for threads to leave, over all locks."""


class Forkable(Protocol):
    """Has a lock that forks respect; see `guarded`."""

    _rank: int
    """The rank of the lock; its holder takes only locks of a higher rank."""
    _lock: threading.RLock

    def _after_fork(self, consistent: bool) -> None:
        """Start again in a child; ``consistent`` unless another thread was inside."""


def guarded(holder: Forkable) -> None:
    """Give ``holder`` its lock."""
    holder._lock = threading.RLock()
    _forkables[id(holder)] = holder


_forkables: weakref.WeakValueDictionary[int, Forkable] = weakref.WeakValueDictionary()
_forking = threading.local()


def _by_rank() -> list[Forkable]:
    # Other threads may make locks meanwhile: this list is made in one step.
    known = [reference() for reference in _forkables.valuerefs()]
    alive = [forkable for forkable in known if forkable is not None]
    return sorted(alive, key=lambda forkable: (forkable._rank, id(forkable)))


def _before_fork() -> None:
    deadline = Deadline(_FORK_TIMEOUT_S)
    _forking.held = [
        forkable for forkable in _by_rank() if forkable._lock.acquire(timeout=deadline.left)
    ]


def _after_in_parent() -> None:
    for forkable in reversed(_forking.held):
        forkable._lock.release()
    _forking.held = []


def _after_in_child() -> None:
    held = {id(forkable) for forkable in _forking.held}
    _after_in_parent()
    for forkable in _by_rank():
        if id(forkable) not in held:
            forkable._lock = threading.RLock()
        forkable._after_fork(id(forkable) in held)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
