"""Worker processes, read through ``/proc``, and interpreters of our own."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")
_TRACKER_S = 10.0
"""Longest wait for a resource tracker to remove semaphores and shared memory."""


def descendants(pid: int) -> dict[int, bool]:
    """Return the ids of all processes below ``pid`` but zombies, and whether each has children."""
    stats = dict(_stats())
    children: dict[int, list[int]] = {}
    for child, stat in stats.items():
        children.setdefault(int(stat[1]), []).append(child)
    found, queue = list[int](), [pid]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += below
    return {child: child in children for child in found if stats[child][0] != "Z"}


def workers() -> set[int]:
    """Return the ids of all processes below this one that have no children themselves.

    Servers that fork workers are left out: they are shared, and a stopped one starts no worker.
    """
    return {pid for pid, has_children in descendants(os.getpid()).items() if not has_children}


def _stats() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                yield int(entry.name), _stat(int(entry.name))


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name: state, parent, group, session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of all threads of ``pids`` so far, in steps of the kernel's tick."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += sum(map(int, _stat(pid)[11:13]))
    return total / _TICK


@contextmanager
def session(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a session of its own, and kill the rest of the session at the end.

    Resource trackers of `multiprocessing` end by themselves when the others are dead: they remove
    the named semaphores and shared memory that these leave in ``/dev/shm``.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        left = {pid for pid, stat in _stats() if int(stat[3]) == process.pid}
        trackers = {pid for pid in left if _is_tracker(pid)}
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if pid in trackers else signal.SIGKILL)
        process.wait()
        for pid in trackers:
            with suppress(ProcessLookupError):
                _await_end(pid)
                os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker, or may be one that is starting."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return not command or b"multiprocessing.resource_tracker" in command
    return False


def _await_end(pid: int) -> None:
    ended = os.pidfd_open(pid)
    select.select([ended], [], [], _TRACKER_S)
    os.close(ended)


def in_fresh_process(
    module: str, function: str, *arguments: Any, timeout_s: float | None = None
) -> Any:
    """Call a function in an interpreter of its own, with one thread, and return its result.

    Libraries hang if they fork beside threads that another library has left behind.

    Args:
        module: Where the function is.
        function: Its name.
        *arguments: Values of JSON.
        timeout_s: Seconds that it may take.

    Raises:
        RuntimeError: it failed, as its standard error says, or took longer than ``timeout_s``.
    """
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        program = ["benchmarks.processes", module, function, json.dumps(arguments), str(result)]
        command = [sys.executable, "-W", "ignore", "-m", *program]
        with session(command, env={**os.environ, **threads}) as process:
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired as err:
                raise RuntimeError(f"{module}.{function}: more than {timeout_s} s") from err
        if not result.exists():
            raise RuntimeError(f"{module}.{function}: ended with code {code}")
        return json.loads(result.read_text())


if __name__ == "__main__":
    code = 0
    try:
        called = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
        Path(sys.argv[4]).write_text(json.dumps(called(*json.loads(sys.argv[3]))))
    except Exception:
        code = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # At exit, weight schemes of TorchRL 0.14.1 start a thread, and wait for that for ever.
    os._exit(code)
