"""Locks around the short sections of a ring: between threads, and between processes.

The lock between processes is the kernel's (``fcntl``), on one byte of an anonymous file, so that it
is released whenever its holder ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from gleanrl.core.errors import CollectorTimeout
from gleanrl.core.forks import guarded
from gleanrl.memory.shared import FileAddress, Identity, anonymous_file, identity_of

_MAIN = 0
_NEXT = 1
"""Byte of the process that enters next: a writer that comes back waits behind it."""
_COLLECTING = 1 << 62
"""Byte that all processes with running collectors hold together."""
_SHORTEST_S = 2e-5
_LONGEST_S = {_MAIN: 2e-4, _NEXT: 2e-3}
"""Pauses between two tries; only one process at a time tries often."""
_FLOCK = "hhqqi4x"
"""The kernel's ``struct flock``, on 64-bit systems."""


class ThreadLock:
    """Admits one thread of this process at a time; that thread may enter again."""

    _rank = 1
    _lock: threading.RLock

    def __init__(self) -> None:
        guarded(self)
        self.depth = 0
        """How many times the thread inside has entered."""
        self.collectors = 0
        """Collectors that run in this process and fill the buffer in the background."""

    @property
    def collecting(self) -> bool:
        """Whether a collector that was started runs, in any process; called inside the lock."""
        return self.collectors > 0

    def collect(self, more: int) -> None:
        """Count ``more`` running collectors; called inside the lock."""
        self.collectors += more

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        self._lock.release()

    def _after_fork(self, consistent: bool) -> None:
        self.collectors = 0
        if not consistent:
            self.depth = 0


class ProcessLock(ThreadLock):
    """Admits one thread of one process at a time.

    There is one per process and file: closing any descriptor of a file gives up all locks that the
    process has on it, so this object alone opens and closes them.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Take over ``fd``, the descriptor of a file that nothing else in this process opens."""
        super().__init__()
        self.fd = fd = anonymous_file() if fd is None else fd
        self.timeout = 60.0
        """Seconds to wait for a holder that makes no progress."""
        self._open = [fd]
        identity = identity_of(os.fstat(fd))
        _process_locks[identity] = self
        weakref.finalize(self, _close, identity, self._open).atexit = False

    def __reduce__(self) -> Any:
        return _lock_of, (FileAddress.of(self.fd),)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            if self.depth == 0:
                self._take(_NEXT)
                try:
                    self._take(_MAIN)
                finally:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _NEXT)
        except BaseException:
            self._lock.release()
            raise
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        try:
            if self.depth == 0:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, _MAIN)
        finally:
            self._lock.release()

    def _try(self, byte: int) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _take(self, byte: int) -> None:
        """Wait while the process inside uses processor time, else for `timeout` seconds."""
        if self._try(byte):
            return
        pause, progress = _SHORTEST_S, None
        look = deadline = time.monotonic() + self.timeout / 2
        while True:
            time.sleep(pause)
            if self._try(byte):
                return
            pause = min(2 * pause, _LONGEST_S[byte])
            now = time.monotonic()
            if now < look:
                continue
            # The process inside, or the next one; `None` if it is unknown.
            found = (_is_held(self.fd, each) for each in (_MAIN, _NEXT))
            holder = next((pid for held, pid in found if held and pid > 0), None)
            used = holder, _processor_time(holder)
            if used != progress:
                progress, deadline = used, now + self.timeout / 2
            elif now > deadline:
                raise CollectorTimeout(
                    f"process {holder or '(of another container)'} has been inside this shared "
                    f"replay buffer for {self.timeout} s without getting on; if it was stopped, "
                    f"continue it (kill -CONT {holder}) or end it"
                )
            look = now + self.timeout / 8

    @property
    def collecting(self) -> bool:
        return self.collectors > 0 or _is_held(self.fd, _COLLECTING)[0]

    def collect(self, more: int) -> None:
        """Count collectors. The kernel takes the lock from a process that ends."""
        super().collect(more)
        kind = fcntl.LOCK_SH if self.collectors else fcntl.LOCK_UN
        fcntl.lockf(self.fd, kind, 1, _COLLECTING)


def _lock_of(address: FileAddress) -> ProcessLock:
    """Return the one lock of this process on a file, wherever it was opened first."""
    with _opening:
        known = _process_locks.get(address.identity)
        return ProcessLock(address.open()) if known is None else known


def _is_held(fd: int, byte: int) -> tuple[bool, int]:
    """Tell whether another process has locked ``byte``, and that process if it is known."""
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, question))
    return kind != fcntl.F_UNLCK, pid


def _processor_time(pid: int | None) -> int | None:
    """Return the clock ticks a process has used, ``None`` if it cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


_process_locks: weakref.WeakValueDictionary[Identity, ProcessLock] = weakref.WeakValueDictionary()
_opening = ThreadLock()
_opening._rank = 2
"""One thread at a time opens and closes descriptors of files that are locked."""


def _close(identity: Identity, fds: list[int]) -> None:
    with _opening:
        later = _process_locks.get(identity)
        if later is not None:  # closing would give up its locks
            later._open += fds
            return
        for fd in fds:
            os.close(fd)
