"""A process that has everything imported and forks workers on request.

Importing torch takes seconds, forking a process that has imported it takes milliseconds. The
learner cannot be forked, because its threads would not survive and their locks would stay locked.
So one helper process imports, never starts a thread, and forks. A worker that needs workers of its
own asks that process to fork another helper.

The zygote tells the learner how each worker ended, and kills the workers when the learner is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import itertools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TextIO

from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, WorkerDied

_REQUEST = struct.Struct("=4sq")
"""The request, and the number of its fork."""
_REPLY = struct.Struct("=cqi")
"""The kind, the number of the fork (0 for a worker's own zygote), and the value: of ``F`` a process
id, of ``E`` the status with which that process ended, of ``X`` the error of the fork."""
_MAX_FDS = 8
WORKER, NODE = b"work", b"node"
"""The kinds of forks."""
# With -c the working directory comes first on the path, whether or not it is on the learner's.
_PROGRAM = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
from gleanrl.transport.zygote import main as _main
_main(sys.argv[1], *map(int, sys.argv[2:]))
"""
_PRELOADED = "gleanrl"
"""The package of which workers find every public name imported."""
_TORCHRL = "torchrl.envs"
"""A module that takes a second to import, and tens of megabytes, in each worker that needs it."""
_PR_SET_PDEATHSIG = 1
_ARROW = "JE_ARROW_MALLOC_CONF"
"""Whether pyarrow, which pandas imports, starts a thread; no fork may find one here."""
_request_end: socket.socket | None = None
"""In a worker: where it may ask for a zygote of its own."""


class Zygote:
    """The handle of a process on its zygote."""

    def __init__(self) -> None:
        """Start the zygote, without waiting until it has imported everything.

        In a worker, the zygote of that worker forks another one.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self.owner = os.getpid()
        self._forks = itertools.count(1)
        self._replies: dict[tuple[bytes, int], int] = {}
        """By kind and number of the fork, because process ids come round again."""
        self._numbers: dict[int, int] = {}
        """The latest fork that got a process id."""
        # Collectors in several threads share the zygote: the thread that reads a message notes it
        # for all. Reentrant, because the garbage collector may close one collector in the middle of
        # another's fork.
        self._lock = threading.RLock()
        fds = [theirs.detach()]
        try:
            with contextlib.suppress(OSError):  # a kernel without descriptors of processes
                fds.append(os.pidfd_open(os.getpid()))  # tells the zygote when this process ends
            self._process = None if _forked_by_zygote(fds) else _spawned(fds)
        finally:
            for fd in fds:
                os.close(fd)

    @property
    def alive(self) -> bool:
        """Whether it runs and is this very process's own."""
        if self.owner != os.getpid() or self._socket.fileno() < 0:
            return False
        if self._process is not None:
            return self._process.poll() is None
        hung_up = select.poll()
        hung_up.register(self._socket, 0)
        return not hung_up.poll(0)

    def fork(self, fds: Sequence[int], timeout: float, what: bytes = WORKER) -> int:
        """Fork a worker that gets copies of ``fds``; return its process id.

        A `WORKER` serves this process over its first descriptor, a `NODE` reads there where to go.
        """
        deadline = Deadline(timeout)
        with self._lock:
            number = next(self._forks)
            forked, refused = (b"F", number), [(b"X", number), (b"X", 0)]
            try:
                self._request(what, number, fds)
                while self._replies.keys().isdisjoint((forked, *refused)):
                    self._hear(deadline)
            except BaseException:  # also Ctrl-C: the worker may still come, unknown to its owner
                self._request(b"kill", number)
                raise
            if forked not in self._replies:
                error = next(self._replies[each] for each in refused if each in self._replies)
                raise WorkerDied(
                    f"no process could be started: {os.strerror(error)}; fewer workers, or a "
                    "higher limit of processes, descriptors (ulimit -u, -n) or memory would help"
                )
            pid = self._replies.pop(forked)
            self._numbers[pid] = number
            return pid

    def exit_status(self, pid: int, timeout: float) -> int | None:
        """Return how worker ``pid`` ended (as `subprocess` counts), ``None`` if it has not yet."""
        ended, deadline = (b"E", self._numbers[pid]), Deadline(timeout)
        if not self._lock.acquire(timeout=deadline.left):
            return None
        try:
            while ended not in self._replies:
                self._hear(deadline)
        except (CollectorTimeout, WorkerDied):
            return None
        finally:
            self._lock.release()
        return self._replies[ended]

    def _request(self, what: bytes, number: int, fds: Sequence[int] = ()) -> None:
        if self._socket.fileno() >= 0:
            with contextlib.suppress(ConnectionError):  # the wait for the answer raises it
                socket.send_fds(self._socket, [_REQUEST.pack(what, number)], list(fds))

    def _hear(self, deadline: Deadline) -> None:
        """Take in a message, or nothing if another thread took it first."""
        fd = self._socket.fileno()
        if fd < 0:
            raise WorkerDied("the process that starts workers was ended")
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        if not waiting.poll(1000 * deadline.left):
            raise CollectorTimeout(
                f"the process that starts workers did not answer in {deadline.seconds} s; it "
                "imports torch first, which takes long on a busy machine or a slow disk "
                "(collectors wait for start_timeout seconds: raise that)"
            )
        try:
            message = self._socket.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:  # also where another thread has closed it meanwhile
            message = b""
        if not message:
            raise WorkerDied(
                f"the process that starts workers ended{self._how()}; its message is above"
            )
        kind, number, value = _REPLY.unpack(message)
        self._replies[kind, number] = value

    def _how(self) -> str:
        if self._process is None:
            return ""
        try:
            return f" with code {self._process.wait(5)}"
        except subprocess.TimeoutExpired:
            return ""

    def kill(self, pid: int) -> None:
        """Kill worker ``pid`` if it still runs; no other process can have its number."""
        if self.alive:
            self._request(b"kill", self._numbers[pid])

    def end(self, pid: int, timeout: float) -> None:
        """Let worker ``pid``, which was asked to end, do so for ``timeout`` seconds, or kill it."""
        if self.exit_status(pid, timeout) is None:
            with contextlib.suppress(OSError):
                self.kill(pid)

    def close(self) -> None:
        """End it, and with it every worker that is left. Only its owner can."""
        owned = self.owner == os.getpid()
        if owned:  # closing is not enough while a forked child of the owner holds it too
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if not owned or self._process is None:
            return
        if not self._numbers:  # it may import for seconds yet; a fork under way dies with it
            self._process.kill()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)


