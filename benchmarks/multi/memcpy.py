"""Bare copies and bare messages: what no system can beat.

Copiers own buffers as large as a collector's rollouts and fill them from one array, row by row,
with ``numpy.copyto``: observation and successor, the bytes that a batch delivers.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from benchmarks.harness import Fields
from benchmarks.multi.envs import Still

BUFFERS = 3
"""Rollouts that a copier fills in turn, so that caches help it no more than a collector."""


class Copies:
    """Fills one rollout's memory after the other in this process."""

    def __init__(self, size: int, steps: int, stepping: bool = False) -> None:
        """Copy ``steps`` arrays of ``size`` bytes; ``stepping`` asks an environment for each."""
        self._step = Still(0, size).step if stepping else None
        self._seen = np.ones(size, np.uint8)
        memory = np.ones((BUFFERS, 2, steps, size), np.uint8)
        self._rollouts = [[list(rows) for rows in rollout] for rollout in memory]
        self._bytes = memory[0].nbytes
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        copy, seen, step = np.copyto, self._seen, self._step
        roots, nexts = self._rollouts[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        for root, successor in zip(roots, nexts, strict=True):
            copy(root, seen)
            if step is not None:
                seen = step(0)[0]
            copy(successor, seen)
        return self._bytes

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        """Nothing is to be closed."""


class Processes:
    """One `Copies` in each of two processes; a message per rollout says that it is done.

    Each is asked for its next rollout before the answer to the last one is taken, so that neither
    waits for us.
    """

    def __init__(self, size: int, steps: int, stepping: bool = False) -> None:
        """Start them; the arguments are those of `Copies`."""
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for _ in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_copy, args=(theirs, size, steps, stepping), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
            for _ in range(2):
                ours.send_bytes(b"go")
        self._bytes = 2 * steps * size

    def collect_batch(self) -> int:
        """Return the number of bytes of whoever is ready first."""
        pipe: Any = wait(self._pipes)[0]
        pipe.recv_bytes()
        pipe.send_bytes(b"go")
        # Another first the next time.
        self._pipes.append(self._pipes.pop(self._pipes.index(pipe)))
        return self._bytes

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _copy(pipe: Connection, size: int, steps: int, stepping: bool) -> None:
    copies = Copies(size, steps, stepping)
    try:
        while True:
            pipe.recv_bytes()
            copies.collect_batch()
            pipe.send_bytes(b"done")
    except (EOFError, OSError):
        return


class PingPong:
    """A message to another process and its answer: the least that a batch of one frame needs."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def collect_batch(self) -> int:
        """Return 1 for one answer."""
        self._pipe.send_bytes(b"go")
        self._pipe.recv_bytes()
        return 1

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        self._process.terminate()
        self._process.join()
        self._pipe.close()


def _answer(pipe: Connection) -> None:
    try:
        while True:
            pipe.send_bytes(pipe.recv_bytes())
    except (EOFError, OSError):
        return
