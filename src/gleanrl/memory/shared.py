"""Memory of several processes: its amount, and the order of reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gleanrl.core.cgroups import ROOT, limits, lines
from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.platforms import naming_limits, require_linux

_HUGE = 4 << 20
"""Bytes from which huge pages pay, the same as numpy's."""
Identity: TypeAlias = tuple[int, int]
"""Device and inode, which identify a file for every descriptor."""


def use_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, which make large copies faster; for systems that give them on request."""
    if sys.platform == "linux" and len(memory) >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


def identity_of(status: os.stat_result) -> Identity:
    """Return the identity of the file with ``status``."""
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class FileAddress:
    """The address of a file for another process of the same user; can be pickled."""

    pid: int
    fd: int
    identity: Identity

    @classmethod
    def of(cls, fd: int) -> FileAddress:
        """Describe a descriptor of this process, which keeps it open."""
        return cls(os.getpid(), fd, identity_of(os.fstat(fd)))

    def open(self, access: int = os.O_RDWR) -> int:
        """Return a descriptor of our own for the same file; ``access`` is as in ``os.open``."""
        path, cause = f"/proc/{self.pid}/fd/{self.fd}", None
        try:
            # Looked at before it is opened: opening and closing gives up locks on the file.
            if identity_of(os.stat(path)) == self.identity:
                return os.open(path, access | os.O_CLOEXEC)
        except OSError as err:
            cause = err
        raise ReplayError(
            f"this shared memory was handed on by process {self.pid}, which has ended or "
            "dropped it; a process must keep shared memory until the processes that it gave it "
            "to have opened it" + (f" ({cause})" if cause else "")
        ) from cause


def anonymous_file() -> int:
    """Return the descriptor of a new file in memory, which has no name anywhere; on Linux."""
    require_linux("shared replay buffers")
    with naming_limits():
        return os.memfd_create("gleanrl", os.MFD_CLOEXEC)


class SharedMemory:
    """An anonymous file in memory, which leaves nothing behind because it has no name.

    Made empty, so that its descriptor can be handed to workers before it is known how much is
    needed; it only grows. Mappings are never closed while anything points into them; the pages go
    when the last process is done. The descriptor is closed with the last reference at the latest.

    Pickled into another process of the same user, it is the same memory there.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Make an empty one, or take over the descriptor of one."""
        self.fd = anonymous_file() if fd is None else fd
        self._closing = weakref.finalize(self, os.close, self.fd)
        self._closing.atexit = False
        self._mapping: mmap.mmap | None = None
        self._mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        """The newest mapping, and older ones that something points into."""

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""
        return os.fstat(self.fd).st_size

    def reserve(self, nbytes: int) -> int:
        """Grow by ``nbytes``, rounded up to pages; return the offset of the new part."""
        start = self.nbytes
        try:
            os.ftruncate(self.fd, start + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except (OSError, OverflowError) as err:
            raise ConfigError(
                f"{nbytes:,} bytes of shared memory cannot be reserved ({err}); lower max_size of "
                "a replay buffer, frames_per_batch or the number of workers"
            ) from err
        return start

    def clear(self) -> None:
        """Release all memory; mappings must not be touched after this."""
        os.ftruncate(self.fd, 0)

    def map(self) -> mmap.mmap:
        """Return a mapping of the whole file; the same object until the file has grown."""
        size = self.nbytes
        if self._mapping is None or len(self._mapping) < size:
            with naming_limits():
                self._mapping = mmap.mmap(self.fd, size)
            self._mappings.add(self._mapping)
            use_huge_pages(self._mapping)
        return self._mapping

    def offset_of(self, address: int) -> int | None:
        """Return the offset of ``address`` in a mapping; ``None`` if it is elsewhere."""
        for mapping in self._mappings:
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            if start <= address < start + len(mapping):
                return address - start
        return None

    def close(self) -> None:
        """Close the descriptor. Mappings stay valid."""
        self.fd = -1
        self._closing()

    def __reduce__(self) -> Any:
        return _opened, (FileAddress.of(self.fd),)


def _opened(address: FileAddress) -> SharedMemory:
    return SharedMemory(address.open())


_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
"""By version of the kernel's control groups, the files of a group's limit and use."""
_CACHE = ("inactive_file", "active_file")
"""The part of the use, in ``memory.stat``, that the kernel releases on demand; of a whole tree it
begins with ``total_`` in version 1."""


def available_memory(root: Path = ROOT) -> int | None:
    """Return the bytes this process may still use: the machine's or a container's, the smallest.

    ``None`` where the system does not tell.
    """
    found = (line.split() for line in lines(root / "proc/meminfo"))
    free = [1024 * int(words[1]) for words in found if words[0] == "MemAvailable:"]
    return min(
        [*free, *(max(0, limit - used) for limit, used in memory_limits(root))], default=None
    )


def memory_limits(root: Path = ROOT) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of every container or job around this process."""
    for limit, used, group in limits("memory", _FILES, root):
        stat = dict(line.split(" ", 1) for line in lines(group / "memory.stat"))
        cache = (stat.get(f"total_{name}", stat.get(name, 0)) for name in _CACHE)
        yield limit, used - sum(map(int, cache))


def check_memory(nbytes: int, what: str, advice: str, kind: str = "shared memory") -> None:
    """Refuse sizes for which this machine or container lacks memory, naming ``what`` needs it."""
    free = available_memory()
    if free is not None and nbytes > free:
        raise ConfigError(
            f"{what} need {nbytes:,} bytes of {kind}, {free:,} are available on this machine (or "
            f"in its container); {advice}"
        )


def lock_fence() -> None:
    """Order earlier loads before later loads, and earlier stores before later stores.

    Python promises this much: aligned 64-bit words that numpy reads and writes in one element are
    read and written whole, by one instruction. Their order is the processor's. x86-64 keeps loads
    in order and stores in order, and copies that bypass the caches end in a fence of their own.
    Elsewhere (ARM) any two may change places. Taking a lock keeps later accesses from coming
    earlier, releasing it keeps earlier ones from coming later, and a lock cannot be taken before
    it was released: two turns of one lock order everything around them. Each call has a lock
    of its own, so that no forked child inherits one that is held.
    """
    turn = threading.Lock()
    for _ in range(2):
        turn.acquire()
        turn.release()


def no_fence() -> None:
    """Do nothing, because x86-64 needs nothing."""


fence = no_fence if platform.machine() in {"x86_64", "AMD64"} else lock_fence
"""Orders memory that is read while another thread or process writes it; see `lock_fence`."""
