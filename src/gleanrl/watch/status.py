"""How a running collection is asked from another terminal how it is.

Every collector listens on a socket of its own, in a folder that only its user can enter, and one
thread that sleeps until somebody connects answers with its status as JSON.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gleanrl.core.errors import GleanError

OFF = "GLEANRL_TOP"
"""The environment variable that keeps collectors from listening if it is ``0``."""
_ANSWER_S, _ASK_S = 1.0, 3.0
_LINGER_S = 0.1
"""Seconds that closing waits for an answer that is being given."""
_MOST_BYTES = 1 << 24
_numbers = itertools.count()


class StatusError(GleanError, RuntimeError):
    """A collection cannot be asked."""


class StatusServer:
    """Answers who asks for the status of something, for as long as that lives."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        """Listen, if the runtime folder can be used and `OFF` does not forbid it.

        Args:
            status: A bound method that returns plain data; it is called in another thread, and its
                object is referred to weakly.
        """
        self._owner = os.getpid()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread
        self._path = ""
        if os.environ.get(OFF) == "0":
            return
        for folder in folders():
            with contextlib.suppress(OSError, StatusError), _opened(folder, make=True) as fd:
                self._listen(fd, f"{self._owner}-{next(_numbers)}-{os.urandom(4).hex()}")
                self._path = str(folder / self._name)
                break
        if self._listener is not None:
            _listening.add(self)
            answering = (self._listener, weakref.WeakMethod(status))
            self._thread = threading.Thread(
                target=_answer_all, args=answering, name="gleanrl-status", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # no more threads are allowed: collection goes on without
                self.close()

    def _listen(self, folder: int, name: str) -> None:
        """Listen in an open folder; nobody sees the socket before it does."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_reach(folder, f".{name}"))
            listener.listen(8)
            os.rename(f".{name}", name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            listener.close()
            raise
        self._name, self._listener = name, listener

    def close(self) -> None:
        """Stop answering. Idempotent; safe in any thread and in a forked child."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # ends the thread, which waits in `accept`
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join(_LINGER_S)
        listener.close()


_listening: weakref.WeakSet[StatusServer] = weakref.WeakSet()


def _forked() -> None:
    """Let go of the sockets of the parent: while a child has one, it seems to be listened to."""
    for server in list(_listening):
        server.close()


os.register_at_fork(after_in_child=_forked)


def _answer_all(
    listener: socket.socket, status: weakref.WeakMethod[Callable[[], Mapping[str, Any]]]
) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as err:
            if err.errno in (errno.EINVAL, errno.EBADF):  # closed
                return
            time.sleep(_ANSWER_S)  # no file descriptor is free, say: there may be one later
            continue
        ask = status()
        if ask is not None:
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_ANSWER_S)
                connection.sendall(_answer(ask))
        connection.close()
        del ask


def _answer(ask: Callable[[], Mapping[str, Any]]) -> bytes:
    try:
        return json.dumps(_plain(ask())).encode()
    except Exception as err:  # the collector is closing, or changes while it is read
        return json.dumps({"error": f"{type(err).__name__}: {err}"}).encode()


def _plain(value: Any) -> Any:
    """Replace what JSON lacks: numbers that are not finite."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- whoever asks ----------------------------------------------------------------------------------


def collections() -> list[dict[str, Any]]:
    """Return the status of every collection of this user, in the order of their start.

    Sockets of processes that were killed are removed.

    Raises:
        StatusError: a runtime folder can be entered by others.
    """
    found = []
    for folder in folders():
        with contextlib.suppress(FileNotFoundError), _opened(folder) as fd:
            names = [name for name in os.listdir(fd) if not name.startswith(".")]
            found += [status for name in names if (status := _ask(fd, name)) is not None]
    return sorted(found, key=lambda status: float(status.get("started", 0)))


def _ask(folder: int, name: str) -> dict[str, Any] | None:
    """Return what the collector behind ``name`` says, ``None`` if there is none."""
    deadline = time.monotonic() + _ASK_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ASK_S)
        try:
            connection.connect(_reach(folder, name))
            answer = bytearray()
            while part := connection.recv(1 << 16):
                answer += part
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                if len(answer) > _MOST_BYTES:
                    return None
            status = json.loads(answer)
            return status if isinstance(status, dict) else None
        except ConnectionRefusedError:  # nobody listens any more
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
        except (TimeoutError, BlockingIOError):  # the second one: too many wait already
            pid = name.partition("-")[0]
            return {"pid": int(pid) if pid.isdigit() else 0, "error": f"no answer in {_ASK_S:g} s"}
        except (OSError, ValueError):
            pass  # it ended just now
    return None


# -- the folder ------------------------------------------------------------------------------------


def folders() -> list[Path]:
    """Return where sockets may be, the best place first."""
    temporary = Path(tempfile.gettempdir()) / f"gleanrl-{os.getuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return [Path(runtime) / "gleanrl", temporary] if runtime else [temporary]


@contextlib.contextmanager
def _opened(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Open a folder of sockets after checking that it is this user's alone."""
    if make:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise StatusError(
                f"{folder} has to be yours with mode 0700 (it belongs to user {status.st_uid}, "
                f"mode {status.st_mode & 0o777:04o}); remove it or change it"
            )
        yield fd
    finally:
        os.close(fd)


def _reach(folder: int, name: str) -> str:
    """Return a path that is short enough for a socket, and stays in the folder that was checked."""
    return f"/proc/self/fd/{folder}/{name}"
