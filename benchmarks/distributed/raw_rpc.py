"""Bare torch.distributed.rpc: the same bytes as the argument of one call after another."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.harness import Fields

_AHEAD = 2
"""Calls that each sender has under way, as our nodes have rollouts."""
_told: Connection | None = None


class Pushes:
    """Two processes send the same bytes again and again to a third, which only counts them.

    All three are apart from this one, which may be in another world.
    """

    def __init__(self, size: int) -> None:
        """Send tensors of ``size`` bytes."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = int(probe.getsockname()[1])
        # Not forked: a child of a member of another world cannot enter one.
        context = multiprocessing.get_context("spawn")
        self._size = size
        self._counted, told = context.Pipe(duplex=False)
        self._processes: list[Any] = [
            context.Process(target=_member, args=(rank, port, size, told), daemon=True)
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

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _member(rank: int, port: int, size: int, told: Connection) -> None:
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
