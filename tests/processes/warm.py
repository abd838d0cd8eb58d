"""Python programs in processes that are forked from one which has imported everything already.

Importing torch and TensorDict takes seconds, and dozens of tests start programs. `START` is the
path of an executable that takes the arguments of ``python``, for `subprocess`, submitit and
torchrun. It has a process forked that becomes the program, and stands for it: it passes signals
and descriptors on, and ends as the program does. What the program starts by `sys.executable`
starts in the same way.

What a program cannot tell from this: where it comes from. What it imports is there at once, and its
process is not a child of who started it (`stands_for` tells which it is). Its end is Python's, with
exit functions, ``__del__`` and GleanRL's modules taken apart; the libraries' modules and C++ are
only with ``GLEANRL_TESTS=all``, as that takes most of half a second.

All processes of a test run share one such process: the first leaves its folder in the environment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import locale
import os
import pkgutil
import random
import re
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
import weakref
from pathlib import Path

import numpy as np

SHARED = "GLEANRL_TESTS_WARM"
"""The variable of the environment that holds the folder of a run's process."""
FOLDER = Path(os.environ.get(SHARED) or f"{tempfile.gettempdir()}/gleanrl-warm-{os.getpid()}")
PYTHON = sys.executable
"""A plain one."""
START, DOOR = FOLDER / "python", FOLDER / "door"
PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
CLIENT = f"""#!{PYTHON} -IS
import json, os, signal, socket, sys
if sys.argv[1:3] == ["-m", "submitit.local._local"]:  # imports little, and is known by its number
    os.execv({PYTHON!r}, [{PYTHON!r}, *sys.argv[1:]])
words, context = sys.argv[1:], "--serialized-runtime-env-context="
if words and words[0].endswith("ray/_private/workers/setup_worker.py"):
    # It imports Ray to find the program of a worker, which imports Ray again.
    told = next(word for word in words if word.startswith(context))
    told = json.loads(told.removeprefix(context))
    if {{name: value for name, value in told.items() if value}} == {{"py_executable": sys.argv[0]}}:
        words = [word for word in words[1:] if not word.startswith((context, "--language="))]
door = socket.socket(socket.AF_UNIX)
door.connect({str(DOOR)!r})
fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
fds = [fd for fd in fds if fd != door.fileno() and os.path.exists(f"/proc/self/fd/{{fd}}")]
told = json.dumps({{
    "words": words, "folder": os.getcwd(), "env": dict(os.environ), "fds": fds,
    "pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0),
    "ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
}}).encode()
early = []
for name in {PASSED_ON!r}:
    if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
        signal.signal(getattr(signal, name), lambda number, frame: early.append(number))
socket.send_fds(door, [len(told).to_bytes(4, "big")], fds)
door.sendall(told)
answers = door.makefile("rb")
pid = int(answers.readline())
def pass_on(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for name in {PASSED_ON!r}:
    if signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
        signal.signal(getattr(signal, name), pass_on)
for number in early:
    pass_on(number, None)
for fd in fds:
    os.close(fd)
code = int(answers.readline() or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != 9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
_server: list[subprocess.Popen[bytes]] = []


def open_door() -> None:
    """Start the process that programs are forked from, once per test run."""
    if SHARED in os.environ:
        return
    os.environ[SHARED] = str(FOLDER)
    FOLDER.mkdir(mode=0o700)
    START.write_text(CLIENT)
    START.chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(str(DOOR))
        listener.listen(100)
        _server.append(
            subprocess.Popen(
                [PYTHON, __file__, str(listener.fileno()), str(FOLDER)],
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
            )
        )
    atexit.register(_close)


def _close() -> None:
    (server,) = _server
    server.stdin.close()  # type: ignore[union-attr]
    server.wait()
    shutil.rmtree(FOLDER)


def stands_for(pid: int) -> int:
    """Return the process that ``pid`` stands for: its own number if it is no `START`."""
    try:
        return int(os.readlink(FOLDER / str(pid)))
    except OSError:
        return pid


# -- in the process that programs are forked from --------------------------------------------------


class _Forks:
    """The loop of that process: one thread, no state but the programs that run."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        self._listener, self._folder = listener, folder
        self._doors: dict[int, socket.socket] = {}
        """By the process id of a program, the connection to what stands for it."""
        self._ends: dict[int, int] = {}
        """The same by a descriptor that tells when a program has ended: its process id."""

    def run(self) -> dict | None:
        """Fork for everybody who comes; return in a fork what is to be run, at last nothing."""
        while True:
            left = {door: pid for pid, door in self._doors.items()}
            ready = select.select([0, self._listener, *left, *self._ends], [], [])[0]
            if 0 in ready:
                for pid in self._doors:
                    os.kill(pid, signal.SIGKILL)
                return None
            for each in ready:
                if each is self._listener:
                    told = self._fork()
                    if told is not None:
                        return told
                elif each in self._ends:
                    self._ended(each)
                elif each in left and left[each] in self._doors:  # it was killed: so is the program
                    os.kill(left[each], signal.SIGKILL)
                    self._ended(next(fd for fd, pid in self._ends.items() if pid == left[each]))

    def _fork(self) -> dict | None:
        door, _ = self._listener.accept()
        head, fds, _, _ = socket.recv_fds(door, 4, 250)
        size, text = int.from_bytes(head, "big"), b""
        while len(text) < size and (more := door.recv(size - len(text))):
            text += more
        if not text or len(text) < size:  # it was killed
            door.close()
            return None
        told = json.loads(text)
        pid = os.fork()
        if pid == 0:
            for fd in self._ends:
                os.close(fd)
            for other in (door, self._listener, *self._doors.values()):
                other.close()
            return {**told, "got": list(fds)}
        for fd in fds:
            os.close(fd)
        self._link(told["pid"], pid)
        with contextlib.suppress(BrokenPipeError):  # it was killed: `run` sees that, too
            door.sendall(b"%d\n" % pid)
        self._doors[pid] = door
        self._ends[os.pidfd_open(pid)] = pid
        return None

    def _link(self, name: int, pid: int) -> None:
        link = self._folder / str(name)
        link.unlink(missing_ok=True)
        link.symlink_to(str(pid))

    def _ended(self, fd: int) -> None:
        pid = self._ends.pop(fd)
        os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with self._doors.pop(pid) as door, contextlib.suppress(OSError):
            door.sendall(b"%d\n" % code)


