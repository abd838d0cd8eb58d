"""Locks around the short sections of a ledger: between threads, and between processes.

The lock between processes is the kernel's (``fcntl``), on one byte of an anonymous file, so that it
is released whenever its holder ends, however it ends. A second byte per writing process, locked for
as long as the process lives, tells the others whether a reservation still has an owner.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from typing import Protocol

from gleanrl.memory.replay.handles import Identity, identity_of

_MAIN = 0
_FIRST_OWNER = 1


class Gate(Protocol):
    """Lets one thread of one process in at a time."""

    def __enter__(self) -> None:
        """Wait for the turn; may be entered again by the thread that is in."""
        ...

    def __exit__(self, *error: object) -> None:
        """Let the next one in."""
        ...

    def owner(self) -> int | None:
        """Return the number under which this process writes, ``None`` before `claim`."""
        ...

    def claim(self, number: int) -> None:
        """Write under ``number`` from now on; inside the gate."""
        ...

    def alive(self, owner: int) -> bool:
        """Tell whether the process that claimed ``owner`` still exists; inside the gate."""
        ...


class ThreadGate:
    """A gate between the threads of this process."""

    def __init__(self) -> None:
        """Make one that is open."""
        self._lock = threading.RLock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def owner(self) -> int | None:
        """Return the claimed number."""
        return self._owner

    def claim(self, number: int) -> None:
        """Take ``number``."""
        self._owner = number

    def alive(self, owner: int) -> bool:
        """Whoever writes lives as long as this process."""
        return True


class ProcessGate:
    """A gate between processes (and the threads of each).

    There is one per process and file: closing any descriptor of a file gives up all locks that the
    process has on it, so this object alone opens and closes them.
    """

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, the descriptor of a file nobody else in this process opens."""
        self.fd = fd
        self.identity = identity_of(fd)
        self._lock = threading.RLock()
        self._depth = 0
        self._owner: int | None = None
        self._open = [fd]
        _GATES[self.identity] = self
        weakref.finalize(self, _close, self.identity, self._open).atexit = False

    @staticmethod
    def known(identity: Identity) -> ProcessGate | None:
        """Return the gate this process already has on that file."""
        return _GATES.get(identity)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._depth == 0:
                fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, _MAIN)
        except BaseException:
            self._lock.release()
            raise
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        try:
            if self._depth == 0:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _MAIN)
        finally:
            self._lock.release()

    def owner(self) -> int | None:
        """Return the claimed number, ``None`` again in a forked child."""
        return self._owner

    def claim(self, number: int) -> None:
        """Lock the byte of ``number`` until this process ends."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, _FIRST_OWNER + number)
        self._owner = number

    def alive(self, owner: int) -> bool:
        """Tell whether somebody still holds the byte of ``owner``."""
        if owner == self._owner:
            return True
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _FIRST_OWNER + owner)
        except OSError:
            return True
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _FIRST_OWNER + owner)
        return False

    def after_fork(self) -> None:
        """Start anew in a forked child, which inherits neither locks nor the number."""
        self._lock = threading.RLock()
        self._depth = 0
        self._owner = None

    def adopt(self, fds: list[int]) -> None:
        """Keep descriptors of the same file open for as long as this gate."""
        self._open += fds


_GATES: weakref.WeakValueDictionary[Identity, ProcessGate] = weakref.WeakValueDictionary()


def _close(identity: Identity, fds: list[int]) -> None:
    later = _GATES.get(identity)
    if later is not None:
        later.adopt(fds)
        return
    for fd in fds:
        os.close(fd)


def _after_fork() -> None:
    for gate in list(_GATES.values()):
        gate.after_fork()


os.register_at_fork(after_in_child=_after_fork)
