"""Tensors between two processes: a process group of two, agreed on over a connection they have.

torch.distributed is used without its global state, because a learner may have a default group of
its own. The two sides find each other through messages on the connection, so that no further port
is fixed. gloo listens on a port of its own, on the connection's interface only, without
authentication, so between hosts a firewall must keep strangers out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_word
from gleanrl.transport.data_plane import Connect, Connection, Pair, Transfer

_LEARNER, _NODE = 0, 1
"""The two ranks of every group."""
_TAG = 0
"""Of all transfers: rollouts and weights go opposite ways."""
_FOR_EVER = 1e8
"""Seconds a node's rollout may wait for the learner to take it: as long as there is one, which the
connection sees to."""


_NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "gloo": (dist.is_gloo_available, "this PyTorch was built without it; install one that has it"),
    "nccl": (
        lambda: dist.is_nccl_available() and torch.cuda.is_available(),
        "it needs a CUDA build of PyTorch and a GPU on the learner and on every node; use "
        "backend='gloo' where there is none",
    ),
    "mpi": (
        lambda: False,
        "ranks of MPI have to be started together by mpirun, and nodes are started one by one; "
        "use backend='gloo'",
    ),
    "ucc": (dist.is_ucc_available, "this PyTorch was built without UCC; use backend='gloo'"),
}
"""By kind, whether it can be used here, and the error where it cannot."""
KINDS = tuple(_NEEDS)


class ConnectionStore(dist.Store):  # type: ignore[misc, name-defined]  # not in the stubs
    """The store of the two sides of a group while it is made, over their connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._own[key] = bytes(value)
        self._connection.tell(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._own[key] if key in self._own else self._connection.key(key)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        for key in keys:
            self.get(key)


class ProcessGroups:
    """The `DataPlane` of one process group for every node."""

    def __init__(self, kind: str = "gloo", timeout_s: float = 60.0) -> None:
        """Make none yet; the learner is to wait for one transfer ``timeout_s`` seconds."""
        available, problem = _NEEDS[check_word("backend", kind, KINDS)]
        if not available():
            raise ConfigError(f"backend={kind!r}: {problem}")
        self._kind, self._timeout_s = kind, timeout_s

    def connect(self, node: int) -> Connect:
        return partial(ProcessGroupPair, kind=self._kind, rank=_NODE, timeout_s=_FOR_EVER)

    def pair(self, connection: Connection) -> Pair:
        return ProcessGroupPair(connection, self._kind, _LEARNER, self._timeout_s)


class ProcessGroupPair:
    """A process group of learner and node."""

    def __init__(self, connection: Connection, kind: str, rank: int, timeout_s: float) -> None:
        """Connect; the other side does so at the same time."""
        self._peer, self._in_place = 1 - rank, kind == "gloo"
        self._device = torch.device("cuda" if kind == "nccl" else "cpu")
        store, timeout = ConnectionStore(connection), timedelta(seconds=timeout_s)
        self._group = make_group(kind, store, rank, connection.own_address, timeout)

    def send(self, tensor: torch.Tensor) -> Transfer:
        moving = tensor.to(self._device)
        return _GroupTransfer(self._group.send([moving], self._peer, _TAG), moving, moving)

    def receive(self, tensor: torch.Tensor) -> Transfer:
        # gloo's thread writes nothing once the receive is destroyed, which waits for a write that
        # it is in the middle of. Of the others that is not known.
        moving = tensor if self._in_place else torch.empty_like(tensor, device=self._device)
        return _GroupTransfer(self._group.recv([moving], self._peer, _TAG), moving, tensor)


class _GroupTransfer:
    """A `Transfer` of a process group."""

    def __init__(self, work: Any, moving: torch.Tensor, wanted: torch.Tensor) -> None:
        self._work, self._moving, self._wanted = work, moving, wanted

    @property
    def over(self) -> bool:
        """Whether it is known to have ended, which gloo does not tell of receives."""
        return self._work is None or bool(self._work.is_completed())

    def finish(self) -> None:
        # Taken first, because a second wait, after an interrupt, would never end.
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        if self._wanted is not self._moving:
            self._wanted.copy_(self._moving)


def make_group(kind: str, store: Any, rank: int, address: str, timeout: timedelta) -> Any:
    """Return this side of a group of two, over the interface with ``address`` if it is gloo's."""
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
