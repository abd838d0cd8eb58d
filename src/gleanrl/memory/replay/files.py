"""The memory and files that rows lie in."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.memory.replay.handles import Handle
from gleanrl.memory.shared import SharedMemory

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]
_ALIGN = 64
_NORESERVE = 0x4000
"""Linux: what is mapped and never touched counts as nothing."""


def nbytes_of(shapes: Shapes) -> int:
    """Return how many bytes tensors of these shapes take one after another."""
    return sum(aligned(_nbytes(*shape)) for shape in shapes)


def carve(memory: mmap.mmap, shapes: Shapes) -> list[torch.Tensor]:
    """Lay tensors over ``memory``, one after another."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        whole[start : start + _nbytes(shape, dtype)].view(dtype).view(shape)
        for start, (shape, dtype) in zip(starts_of(shapes), shapes, strict=True)
    ]


def starts_of(shapes: Shapes) -> list[int]:
    """Return where tensors of these shapes begin."""
    return [0, *accumulate(aligned(_nbytes(*shape)) for shape in shapes)][:-1]


def sparse(nbytes: int) -> mmap.mmap:
    """Return zeroed private memory, of which only what is touched is taken from the machine."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=flags)


def check_disk(nbytes: int, frames: int, directory: str) -> None:
    """Refuse what is larger than what ``directory`` has left.

    Raises:
        ConfigError: ``frames`` of ``nbytes`` together are.
    """
    status = os.statvfs(directory)
    room = status.f_bavail * status.f_frsize
    if nbytes > room:
        raise ConfigError(
            f"a buffer of {frames:,} such frames takes {nbytes:,} bytes and "
            f"{directory} has {room:,} left: lower max_size, or give a scratch_dir"
        )


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def aligned(nbytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-nbytes // _ALIGN) * _ALIGN


def anonymous() -> SharedMemory:
    """Make empty memory that is gone with its last user."""
    return closing(SharedMemory())


def opened(handle: Handle) -> SharedMemory:
    """Open what another process has."""
    return closing(SharedMemory(handle.open()))


def closing(memory: SharedMemory) -> SharedMemory:
    """Return ``memory``, whose descriptor is closed once nobody holds it any more."""
    weakref.finalize(memory, os.close, memory.fd).atexit = False
    return memory


def unnamed_file(directory: str) -> int:
    """Make an empty file without a name; return its descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        # Some file systems have no files without names: this one loses its name at once.
        fd, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
        return fd
