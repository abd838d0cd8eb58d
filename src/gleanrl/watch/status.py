"""The status of a running collection for other terminals: a small file that it replaces.

Collectors write it while they collect, into a folder that only their user can enter. A reader
disturbs no collector, and needs none that answers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gleanrl.core.errors import GleanError
from gleanrl.memory.tensor_files import TensorFileError, read_description

OFF = "GLEANRL_TOP"
"""The environment variable that keeps collectors from writing if it is ``0``."""
_NAME = re.compile(r"(\.?)(\d+)-(\d+)-\d+")
"""Process, its start, and a number; a draft is hidden."""
_MEMORY = "/dev/shm"
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_numbers = itertools.count()


class StatusError(GleanError, RuntimeError):
    """The status of collections cannot be read."""


class StatusFile:
    """The status of one collector, for as long as that lives."""

    def __init__(self) -> None:
        """Write nothing yet, and never if `OFF` forbids it."""
        self._owner = os.getpid()
        self._name = f"{self._owner}-{_start_of(self._owner)}-{next(_numbers)}"
        self._folder = ""
        """A string: a `Path` takes ten times as long where caches are cold."""
        self._shown = os.environ.get(OFF) != "0"

    def _place(self) -> None:
        """Make the folder; show nothing if it cannot be used."""
        path = _folder()
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        _living(path)
        self._folder = str(path)

    def write(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Replace the file's contents by the result of ``status``; ignore failures."""
        if not self._shown or os.getpid() != self._owner:
            return
        try:
            text = json.dumps(status())
        except Exception as err:  # of a subclass of the user's
            text = json.dumps({"pid": self._owner, "error": f"{type(err).__name__}: {err}"})
        with contextlib.suppress(OSError, StatusError):
            if not os.path.isdir(self._folder):
                self._place()
            path, draft = f"{self._folder}/{self._name}", f"{self._folder}/.{self._name}"
            file = os.open(draft, _FRESH, 0o600)
            try:
                os.write(file, text.encode())
            finally:
                os.close(file)
            os.replace(draft, path)
            if not self._shown:  # another thread removed it meanwhile
                os.unlink(path)

    def remove(self) -> None:
        """Remove the file; later writes are not shown. Idempotent; forked children keep it."""
        shown, self._shown = self._shown, False
        if shown and self._folder and os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                os.unlink(f"{self._folder}/{self._name}")


def collections() -> list[dict[str, Any]]:
    """Return the status of every collection of this user, in the order of their start.

    ``"age"`` is how many seconds ago it was written; numbers that are not finite are ``None``.
    Files of processes that ended are removed.

    Raises:
        StatusError: others can enter the folder of the files.
    """
    found = []
    with contextlib.suppress(OSError):  # it cannot be used, so nobody did
        for path in _living(_folder()):
            with contextlib.suppress(OSError, TensorFileError):  # it ended just now
                status = read_description(path)
                status["age"] = max(0.0, time.time() - path.stat().st_mtime)
                found.append(status)
    return sorted(found, key=lambda status: float(status.get("started", 0)))


def _folder() -> Path:
    """Return the folder of the files of this user.

    It is in memory, unless the user wants another one: on ext4, replacing a file takes 0.5 ms.
    """
    in_memory = "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK | os.X_OK)
    return Path(_MEMORY if in_memory else tempfile.gettempdir()) / f"gleanrl-{os.getuid()}"


def _living(folder: Path) -> list[Path]:
    """Return the files of processes that are alive; remove those of processes that ended."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StatusError(
            f"{folder} must be your folder with mode 0700 (it belongs to user {status.st_uid}, "
            f"mode {stat.filemode(status.st_mode)}); remove it or change it"
        )
    living = []
    for path in folder.iterdir():
        if named := _NAME.fullmatch(path.name):
            hidden, pid, start = named.groups()
            if _start_of(pid) != start:
                path.unlink(missing_ok=True)
            elif not hidden:
                living.append(path)
    return living


def _start_of(pid: int | str) -> str:
    """Return the start of process ``pid``, to detect a reused number; empty if it ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
