"""Memory without a name, owned by the learner and mapped by its workers."""

from __future__ import annotations

import mmap
import os
import sys

from gleanrl.core.errors import GleanError


class SharedMemory:
    """An anonymous file in memory. Nothing of it can stay behind: it has no name anywhere.

    Made empty, so that its descriptor can be handed to workers before its size is known. Mappings
    are never closed while anything points into them; the pages go when the last process is done.
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

    def resize(self, nbytes: int) -> None:
        """Give it its size; once, before anybody maps it."""
        os.ftruncate(self.fd, nbytes)

    def map(self) -> mmap.mmap:
        """Return the mapping of the whole file; the same object every time."""
        if self._mapping is None:
            self._mapping = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        return self._mapping

    def close(self) -> None:
        """Close the descriptor. What is mapped stays valid."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
