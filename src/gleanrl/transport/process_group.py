"""Tensors between two processes: a process group of two, agreed on over a connection they have.

torch.distributed is used without its global state: a learner may have a default group of its own
for other ends. The two sides find each other through messages on the connection, so that no
further port is fixed. gloo listens on a port of its own, on the connection's interface only, and
does not ask who connects there: between hosts, a firewall has to keep strangers out.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from gleanrl.core.errors import ConfigError

KINDS = ("gloo", "nccl", "mpi", "ucc")
LEARNER_RANK, NODE_RANK = 0, 1
"""The two ranks of every group."""


def check_kind(kind: str) -> None:
    """Check that tensors can travel by ``kind`` here.

    Raises:
        ConfigError: an unknown kind, or one that this PyTorch or this machine does not have.
    """
    if kind not in KINDS:
        raise ConfigError(f"backend ({kind!r}) must be one of {', '.join(map(repr, KINDS))}")
    if not dist.is_available():
        raise ConfigError("this PyTorch was built without torch.distributed; install one with it")
    if kind == "gloo" and not dist.is_gloo_available():
        raise ConfigError(
            "backend='gloo': this PyTorch was built without it; install one that has it"
        )
    if kind == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError(
            "backend='nccl' needs a CUDA build of PyTorch and a GPU on the learner and on every "
            "node; use backend='gloo' where there is none"
        )
    if kind == "mpi":
        raise ConfigError(
            "backend='mpi': ranks of MPI have to be started together by mpirun, and nodes are "
            "started one by one; use backend='gloo'"
        )
    if kind == "ucc" and not dist.is_ucc_available():
        raise ConfigError("backend='ucc': this PyTorch was built without UCC; use backend='gloo'")


class ConnectionStore(dist.Store):  # type: ignore[misc, name-defined]  # not in the stubs
    """What the two sides of a group tell each other while it is made, over their connection."""

    def __init__(
        self, tell: Callable[[str, bytes], None], wait_for: Callable[[str], bytes]
    ) -> None:
        super().__init__()
        self._tell, self._wait_for = tell, wait_for
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._own[key] = bytes(value)
        self._tell(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._own[key] if key in self._own else self._wait_for(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        for key in keys:
            self.get(key)


class ProcessGroupPair:
    """A process group of learner and node."""

    def __init__(
        self, kind: str, store: ConnectionStore, rank: int, address: str, timeout_s: float
    ) -> None:
        """Connect; the other side does so at the same time.

        Args:
            kind: ``"gloo"``, ``"nccl"`` or ``"ucc"``.
            store: Shared with the other side.
            rank: `LEARNER_RANK` or `NODE_RANK`.
            address: This side's address on the network between the two.
            timeout_s: Seconds a transfer may take once somebody waits for it.
        """
        self._peer = 1 - rank
        self._device = torch.device("cuda" if kind == "nccl" else "cpu")
        self._group = _make(kind, store, rank, address, timedelta(seconds=timeout_s))

    def send(self, tensor: torch.Tensor, tag: int) -> Transfer:
        """Begin to send ``tensor``, which must not change until the transfer is finished."""
        there = tensor.to(self._device)
        return Transfer(self._group.send([there], self._peer, tag), there, None)

    def receive(self, tensor: torch.Tensor, tag: int) -> Transfer:
        """Begin to receive into ``tensor``, which is whole once the transfer is finished."""
        if self._device.type == "cpu":
            return Transfer(self._group.recv([tensor], self._peer, tag), tensor, None)
        there = torch.empty_like(tensor, device=self._device)
        return Transfer(self._group.recv([there], self._peer, tag), there, tensor)


class Transfer:
    """One tensor on its way."""

    def __init__(self, work: Any, moving: torch.Tensor, wanted: torch.Tensor | None) -> None:
        self._work, self._moving, self._wanted = work, moving, wanted

    @property
    def over(self) -> bool:
        """Whether it is known to have ended; of one received by gloo nobody knows."""
        return self._work is None or bool(self._work.is_completed())

    def finish(self) -> None:
        """Wait for the end of it; once over, do nothing.

        Raises:
            RuntimeError: the other side is gone, or stood still for too long; the pair is of no
                use any more.
        """
        # Taken first: waiting again, after an interrupt, for what has come would never end.
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        if self._wanted is not None:
            self._wanted.copy_(self._moving)


def _make(kind: str, store: ConnectionStore, rank: int, address: str, timeout: timedelta) -> Any:
    # The constructors are what init_process_group calls; the stubs leave some of them out.
    c10d: Any = dist
    if kind == "gloo":
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        return c10d.ProcessGroupGloo(store, rank, 2, options)
    if kind == "nccl":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return c10d.ProcessGroupNCCL(store, rank, 2, options)
    return c10d.distributed_c10d.ProcessGroupUCC(store, rank, 2, timeout)
