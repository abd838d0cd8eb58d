"""The folders of a dump: several processes may write dumps to one directory, or die doing so.

A dump is a folder of files, and a description that names it. Whoever writes one holds a lock of the
kernel on its folder, which ends with the process; a folder that nobody holds and that the
description does not name is what a dead process left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from gleanrl.memory import durable

META = "meta.json"
FOLDER = re.compile(r"data-[0-9a-f]{32}")
_PATIENCE_S = 10.0
_POLL_S = 0.01


@contextlib.contextmanager
def new_folder(root: Path) -> Iterator[Path]:
    """Make a folder for a dump, which is removed again if that fails."""
    folder = root / f"data-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as held:
        with _locked(root, _PATIENCE_S):  # nobody tidies up between making and locking
            folder.mkdir()
            held.enter_context(_locked(folder, 0.0))
        try:
            yield folder
        except BaseException:
            if named(root) != folder.name:
                _remove(folder)
            raise


def named(root: Path) -> str | None:
    """Return which folder the description names, ``None`` if there is no such description."""
    try:
        found = json.loads((root / META).read_text())["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and FOLDER.fullmatch(found) else None


def publish(folder: Path, text: str) -> None:
    """Make ``text`` the description, which names ``folder``; remove what nobody needs any more.

    Raises:
        OSError: the disk is full; the description is the old one.
    """
    root = folder.parent
    durable.sync_directory(folder)
    fresh = root / f"{META}.{folder.name}"
    durable.write_new(fresh, text.encode())
    with _locked(root, _PATIENCE_S) as alone:
        before = named(root)
        durable.publish(fresh, root / META)
        if before is not None and before != folder.name:
            _remove(root / before)
        for other in [path for path in root.iterdir() if FOLDER.fullmatch(path.name)]:
            if alone and other.name != folder.name:
                _remove_unheld(other)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / f"{META}.{folder.name}").unlink(missing_ok=True)


def _remove_unheld(folder: Path) -> None:
    with contextlib.suppress(OSError), _locked(folder, 0.0) as unheld:
        if unheld:
            _remove(folder)


@contextlib.contextmanager
def _locked(directory: Path, patience: float) -> Iterator[bool]:
    """Lock a directory; say whether it could be within ``patience`` seconds.

    Without the lock (on a file system that has none, or if its holder was stopped) dumps are as
    safe, but what dead processes left stays.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline, locked = time.monotonic() + patience, _try_lock(fd)
        while locked is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            locked = _try_lock(fd)
        try:
            yield bool(locked)
        finally:
            if locked:  # a forked child has the descriptor as well: closing it is not enough
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool | None:
    """Return ``None`` if somebody else has the lock, False where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError:
        return False
    return True