def _take_over(told: dict) -> None:
    """Make this process what the program's would be."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in told["got"]]
    for fd in {0, 1, 2, *told["got"]}:
        with contextlib.suppress(OSError):
            os.close(fd)
    for fd, wanted in zip(high, told["fds"], strict=True):
        os.dup2(fd, wanted, inheritable=True)
        os.close(fd)
    for kind in ("net", "mnt"):  # it may be on another host, or have other disks
        namespace = f"/proc/{told['pid']}/ns/{kind}"
        if os.readlink(namespace) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(namespace) as there:
                assert ctypes.CDLL(None).setns(there.fileno(), 0) == 0
    if told["session"] == os.getsid(0):
        os.setpgid(0, told["group"])
    else:
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN if told["ignored"] else signal.default_int_handler)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["env"])
    _look_up_again(told["pid"])
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(fd, mode, closefd=False) if fd in told["fds"] else None  # noqa: SIM115
        if stream is not None and fd:
            stream.reconfigure(line_buffering=fd == 2, write_through="-u" in told["words"])
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _look_up_again(starter: int) -> None:
    """Take over what processes inherit from ``starter``, and what they read when they begin."""
    status = Path(f"/proc/{starter}/status").read_text()
    os.umask(int(re.search(r"Umask:\s*(\d+)", status)[1], 8))
    os.sched_setaffinity(0, os.sched_getaffinity(starter))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, starter))
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            limit = getattr(resource, name)
            resource.setrlimit(limit, resource.prlimit(starter, limit))
    time.tzset()
    locale.setlocale(locale.LC_CTYPE, "")
    tempfile.tempdir = None
    for option in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings._setoption(option)
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed()
    np.random.seed()


def _run(words: list[str]) -> None:
    """Do what ``python`` does with these arguments."""
    sys.orig_argv[:] = [sys.executable, *words]
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            warnings._setoption(words.pop(0))
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, path), *BASE]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        name, source, sys.argv[:] = "<string>", words[1], ["-c", *words[2:]]
        sys.path.insert(0, "")
    else:
        name, source, sys.argv[:] = words[0], Path(words[0]).read_text(), words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    main = types.ModuleType("__main__")
    main.__dict__.update({"__builtins__": __builtins__, "__file__": name})
    if words[0] == "-c":
        del main.__file__
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), main.__dict__)


LIBRARIES = ("torchrl.envs", "torchrl.collectors", "torchrl.testing.mocking_classes")
LIBRARIES += ("pytest", "hypothesis", "rig", "encodings.idna", "torch.utils.serialization.config")
LIBRARIES += ("gymnasium.envs.classic_control", "torch.distributed.run", "pandas")
"""What tests, their environments and zygotes import, each process anew."""


def _import() -> None:
    """Import all of GleanRL, and with it whatever it needs; libraries of which tests use much."""
    import gleanrl

    sys.modules["ray"] = None  # type: ignore[assignment]  # once imported, it cannot be forked
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # nor with a thread
    for name in LIBRARIES:
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    del sys.modules["ray"]
    for found in pkgutil.walk_packages(gleanrl.__path__, "gleanrl."):
        if not found.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # an extra that is not installed
                importlib.import_module(found.name)


def _end_soon() -> None:
    """Have GleanRL's modules alone taken apart, and no C++; Python's last exit function.

    Others are otherwise taken apart after those that import them, and in copies of their pages.
    """
    if os.environ.get("GLEANRL_TESTS") == "all":
        return
    ends = {*sys.builtin_module_names, "gleanrl", "__main__"}
    stay = [sys.modules.pop(name, None) for name in LOADED if name.partition(".")[0] not in ends]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stay))
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc._exit, None)  # before all that is there already


if __name__ == "__main__":
    assert not weakref.finalize._registered_with_atexit, "finalizers would run after it"
    atexit.register(_end_soon)
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    BASE = [entry for entry in sys.path if entry not in own]
    FOLDER = Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is the tests' to handle
    gc.disable()
    _import()
    gc.enable()
    LOADED = list(sys.modules)
    if os.environ.get("GLEANRL_TESTS") != "all":
        for each in weakref.finalize._registry:  # of torch's operators, one by one
            each.atexit = False
    gc.freeze()  # what is there already is neither looked at nor copied by forks
    told = _Forks(socket.socket(fileno=int(sys.argv[1])), FOLDER).run()
    if told is not None:
        sys.executable = str(FOLDER / "python")
        _take_over(told)
        _run(told["words"])