def exit_text(status: int) -> str:
    """Return how a process ended, by its status as `subprocess` counts."""
    return f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"


def _forked_by_zygote(fds: Sequence[int]) -> bool:
    """Ask the zygote that this process was forked from for another one, if there is one."""
    if _request_end is None:
        return False
    try:
        socket.send_fds(_request_end, [b"zygote"], fds)
    except OSError:  # it is gone
        return False
    return True


def _spawned(given: Sequence[int]) -> subprocess.Popen[bytes]:
    path = [
        os.fsdecode(entry) for entry in sys.path if isinstance(entry, str | bytes | os.PathLike)
    ]
    # tensordict leaves "None" after a lazy stack, and in another process cannot read that.
    environment = {k: v for k, v in os.environ.items() if (k, v) != ("LAZY_LEGACY_OP", "None")}
    # Not one of the three that stand for something else, which may be free in this process.
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in given]
    try:
        # A session of its own: Ctrl-C in the terminal is the learner's to handle.
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, _learners_torchrl(), *map(str, fds)],
            pass_fds=fds,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=_inherited(sys.__stdout__),
            stderr=_inherited(sys.__stderr__),
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        )
    finally:
        for fd in fds:
            os.close(fd)


def _learners_torchrl() -> str:
    """Return the file of the torchrl whose environments this process has imported, if it has."""
    if sys.modules.get(_TORCHRL) is None:
        return ""
    return getattr(sys.modules.get("torchrl"), "__file__", None) or ""


