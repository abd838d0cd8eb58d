"""Locks around the short sections of a ledger: between threads, and between processes.

The lock between processes is the kernel's (``fcntl``), on one byte of an anonymous file, so that it
is released whenever its holder ends, however it ends. A second byte per writing process, locked for
as long as the process lives, tells the others whether a reservation still has an owner.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
import weakref
from pathlib import Path
from typing import Protocol

from gleanrl.core.errors import CollectorTimeout
from gleanrl.memory.replay.forking import Forkable
from gleanrl.memory.replay.handles import Handle, Identity, identity_of

_MAIN = 0
_SHORTEST_S, _LONGEST_S = 2e-5, 2e-3
"""Pauses between two tries: sections are short."""
_FLOCK = "hhqqi4x"
"""The kernel's ``struct flock``, on 64-bit systems."""
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


class ThreadGate(Forkable):
    """A gate between the threads of this process."""

    _rank = 1

    def __init__(self) -> None:
        """Make one that is open."""
        super().__init__()
        self._owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def owner(self) -> int | None:
        """Return the claimed number, ``None`` again in a forked child."""
        return self._owner

    def claim(self, number: int) -> None:
        """Take ``number``."""
        self._owner = number

    def alive(self, owner: int) -> bool:
        """Tell whether the owner is this process; threads that a fork left behind are not."""
        return owner == self._owner

    def _after_fork(self, consistent: bool) -> None:
        """Forget the number: what other threads were writing nobody will finish here."""
        self._owner = None


class ProcessGate(Forkable):
    """A gate between processes (and the threads of each).

    There is one per process and file: closing any descriptor of a file gives up all locks that the
    process has on it, so this object alone opens and closes them.
    """

    _rank = 1

    def __init__(self, fd: int) -> None:
        """Take over ``fd``, the descriptor of a file nobody else in this process opens."""
        super().__init__()
        self.fd = fd
        self.identity = identity_of(fd)
        self.timeout = 60.0
        """Seconds to wait for a holder that makes no progress."""
        self._depth = 0
        self._owner: int | None = None
        self._open = [fd]
        _GATES[self.identity] = self
        weakref.finalize(self, _close, self.identity, self._open).atexit = False

    @staticmethod
    def of(handle: Handle) -> ProcessGate:
        """Return the one gate of this process on a file, wherever it was opened first."""
        with _OPENING._lock:
            known = _GATES.get(handle.identity)
            return ProcessGate(handle.open()) if known is None else known

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self._depth == 0 and not self._try():
                self._wait()
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

    def _try(self) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _MAIN)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait(self) -> None:
        """Wait while whoever is inside gets on.

        Raises:
            CollectorTimeout: the process inside used no processor time for `timeout` seconds.
        """
        pause, progress = _SHORTEST_S, None
        look = deadline = time.monotonic() + self.timeout / 2
        while True:
            time.sleep(pause)
            if self._try():
                return
            pause = min(2 * pause, _LONGEST_S)
            now = time.monotonic()
            if now < look:
                continue
            holder = lock_holder(self.fd, _MAIN)
            found = holder, processor_time(holder)
            if found != progress:
                progress, deadline = found, now + self.timeout / 2
            elif now > deadline:
                raise CollectorTimeout(
                    f"process {holder or '(of another container)'} has been inside this shared "
                    f"replay buffer for {self.timeout} s without getting on; if it was stopped, "
                    f"continue it (kill -CONT {holder}) or end it"
                )
            look = now + self.timeout / 8

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

    def _after_fork(self, consistent: bool) -> None:
        """Start anew in a forked child, which inherits neither locks nor the number."""
        self._owner = None
        if not consistent:
            self._depth = 0

    def adopt(self, fds: list[int]) -> None:
        """Keep descriptors of the same file open for as long as this gate."""
        self._open += fds


def lock_holder(fd: int, byte: int) -> int | None:
    """Return which process has a byte of a file locked, ``None`` if none can be named."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def processor_time(pid: int | None) -> int | None:
    """Return the clock ticks a process has used, ``None`` if it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


_GATES: weakref.WeakValueDictionary[Identity, ProcessGate] = weakref.WeakValueDictionary()
_OPENING = Forkable()
_OPENING._rank = 2
"""One thread at a time opens and closes descriptors of files that are locked."""


def _close(identity: Identity, fds: list[int]) -> None:
    with _OPENING._lock:
        later = _GATES.get(identity)
        if later is not None:
            later.adopt(fds)
            return
        for fd in fds:
            os.close(fd)
