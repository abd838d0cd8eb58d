"""Bare torch.distributed: what its users would write for the same bytes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.harness import Fields
from benchmarks.multi.envs import still


class Group:
    """A gloo group of this process and two others, which run ``work(group rank, size)``."""

    def __init__(self, work: Any, size: int) -> None:
        """Start them and wait for them."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        context = multiprocessing.get_context("fork")
        self._processes: list[Any] = [
            context.Process(target=_member, args=(rank, port, work, size), daemon=True)
            for rank in (1, 2)
        ]
        for process in self._processes:
            process.start()
        _join(0, port)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()
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


def _member(rank: int, port: int, work: Any, size: int) -> None:
    torch.set_num_threads(1)
    _join(rank, port)
    work(rank, size)


class Sends:
    """Two processes send the same bytes again and again; this one receives them in turn."""

    def __init__(self, size: int) -> None:
        """Receive tensors of ``size`` bytes."""
        self._group = Group(_send, size)
        self._buffer = torch.zeros(size, dtype=torch.uint8)
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        self._turn = 1 - self._turn
        dist.recv(self._buffer, 1 + self._turn)
        return self._buffer.numel()

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        self._group.close()


def _send(rank: int, size: int) -> None:
    buffer = torch.ones(size, dtype=torch.uint8)
    while True:
        dist.send(buffer, 0)


class Collected:
    """Like `Sends`, but each process collects what it sends: the least that nodes have to do."""

    def __init__(self, size: int, steps: int) -> None:
        """Receive rollouts of ``steps`` steps with observations of ``size`` bytes."""
        self._group = Group(functools.partial(_collect, steps=steps), size)
        self._buffers = [torch.zeros(steps, size, dtype=torch.uint8) for _ in range(2)]
        self._turn = 0

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        self._turn = 1 - self._turn
        for buffer in self._buffers:
            dist.recv(buffer, 1 + self._turn)
        return sum(buffer.numel() for buffer in self._buffers)

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        self._group.close()


def _collect(rank: int, size: int, steps: int) -> None:
    from gleanrl.collectors import Collector

    env = still(rank, size)[rank - 1]
    for batch in Collector(env, None, frames_per_batch=steps, total_frames=-1):
        dist.send(batch["observation"], 0)
        dist.send(batch["next", "observation"], 0)


class Broadcasts:
    """This process broadcasts ``size`` bytes; the others say when they have them."""

    def __init__(self, size: int, copied: bool = False) -> None:
        """Broadcast ``size`` bytes.

        Args:
            size: Of the weights.
            copied: From a copy, so that training can go on meanwhile, and into other memory, so
                that nobody acts with weights that are half there.
        """
        self._group = Group(functools.partial(_hear, copied=copied), size)
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
