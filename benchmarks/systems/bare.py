"""Bare transport: copies, messages, torch.distributed. What no system can beat.

Everything here delivers as many bytes as a collector does, and nothing else.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.envs import Still, still
from benchmarks.harness import System
from benchmarks.processes import Forked, end

# -- copies ----------------------------------------------------------------------------------------

BUFFERS = 3
"""Rollouts that a copier fills in turn, so that caches help it no more than a collector."""


class Copies(System):
    """Fills the memory of one rollout after the other with ``numpy.copyto``, row by row."""

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


def copies_in_two(size: int, steps: int, stepping: bool = False) -> Forked:
    """Return `Copies` in each of two processes; a message per rollout says that it is done."""
    build = functools.partial(_copier, size, steps, stepping)
    return Forked([build] * 2, 2 * steps * size)


def _copier(size: int, steps: int, stepping: bool) -> Any:
    return Copies(size, steps, stepping).collect_batch


def ping_pong() -> Forked:
    """A message to another process and its answer: the least that a batch of one frame needs."""
    return Forked([lambda: lambda: None], 1, ahead=0)


# -- torch.distributed -----------------------------------------------------------------------------


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class _World:
    """A gloo group of this process and two others, which run ``work(group rank, size)``."""

    def __init__(self, work: Any, size: int) -> None:
        """Start them and wait for them."""
        port = _free_port()
        context = multiprocessing.get_context("fork")
        self._processes: list[Any] = [
            context.Process(target=_world_member, args=(rank, port, work, size), daemon=True)
            for rank in (1, 2)
        ]
        for process in self._processes:
            process.start()
        _join(0, port)

    def close(self) -> None:
        end(self._processes)
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


def _world_member(rank: int, port: int, work: Any, size: int) -> None:
    torch.set_num_threads(1)
    _join(rank, port)
    work(rank, size)


class Sends(System):
    """Two processes send the same bytes again and again; this one receives them in turn."""

    def __init__(self, size: int) -> None:
        """Receive tensors of ``size`` bytes."""
        self._group = _World(_send, size)
        self._buffer = torch.zeros(size, dtype=torch.uint8)
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        self._turn = 1 - self._turn
        dist.recv(self._buffer, 1 + self._turn)
        return self._buffer.numel()

    def close(self) -> None:
        self._group.close()


def _send(rank: int, size: int) -> None:
    buffer = torch.ones(size, dtype=torch.uint8)
    while True:
        dist.send(buffer, 0)


class Collected(System):
    """Like `Sends`, but each process collects what it sends: the least that nodes have to do."""

    def __init__(self, size: int, steps: int) -> None:
        """Receive rollouts of ``steps`` steps with observations of ``size`` bytes."""
        self._group = _World(functools.partial(_collect, steps=steps), size)
        self._buffers = [torch.zeros(steps, size, dtype=torch.uint8) for _ in range(2)]
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        self._turn = 1 - self._turn
        for buffer in self._buffers:
            dist.recv(buffer, 1 + self._turn)
        return sum(buffer.numel() for buffer in self._buffers)

    def close(self) -> None:
        self._group.close()


def _collect(rank: int, size: int, steps: int) -> None:
    from gleanrl.collectors import Collector

    env = still(rank, size)[rank - 1]
    for batch in Collector(env, None, frames_per_batch=steps, total_frames=-1):
        dist.send(batch["observation"], 0)
        dist.send(batch["next", "observation"], 0)


class Broadcasts(System):
    """This process broadcasts ``size`` bytes; the others say when they have them."""

    def __init__(self, size: int, copied: bool = False) -> None:
        """Broadcast ``size`` bytes.

        Args:
            size: Of the weights.
            copied: From a copy, so that training can go on meanwhile, and into other memory, so
                that nobody acts with weights that are half there.
        """
        self._group = _World(functools.partial(_hear, copied=copied), size)
        self._buffer = torch.ones(size, dtype=torch.uint8)
        self._weights = self._buffer.clone() if copied else None
        self._answer = torch.zeros(1)

    def once(self) -> None:
        """Broadcast, and wait for both answers."""
        if self._weights is not None:
            self._buffer.copy_(self._weights)
        dist.broadcast(self._buffer, 0)
        for rank in (1, 2):
            dist.recv(self._answer, rank)

    def close(self) -> None:
        self._group.close()


def _hear(rank: int, size: int, copied: bool) -> None:
    buffer, answer = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
    weights = buffer.clone() if copied else None
    while True:
        dist.broadcast(buffer, 0)
        if weights is not None:
            weights.copy_(buffer)
        dist.send(answer, 0)
