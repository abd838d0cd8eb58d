"""Bare transport: copies, messages, torch.distributed. What no system can beat.

Everything here delivers as many bytes as a collector does, and nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.envs import stamped
from benchmarks.harness import System

# -- processes of our own --------------------------------------------------------------------------


class Forked(System):
    """Processes that do something again and again, and only say that it is done.

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
        _end(self._processes)
        for pipe in self._pipes:
            pipe.close()


def _answer(pipe: Connection, build: Callable[[], Callable[[], Any]]) -> None:
    act = build()
    with suppress(EOFError, OSError):
        while True:
            pipe.recv_bytes()
            act()
            pipe.send_bytes(b"done")


def _end(processes: Iterable[Any]) -> None:
    """Kill processes of `multiprocessing` and wait for them."""
    for process in processes:
        process.kill()
        process.join()


def ping_pong() -> Forked:
    """A message to another process and its answer: the least that a batch of one frame needs."""
    return Forked([lambda: lambda: None], 1, ahead=0)


# -- copies ----------------------------------------------------------------------------------------

BUFFERS = 3
"""Rollouts that a copier fills in turn, so that caches help it no more than a collector."""


class Copies(System):
    """Fills the memory of one rollout after the other with ``numpy.copyto``, row by row."""

    def __init__(self, size: int, steps: int) -> None:
        """Copy ``steps`` arrays of ``size`` bytes."""
        self._seen = np.ones(size, np.uint8)
        memory = np.ones((BUFFERS, 2, steps, size), np.uint8)
        self._rollouts = [[list(rows) for rows in rollout] for rollout in memory]
        self._bytes = memory[0].nbytes
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        copy, seen = np.copyto, self._seen
        roots, nexts = self._rollouts[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        for root, successor in zip(roots, nexts, strict=True):
            copy(root, seen)
            copy(successor, seen)
        return self._bytes


# -- torch.distributed -----------------------------------------------------------------------------


class Received(System):
    """Two processes send tensors over a gloo group again and again; this one takes turns."""

    def __init__(self, work: Callable[[int], None], *buffers: torch.Tensor) -> None:
        """Start the processes, which run ``work(rank)``; one turn fills all ``buffers``."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        context = multiprocessing.get_context("fork")
        self._processes: list[Any] = [
            context.Process(target=_member, args=(rank, port, work), daemon=True) for rank in (1, 2)
        ]
        for process in self._processes:
            process.start()
        _join(0, port)
        self._buffers, self._bytes = buffers, sum(buffer.nbytes for buffer in buffers)
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        self._turn = 1 - self._turn
        for buffer in self._buffers:
            dist.recv(buffer, 1 + self._turn)
        return self._bytes

    def close(self) -> None:
        _end(self._processes)
        dist.destroy_process_group()


def _join(rank: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=60),
    )


def _member(rank: int, port: int, work: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    _join(rank, port)
    work(rank)


def sends(size: int) -> Received:
    """Return a system whose processes send the same ``size`` bytes again and again."""

    def work(rank: int) -> None:
        buffer = torch.ones(size, dtype=torch.uint8)
        while True:
            dist.send(buffer, 0)

    return Received(work, torch.zeros(size, dtype=torch.uint8))


def collected(size: int, steps: int) -> Received:
    """Return a system whose processes collect what they send: the least that nodes have to do."""

    def work(rank: int) -> None:
        from gleanrl.collectors import Collector

        env = stamped(rank, size)[rank - 1]
        for batch in Collector(env, None, frames_per_batch=steps, total_frames=-1):
            dist.send(batch["observation"], 0)
            dist.send(batch["next", "observation"], 0)

    return Received(work, *torch.zeros(2, steps, size, dtype=torch.uint8))
