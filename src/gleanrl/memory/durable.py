"""Files that are whole or not there, and room on a disk that is taken before it is mapped."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PART = 1 << 26
"""Bytes per call: a write can be interrupted between two calls."""


def write_new(path: Path, data: Any) -> None:
    """Write a new file and see to it that it is on the disk; what fails leaves no file.

    Args:
        path: Of a file that does not exist.
        data: Bytes, or anything contiguous with the buffer protocol.

    Raises:
        OSError: the disk is full, or anything else goes wrong; says which file.
    """
    view = memoryview(data)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with _naming(path):
            _write_all(fd, view)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + _PART])
    os.fsync(fd)
    found = os.fstat(fd).st_size
    if found != len(view):
        raise OSError(errno.EIO, f"{found:,} of {len(view):,} bytes written")


def prepare(path: Path, text: str) -> Path:
    """Write what `publish` will put in place of ``path``; return the draft.

    Raises:
        OSError: the disk is full.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    write_new(draft, text.encode())
    return draft


def publish(draft: Path, path: Path) -> None:
    """Put ``draft`` in place of ``path``: readers see the old file or the new one, whole."""
    with _naming(path):
        os.replace(draft, path)
    sync_directory(path.parent)


def replace(path: Path, text: str) -> None:
    """Replace a file at once; the old one stays if that fails.

    Raises:
        OSError: the disk is full.
    """
    draft = prepare(path, text)
    try:
        publish(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """See to it that the names in a directory are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def take_room(fd: int, start: int, nbytes: int) -> None:
    """Take blocks of the disk for a part of a file, which grows to hold it.

    Without them, writing to a mapping of the file ends the process (``SIGBUS``) when the disk is
    full.

    Raises:
        OSError: the disk, a quota or a limit does not allow that much.
    """
    if nbytes > 0:
        os.posix_fallocate(fd, start, nbytes)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        err.filename = err.filename or os.fspath(path)
        raise