def _inherited(stream: TextIO | None) -> int | None:
    # A descriptor that is free would become that of a socket, and printing a message on it.
    return subprocess.DEVNULL if stream is None or stream.closed else None


# -- in the zygote ---------------------------------------------------------------------------------


def main(torchrl: str, fd: int, owner: int = -1) -> None:
    """Import the modules of workers, then fork on request until the learner is gone.

    ``torchrl`` is the file of the learner's torchrl, "" for none. ``owner`` is a descriptor that
    tells when the learner's process ends, -1 for none.
    """
    for each in (fd, owner):
        if each >= 0:
            os.set_inheritable(each, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stay)
    code = 1
    try:
        with _ending_with(owner):
            preload(_import_pandas, partial(_import_torchrl, torchrl))  # once, for all workers
        from gleanrl.transport import node_endpoint, worker_loop

        works: Mapping[bytes, Callable[..., None]] = {
            WORKER: worker_loop.main,
            NODE: node_endpoint.main,
        }
        _Zygote(socket.socket(fileno=fd), owner, works).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # At once: the learner waits for this, and taking torch apart takes a second.
        os._exit(code)


@contextlib.contextmanager
def _ending_with(owner: int) -> Iterator[None]:
    """End this process in the middle of imports, which take seconds, if the learner has ended.

    The kernel signals the end of the learner's thread that started this process. ``owner`` tells
    whether the whole learner has ended; see `main`.
    """
    ended = select.poll()
    if owner >= 0:
        ended.register(owner, select.POLLIN)

    def look(*_: object) -> None:
        if ended.poll(0):
            os._exit(1)

    prctl = ctypes.CDLL(None).prctl
    signal.signal(signal.SIGIO, look)
    prctl(_PR_SET_PDEATHSIG, signal.SIGIO)
    look()
    try:
        yield
    finally:
        prctl(_PR_SET_PDEATHSIG, 0)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def preload(*others: Callable[[], None]) -> None:
    """Import the modules of workers.

    The garbage collector is off meanwhile, because it would take a third of the time. Later
    collections leave out the imported objects, which saves time in workers, and pages in forks.
    """
    package = importlib.import_module(_PRELOADED)
    gc.disable()
    try:
        for name in package.__all__:
            getattr(package, name)
        for other in others:
            other()
    finally:
        gc.freeze()
        gc.enable()


def _import_pandas() -> None:
    """Import pandas where there is one.

    The first call of a `TensorDictModule` does so. Each worker by itself would take half a second
    and tens of megabytes for it.
    """
    if importlib.util.find_spec("pandas") is None:
        return
    given = _ARROW in os.environ
    os.environ.setdefault(_ARROW, "background_thread:false")
    _import("pandas")
    if not given:
        del os.environ[_ARROW]


def _import_torchrl(file: str) -> None:
    """Import TorchRL's environments, if this process would import the learner's ``file``."""
    if file and (spec := importlib.util.find_spec("torchrl")) and spec.origin == file:
        _import(_TORCHRL)


def _import(name: str) -> None:
    with contextlib.suppress(BaseException):  # a broken module is an error where it is used
        importlib.import_module(name)


