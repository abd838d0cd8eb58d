"""A process that has everything imported and forks workers on request.

Importing torch takes seconds, forking a process that has done so takes milliseconds. Forking the
learner itself is no choice: its threads do not survive, and what they held stays locked. So one
helper process imports, never starts a thread, and forks.

It also is the workers' undertaker. It tells the learner how each of them ended, and when the
learner is gone, however it went, it kills them.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from gleanrl.core.errors import CollectorTimeout, WorkerDied

_FORKED = struct.Struct("=ci")
_EXITED = struct.Struct("=cii")
_MAX_FDS = 8
_PROGRAM = "from gleanrl.engine.backends.zygote import main; main(int(__import__('sys').argv[1]))"
_PR_SET_PDEATHSIG = 1


class Zygote:
    """The learner's handle on its zygote."""

    def __init__(self) -> None:
        """Start it; it goes on importing while the learner does other things."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self.owner = os.getpid()
        self._statuses: dict[int, int] = {}
        self._lock = threading.Lock()  # several collectors, in several threads, share it
        # A session of its own: Ctrl-C in the terminal is the learner's to handle.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether it runs and is this very process's own."""
        return self.owner == os.getpid() and self._process.poll() is None

    def fork(self, fds: Sequence[int], timeout: float) -> int:
        """Fork a worker that gets copies of ``fds``; return its process id.

        Raises:
            CollectorTimeout: the zygote did not answer in time.
            WorkerDied: the zygote itself ended.
        """
        with self._lock:
            try:
                socket.send_fds(self._socket, [b"fork"], list(fds))
            except ConnectionError:
                self._next(timeout)  # says how it ended
            while True:
                message = self._next(timeout)
                if message[:1] == b"F":
                    pid = int(_FORKED.unpack(message)[1])
                    self._statuses.pop(pid, None)  # of an earlier process of that number
                    return pid
                self._note(message)

    def exit_status(self, pid: int, timeout: float) -> int | None:
        """Return how worker ``pid`` ended (as `subprocess` counts), ``None`` if it has not yet."""
        deadline = time.monotonic() + timeout
        with self._lock:
            while pid not in self._statuses:
                try:
                    self._note(self._next(max(0.0, deadline - time.monotonic())))
                except (CollectorTimeout, WorkerDied):
                    return None
        return self._statuses[pid]

    def _next(self, timeout: float) -> bytes:
        if self._socket.fileno() < 0:
            raise WorkerDied("the process that starts workers was ended")
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        if not waiting.poll(1000 * timeout):
            raise CollectorTimeout(f"the process that starts workers did not answer in {timeout} s")
        message = self._socket.recv(64)
        if not message:
            raise WorkerDied(
                f"the process that starts workers ended with code {self._process.wait(5)}; its "
                "message is above"
            )
        return message

    def _note(self, message: bytes) -> None:
        _, pid, status = _EXITED.unpack(message)
        self._statuses[pid] = status

    def kill(self, pid: int) -> None:
        """Kill worker ``pid`` if it still runs; nobody else can have got its number meanwhile."""
        if pid not in self._statuses and self.alive:
            socket.send_fds(self._socket, [b"kill" + struct.pack("=i", pid)], [])

    def close(self) -> None:
        """End it, and with it every worker that is left. Only its owner can."""
        self._socket.close()
        if self.owner != os.getpid():
            return
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


# -- in the zygote ---------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Import what workers need, then fork on request until the learner is gone."""
    from gleanrl.rollout import serve

    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)
    children: set[int] = set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        while True:
            ready = select.select([control.fileno(), woken], [], [])[0]
            if woken in ready:
                os.read(woken, 4096)
                _report_ended(control, children)
            if control.fileno() in ready and not _obey(
                control, children, serve.main, (woken, wake)
            ):
                return
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _obey(control: socket.socket, children: set[int], run: object, own: tuple[int, int]) -> bool:
    """Carry out one request; return ``False`` once the learner is gone."""
    try:
        message, fds, _, _ = socket.recv_fds(control, 64, _MAX_FDS)
    except ConnectionError:
        return False
    if not message:
        return False
    if message[:4] == b"kill":
        (pid,) = struct.unpack("=i", message[4:])
        if pid in children:
            os.kill(pid, signal.SIGKILL)
        return True
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become_worker(control, zygote, run, fds, own)
    for fd in fds:
        os.close(fd)
    children.add(pid)
    control.send(_FORKED.pack(b"F", pid))
    return True


def _become_worker(
    control: socket.socket, zygote: int, run: object, fds: Sequence[int], own: tuple[int, int]
) -> None:
    """Run a worker to its end; never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (control.detach(), *own):
            os.close(fd)
        _die_with(zygote)
        assert callable(run)
        run(*fds)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the zygote ends, whatever it is doing then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def _report_ended(control: socket.socket, children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        control.send(_EXITED.pack(b"E", pid, os.waitstatus_to_exitcode(status)))
