"""Processes: a system's, put to sleep between its turns, read through ``/proc``; and our own."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.harness import WRONG, Clock, Fields, System

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGESIZE")
SETTLE = 0.3
"""Seconds of batches before a window is timed: whatever was ready beforehand is used up in them."""


def workers() -> set[int]:
    """Return the ids of all processes below this one that have no children themselves.

    Servers that fork workers are left out: they are shared, and a sleeping one starts nobody.
    """
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found.update(pid for pid in below if pid not in children)
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of all threads of ``pids`` so far, in steps of the kernel's tick."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += sum(map(int, _stat(pid)[11:13]))
    return total / _TICK


def page_faults(pids: Iterable[int]) -> int:
    """Return the page faults of ``pids`` so far, minor and major."""
    return sum(int(_stat(pid)[7]) + int(_stat(pid)[9]) for pid in pids)


def private_mib(pids: Iterable[int]) -> float:
    """Return what of ``pids`` is in memory and not of a file or shared memory."""
    pages = (Path(f"/proc/{pid}/statm").read_text().split()[1:3] for pid in pids)
    return sum(int(resident) - int(shared) for resident, shared in pages) * _PAGE / 2**20


def descriptors(pids: Iterable[int]) -> int:
    """Return how many file descriptors ``pids`` have open."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


def wait_until_asleep(pids: Iterable[int], timeout: float = 10.0) -> bool:
    """Wait until none of ``pids`` has run for 20 ms; return whether that came about."""
    pids = list(pids)
    end = time.monotonic() + timeout
    quiet = 0
    while time.monotonic() < end and quiet < 10:
        states = [_stat(pid)[0] for pid in pids]
        quiet = quiet + 1 if all(state == "S" for state in states) else 0
        time.sleep(0.002)
    return quiet >= 10


class Group(System):
    """A system together with the processes that building it started.

    They sleep (SIGSTOP) while other systems have their turn: some peers go on working or spinning
    when nobody asks them to.
    """

    def __init__(self, build: Callable[[], System]) -> None:
        before = workers()
        self.system = build()
        self.pids = workers() - before
        self.sleep()

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def sleep(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def collect_batch(self) -> int:
        return self.system.collect_batch()

    def fields(self) -> Fields:
        return self.system.fields()

    def close(self) -> None:
        self.wake()
        self.system.close()


def grouped(build: Callable[[], System]) -> Callable[[], System]:
    """Return a builder of the same system as a `Group`."""
    return lambda: Group(build)


@contextmanager
def turn(system: System) -> Iterator[Clock]:
    """Wake a `Group`, let it settle, give the clock of its and our CPU time, put it to sleep."""
    assert isinstance(system, Group)
    system.wake()
    try:
        end = time.perf_counter() + SETTLE
        while time.perf_counter() < end:
            system.collect_batch()
        yield lambda: time.process_time() + cpu_seconds(system.pids)
    finally:
        system.sleep()


class Forked(System):
    """Processes of our own that do something again and again, and only say that it is done.

    Each is asked ``ahead`` times before the first answer is taken, so that none waits for us.
    """

    def __init__(
        self, builds: Sequence[Callable[[], Callable[[], Any]]], size: int, ahead: int = 2
    ) -> None:
        """Start a process per build; what it returns is called once per request.

        Args:
            builds: Called in the processes.
            size: What one answer counts for.
            ahead: Requests under way; none for a message and its answer.
        """
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._size, self._ahead = size, ahead
        for build in builds:
            ours, theirs = context.Pipe()
            process = context.Process(target=_answer, args=(theirs, build), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            for _ in range(ahead):
                ours.send_bytes(b"go")

    def collect_batch(self) -> int:
        """Return the size of an answer, of whoever is ready first."""
        if not self._ahead:
            self._pipes[0].send_bytes(b"go")
            self._pipes[0].recv_bytes()
            return self._size
        pipe: Any = wait(self._pipes)[0]
        pipe.recv_bytes()
        pipe.send_bytes(b"go")
        # Another first the next time.
        self._pipes.append(self._pipes.pop(self._pipes.index(pipe)))
        return self._size

    def close(self) -> None:
        end(self._processes)
        for pipe in self._pipes:
            pipe.close()


def _answer(pipe: Connection, build: Callable[[], Callable[[], Any]]) -> None:
    act = build()
    with suppress(EOFError, OSError):
        while True:
            pipe.recv_bytes()
            act()
            pipe.send_bytes(b"done")


def end(processes: Iterable[Any]) -> None:
    """Kill processes of `multiprocessing` and wait for them."""
    for process in processes:
        process.kill()
        process.join()


def run_fresh(*program: str) -> Any:
    """Run a program in an interpreter of its own, with one thread; its last line is JSON.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise RuntimeError(f"{WRONG} {' '.join(program)}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def in_fresh_process(module: str, function: str, *arguments: Any) -> Any:
    """Call a function in an interpreter of its own."""
    return run_fresh("-m", "benchmarks.processes", module, function, json.dumps(arguments))


if __name__ == "__main__":
    called = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    print(json.dumps(called(*json.loads(sys.argv[3]))))