class _Zygote:
    """The loop of a zygote: one thread, no state but its children."""

    def __init__(
        self, control: socket.socket, owner: int, works: Mapping[bytes, Callable[..., None]]
    ) -> None:
        self._control = control
        # A process that the owner has forked may hold the connection open after its end.
        self._owner = [owner] if owner >= 0 else []
        self._works = works
        self._pid = os.getpid()
        self._children: dict[int, int] = {}
        """Workers' process ids, and the numbers of their forks."""
        self._unreported: set[int] = set()
        """Zygotes forked for workers; their end is reported to no process."""
        # Any worker may write to the one end; the other is read here.
        self._requests, self._request_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        watched = select.poll()  # select() takes no descriptor above 1023
        for fd in (self._control.fileno(), self._requests.fileno(), self._woken, *self._owner):
            watched.register(fd, select.POLLIN)
        try:
            while True:
                ready = [fd for fd, _ in watched.poll()]
                if set(ready).intersection(self._owner):
                    return
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._report_ended()
                if self._requests.fileno() in ready:
                    self._fork_zygote()
                if self._control.fileno() in ready and not self._obey():
                    return
        except ConnectionError:
            return  # the owner is gone
        finally:
            if os.getpid() == self._pid:  # no child may ever end others
                for pid in self._children.keys() | self._unreported:
                    os.kill(pid, signal.SIGKILL)

    def _obey(self) -> bool:
        """Carry out one request; return ``False`` once the owner is gone."""
        try:
            message, fds, _, _ = socket.recv_fds(self._control, 64, _MAX_FDS)
        except ConnectionError:
            return False
        if not message:
            return False
        what, number = _REQUEST.unpack(message)
        if what == b"kill":
            for pid in [pid for pid, of in self._children.items() if of == number]:
                os.kill(pid, signal.SIGKILL)
            return True
        try:
            pid = self._fork(lambda: self._become_worker(what, fds))
        except OSError as err:  # too many processes, too little memory: the others stay
            self._control.send(_REPLY.pack(b"X", number, err.errno or 0))
            return True
        finally:
            for fd in fds:
                os.close(fd)
        self._children[pid] = number
        self._control.send(_REPLY.pack(b"F", number, pid))
        return True

    def _fork_zygote(self) -> None:
        """Fork a zygote for a worker; it serves that one over the descriptor that came along."""
        _, fds, _, _ = socket.recv_fds(self._requests, 64, _MAX_FDS)
        try:
            if fds:  # else this process had no descriptor left for them: the worker is told by that
                self._unreported.add(self._fork(lambda: self._become_zygote(*fds)))
        except OSError as err:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fds[0])) as told:
                told.send(_REPLY.pack(b"X", 0, err.errno or 0))
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, become: Callable[[], None]) -> int:
        """Run ``become`` in a child, to its end."""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _die_with(parent)
                become()
                code = 0
            except BaseException as error:
                traceback.print_exc()
                if isinstance(error, SystemExit):
                    code = error.code if isinstance(error.code, int) else int(bool(error.code))
            finally:
                try:
                    _flush()
                finally:
                    os._exit(code)
        return pid

    def _become_worker(self, what: bytes, fds: Sequence[int]) -> None:
        global _request_end
        if what == WORKER:
            signal.signal(signal.SIGTERM, _stay)
        _request_end = self._request_end
        self._leave()
        self._works[what](*fds)

    def _become_zygote(self, fd: int, owner: int = -1) -> None:
        signal.signal(signal.SIGTERM, _stay)
        self._leave()
        self._request_end.close()
        _Zygote(socket.socket(fileno=fd), owner, self._works).run()

    def _leave(self) -> None:
        """Give up signal handlers and descriptors of the process that forked this one."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._requests):
            end.close()
        for fd in (self._woken, self._wake, *self._owner):
            os.close(fd)

    def _report_ended(self) -> None:
        while self._children or self._unreported:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid in self._children:
                number = self._children.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                self._control.send(_REPLY.pack(b"E", number, code))
            self._unreported.discard(pid)


def _stay(number: int, frame: object) -> None:
    """Do nothing at SIGTERM: a cluster sends it to all processes of a job, and the learner decides.

    Programs and forks that environments start do not inherit this.
    """


def _in_child() -> None:
    if signal.getsignal(signal.SIGTERM) is _stay:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # None, closed, or an object of the user's
            stream.flush()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the zygote ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)
