"""Open files of another process of the same user, by number."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from gleanrl.core.errors import ReplayError

Identity: TypeAlias = tuple[int, int]
"""Device and inode: what a file is, whatever descriptor leads to it."""


def identity_of(fd: int) -> Identity:
    """Return what the descriptor ``fd`` leads to."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


@dataclass(frozen=True, slots=True)
class Handle:
    """Where another process finds a file of this one: travels by pickle."""

    pid: int
    fd: int
    identity: Identity

    @classmethod
    def of(cls, fd: int) -> Handle:
        """Describe a descriptor of this process, which keeps it open."""
        return cls(os.getpid(), fd, identity_of(fd))

    def open(self) -> int:
        """Return a descriptor of our own for the same file.

        Raises:
            ReplayError: the process is gone, or what it has there now is another file.
        """
        path = f"/proc/{self.pid}/fd/{self.fd}"
        try:
            # Looked at before it is opened: opening and closing gives up locks on the file.
            status = os.stat(path)
            if (status.st_dev, status.st_ino) == self.identity:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as err:
            raise ReplayError(f"{self._lost()} ({err})") from err
        raise ReplayError(self._lost())

    def _lost(self) -> str:
        return (
            f"this shared replay buffer was handed on by process {self.pid}, which has ended or "
            "dropped it; a process has to keep its buffer until those it gave it to have opened it"
        )
