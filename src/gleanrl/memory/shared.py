"""Memory without a name, owned by the learner and mapped by its workers."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys

from gleanrl.core.errors import ConfigError, GleanError

_HUGE = 4 << 20
"""Bytes from which on huge pages are worth it, as numpy has it."""


def use_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, which make large copies faster; for systems that give them on request."""
    if sys.platform == "linux" and len(memory) >= _HUGE:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)


class SharedMemory:
    """An anonymous file in memory. Nothing of it can stay behind: it has no name anywhere.

    Made empty, so that its descriptor can be handed to workers before it is known how much is
    needed; it only grows. Mappings are never closed while anything points into them; the pages go
    when the last process is done.
    """

    def __init__(self, fd: int | None = None) -> None:
        """Make an empty one, or take over the descriptor of one.

        Raises:
            GleanError: the platform has no anonymous files.
        """
        if fd is None:
            if sys.platform != "linux":
                raise GleanError(f"worker processes need Linux's memfd_create, not {sys.platform}")
            fd = os.memfd_create("gleanrl", os.MFD_CLOEXEC)
        self.fd = fd
        self._mapping: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Bytes reserved so far."""
        return os.fstat(self.fd).st_size

    def reserve(self, nbytes: int) -> int:
        """Grow by ``nbytes``, rounded up to pages; return the offset of what was added.

        Raises:
            ConfigError: the system refuses a file of that size.
        """
        start = self.nbytes
        try:
            os.ftruncate(self.fd, start + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except (OSError, OverflowError) as err:
            raise ConfigError(
                f"{nbytes:,} bytes of shared memory cannot be reserved ({err}); lower "
                "frames_per_batch or the number of workers"
            ) from err
        return start

    def clear(self) -> None:
        """Give everything back; what was mapped must not be touched any more."""
        os.ftruncate(self.fd, 0)

    def map(self) -> mmap.mmap:
        """Return a mapping of all there is now; the same object until it has grown."""
        size = self.nbytes
        if self._mapping is None or len(self._mapping) < size:
            self._mapping = mmap.mmap(self.fd, size)
            use_huge_pages(self._mapping)
        return self._mapping

    def close(self) -> None:
        """Close the descriptor. What is mapped stays valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
