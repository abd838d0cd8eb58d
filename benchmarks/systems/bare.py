"""Bare transport: copies, messages, torch.distributed, its RPC, Ray. What no system can beat.

Everything here delivers as many bytes as a collector does, and nothing else.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import socket
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection
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


# -- torch.distributed.rpc -------------------------------------------------------------------------

_AHEAD = 2
"""Calls that each sender has under way, as our nodes have rollouts."""
_told: Connection | None = None


class Pushes(System):
    """Two processes send the same bytes again and again to a third, which only counts them.

    All three are apart from this one, which may be in another world.
    """

    def __init__(self, size: int) -> None:
        """Send tensors of ``size`` bytes."""
        port = _free_port()
        # Not forked: a child of a member of another world cannot enter one.
        context = multiprocessing.get_context("spawn")
        self._size = size
        self._counted, told = context.Pipe(duplex=False)
        self._processes: list[Any] = [
            context.Process(target=_rpc_member, args=(rank, port, size, told), daemon=True)
            for rank in range(3)
        ]
        for process in self._processes:
            process.start()
        told.close()
        self._counted.recv_bytes()

    def collect_batch(self) -> int:
        """Return the number of bytes."""
        self._counted.recv_bytes()
        return self._size

    def close(self) -> None:
        end(self._processes)


def _rpc_member(rank: int, port: int, size: int, told: Connection) -> None:
    global _told
    from torch.distributed import rpc

    _told = told
    torch.set_num_threads(1)
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"member{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank:
        _push(torch.ones(size, dtype=torch.uint8))
    rpc.shutdown()  # of the one who counts: when the others are gone


def _push(data: torch.Tensor) -> None:
    from torch.distributed import rpc

    under_way: deque[Any] = deque()
    while True:
        under_way.append(rpc.rpc_async("member0", _count, args=(data,)))
        if len(under_way) >= _AHEAD:
            under_way.popleft().wait()


def _count(data: torch.Tensor) -> None:
    assert _told is not None
    _told.send_bytes(b"one")


# -- Ray -------------------------------------------------------------------------------------------


RAY_ACTORS = 2


class RayStack(System):
    """Two bare actors whose arrays are copied into one, as who learns from both has to."""

    def __init__(self, size: int) -> None:
        self._one = [RayObjects(size, "sync") for _ in range(RAY_ACTORS)]
        self._whole = np.empty((RAY_ACTORS, size), np.uint8)

    def collect_batch(self) -> int:
        for one in self._one:
            one.ask()
        for row, one in zip(self._whole, self._one, strict=True):
            row[:] = one.take()
        return RAY_ACTORS

    def close(self) -> None:
        for one in self._one:
            one.close()


class RayObjects(System):
    """A bare actor that returns the same array again and again; `ray.get`, and nothing else."""

    def __init__(self, size: int, kind: str, copy: bool = False) -> None:
        import ray

        class Bare:
            def __init__(self, size: int) -> None:
                self._array = np.ones(size, np.uint8)

            def get(self) -> Any:
                return self._array

        actors = 1 if kind == "sync" else RAY_ACTORS
        made: Any = ray.remote(num_cpus=0)(Bare)
        self._ray: Any = ray
        self._actors = [made.remote(size) for _ in range(actors)]
        self._copy = np.empty(size, np.uint8) if copy else None
        self._depth = 1 if kind == "sync" else 2
        self._under_way: dict[Any, Any] = {}
        self._value: Any = None

    def ask(self) -> None:
        """Ask every actor for as many arrays as are to be under way."""
        for actor in self._actors * self._depth:
            self._under_way[actor.get.remote()] = actor

    def take(self) -> Any:
        """Wait for an array, of whichever actor."""
        self.collect_batch()
        return self._value

    def collect_batch(self) -> int:
        if not self._under_way:
            self.ask()
        ready, _ = self._ray.wait(list(self._under_way), num_returns=1)
        self._value = self._ray.get(ready[0])
        if self._copy is not None:
            self._copy[:] = self._value
        actor = self._under_way.pop(ready[0])
        if self._depth > 1:
            self._under_way[actor.get.remote()] = actor
        return 1

    def close(self) -> None:
        self._value = None
        for actor in self._actors:
            self._ray.kill(actor)
