"""Worker processes, read through ``/proc``, and interpreters of our own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_TICK = os.sysconf("SC_CLK_TCK")


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


def in_fresh_process(module: str, function: str, *arguments: Any) -> Any:
    """Call a function in an interpreter of its own, with one thread.

    Raises:
        RuntimeError: it failed.
    """
    program = ["-m", "benchmarks.processes", module, function, json.dumps(arguments)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise RuntimeError(f"{' '.join(program)}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    called = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    print(json.dumps(called(*json.loads(sys.argv[3]))))
