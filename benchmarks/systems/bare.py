"""Bare transport: copies, messages, torch.distributed. No system can be faster.

Every system here delivers as many bytes as a collector does, and nothing else.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import distributed as dist

from benchmarks.envs import still_bytes
from benchmarks.harness import System

BUFFERS = 3
"""Rollouts that a copier fills in turn, so that caches help it no more than a collector."""


def forked(
    collect: Callable[[], int], target: Callable[..., None], *arguments: Sequence[Any]
) -> System:
    """Return a system with a process that runs ``target`` for each of ``arguments``."""
    context: Any = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()

    def end() -> None:
        for process in processes:
            process.kill()
            process.join()

    return System(collect, end=end)


def answers(builds: Sequence[Callable[[], Callable[[], Any]]], size: int) -> System:
    """Return processes that repeat a call and report each end.

    Each gets two requests before the first answer is taken, so none waits for this process.

    Args:
        builds: Called in a process each; the results are called once per request.
        size: Size of the batch that one answer stands for.
    """
    pipes, theirs = zip(*(multiprocessing.Pipe() for _ in builds), strict=True)
    waiting: list[Any] = list(pipes)
    for pipe in waiting * 2:
        pipe.send_bytes(b"go")

    def collect() -> int:
        pipe = wait(waiting)[0]
        pipe.recv_bytes()
        pipe.send_bytes(b"go")
        # Another first the next time.
        waiting.append(waiting.pop(waiting.index(pipe)))
        return size

    return forked(collect, _answer, *zip(theirs, builds, strict=True))


def ping_pong() -> System:
    """Return a message to a process and its answer: the least that a batch of one frame needs."""
    ours, theirs = multiprocessing.Pipe()

    def collect() -> int:
        ours.send_bytes(b"go")
        ours.recv_bytes()
        return 1

    return forked(collect, _answer, (theirs, lambda: lambda: None))


def _answer(pipe: Connection, build: Callable[[], Callable[[], Any]]) -> None:
    act = build()
    with suppress(EOFError, OSError):
        while True:
            pipe.recv_bytes()
            act()
            pipe.send_bytes(b"done")


def copies(size: int, steps: int) -> System:
    """Return a system that fills the memory of one rollout after the other by ``numpy.copyto``.

    It copies ``steps`` arrays of ``size`` bytes row by row, and counts bytes.
    """
    copy, seen = np.copyto, np.ones(size, np.uint8)
    memory = np.ones((BUFFERS, 2, steps, size), np.uint8)
    rollouts = itertools.cycle([[list(rows) for rows in rollout] for rollout in memory])

    def collect() -> int:
        for root, successor in zip(*next(rollouts), strict=True):
            copy(root, seen)
            copy(successor, seen)
        return memory[0].nbytes

    return System(collect)


def received(work: Callable[[int], None], *buffers: torch.Tensor) -> System:
    """Return two processes that send tensors over a gloo group; this one takes turns.

    They run ``work(rank)``; one turn fills all ``buffers``, whose bytes count.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    ranks, size = itertools.cycle((1, 2)), sum(buffer.nbytes for buffer in buffers)

    def collect() -> int:
        rank = next(ranks)
        for buffer in buffers:
            dist.recv(buffer, rank)
        return size

    made = forked(collect, _member, (1, port, work), (2, port, work))
    _join(0, port)
    return made


def _join(rank: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", where, timeout, world_size=3, rank=rank)


def _member(rank: int, port: int, work: Callable[[int], None]) -> None:
    torch.set_num_threads(1)
    _join(rank, port)
    work(rank)


def sends(size: int) -> System:
    """Return a system whose processes send the same ``size`` bytes again and again."""

    def work(_: int) -> None:
        buffer = torch.ones(size, dtype=torch.uint8)
        while True:
            dist.send(buffer, 0)

    return received(work, torch.zeros(size, dtype=torch.uint8))


def collected(size: int, steps: int) -> System:
    """Return a system whose processes collect the data that they send, as nodes must."""

    def work(rank: int) -> None:
        from gleanrl.collectors import Collector

        for batch in Collector(still_bytes(size), None, frames_per_batch=steps, total_frames=-1):
            dist.send(batch["observation"], 0)
            dist.send(batch["next", "observation"], 0)

    return received(work, *torch.zeros(2, steps, size, dtype=torch.uint8))
