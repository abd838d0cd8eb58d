"""Workers that are Ray actors: nodes that Ray starts, and whose data lie in Ray's object store.

Commands and replies travel on the connection that every node has. A rollout is what a call of the
actor's `RayNode.take` returns, weights are one object that all actors are told of.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, WorkerDied
from gleanrl.core.options import warn
from gleanrl.core.platforms import imported
from gleanrl.core.window import Array
from gleanrl.transport.data_plane import Connect, Connection, Pair, Transfer
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.ray_actor import GROUPS, ActorPair, RayNode
from gleanrl.transport.ray_address import connection_problem, known_cluster

_OURS = ("concurrency_groups", "lifetime", "max_concurrency", "max_restarts", "max_task_retries")
"""Options of an actor that a worker depends on."""


def require_ray() -> Any:
    """Return the ``ray`` module."""
    return imported("ray", "ray", "collecting with Ray", ImportError)


class Session:
    """The users of the Ray that was started for collectors; the last user ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[int] = set()
        self._node: str | None = None
        """Ray's node id, which a Ray that is started later does not have."""

    def enter(self, user: object, config: Mapping[str, Any] | None) -> None:
        """Connect to Ray unless this process is connected; ``config`` are arguments for that."""
        ray = require_ray()
        with self._lock:
            if not ray.is_initialized():
                _check_answers((config or {}).get("address"))
                self._users.clear()
                ray.init(**(config or {}))
                self._node = ray.get_runtime_context().get_node_id()
            elif config:
                warn(
                    f"ray_init_config ({dict(config)}) has no effect: this process is connected "
                    "to Ray already"
                )
            if self._node is not None:
                self._users.add(id(user))

    def leave(self, user: object, end: bool) -> None:
        """Disconnect if ``user`` was the last one and ``end`` is true."""
        with self._lock:
            if id(user) not in self._users:
                return
            self._users.discard(id(user))
            if not end:
                self._node = None  # Ray is not ended here any more
                self._users.clear()
            elif not self._users:
                node, self._node = self._node, None
                ray = require_ray()
                if ray.is_initialized() and ray.get_runtime_context().get_node_id() == node:
                    ray.shutdown()


session = Session()
"""The session of this process."""


def _check_answers(given: str | None) -> None:
    """Check that the cluster that Ray would join answers: Ray itself tries that for minutes."""
    address, source = known_cluster(given)
    problem = None if address is None else connection_problem(address)
    if problem is not None:
        raise ConfigError(
            f"no Ray cluster answers at {address}, which {source} names ({problem}): start one "
            "with `ray start --head`, or forget this one with `ray stop --force` or by taking the "
            "address away; then Ray starts on this machine"
        )


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an actor, one CPU by default."""
    if not isinstance(options, Mapping):
        raise ConfigError(f"remote_configs ({options!r:.100}) must be a mapping or a list of them")
    found = sorted(set(options) & set(_OURS))
    if found:
        raise ConfigError(
            f"remote_configs sets {found}, which collection depends on; it may set resources, "
            "runtime_env, scheduling_strategy and the like"
        )
    return {"num_cpus": 1, **options}


def check_room(options: Sequence[Mapping[str, Any]]) -> None:
    """Warn if the cluster has too few CPUs or GPUs for actors with ``options``."""
    there = require_ray().cluster_resources()
    for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        needed = sum(float(own.get(option) or 0) for own in options)
        if needed > there.get(resource, 0.0):
            warn(
                f"{len(options)} actors ask for {needed:g} {resource}, the Ray cluster has "
                f"{there.get(resource, 0.0):g}: those that do not fit wait for more; lower "
                f"{option} in remote_configs (0 is allowed)"
            )


class RayActors:
    """A launcher whose nodes are actors, and the `DataPlane` between them and the learner."""

    def __init__(
        self, init: Mapping[str, Any] | None = None, options: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Connect to Ray, or start it by ``init``; ``options`` are those of each actor."""
        self.ray, self._options, self._owner = require_ray(), options, os.getpid()
        self._actors: dict[int, tuple[Any, Any]] = {}
        """By node, its actor and the result of `RayNode.serve` to come."""
        self._newest: tuple[bytes, Any] = b"", None
        self.ends_ray = True
        """Whether `stop` ends a Ray that was started for collectors and has no other user."""
        session.enter(self, init)

    @property
    def handles(self) -> list[Any]:
        """The actors, in the order of their nodes; empty after `stop`."""
        return [self._actors[node][0] for node in sorted(self._actors)]

    def address(self) -> str:
        return str(self.ray.util.get_node_ip_address())

    def launch(self, invitations: Sequence[Invitation]) -> None:
        if not self._actors:
            check_room(self._options)
        for invitation in invitations:
            if not self.ray.is_initialized():  # creating an actor would start another Ray
                raise WorkerDied("Ray was shut down")
            lost, _ = self._actors.get(invitation.node, (None, None))
            if lost is not None:
                self.ray.kill(lost)
            chosen = self._options[invitation.node] if self._options else {}
            actor = self._actor_class.options(**chosen).remote()
            self._actors[invitation.node] = actor, actor.serve.remote(invitation)

    @cached_property
    def _actor_class(self) -> Any:
        """The class of all actors, made once: a driver of Ray keeps each class that it got."""
        for name, group in GROUPS.items():
            self.ray.method(concurrency_group=group)(getattr(RayNode, name))
        return self.ray.remote(concurrency_groups=dict.fromkeys(GROUPS.values(), 1))(RayNode)

    def exit_reason(self, node: int, timeout: float) -> str | None:
        if node not in self._actors or not self.ray.is_initialized():
            return "(a Ray actor) ended: Ray was shut down"
        end = self._actors[node][1]
        try:
            if not self.ray.wait([end], timeout=timeout)[0]:
                return None
            why = self.ray.get(end)
        except (self.ray.exceptions.RayError, OSError) as err:  # the latter if the store is gone
            why = " ".join(str(err).split())
        return f"(a Ray actor) died: {why}"

    def stop(self, timeout: float) -> None:
        if self._owner != os.getpid():  # in a forked child the actors belong to another process
            return
        actors, self._actors, self._newest = self._actors, {}, (b"", None)
        with contextlib.suppress(Exception):  # of a Ray that is ending
            if actors and self.ray.is_initialized():
                for handle, _ in actors.values():
                    self.ray.kill(handle)
                ends = [end for _, end in actors.values()]
                self.ray.wait(ends, num_returns=len(ends), timeout=timeout)
        with contextlib.suppress(Exception):
            session.leave(self, self.ends_ray)

    # -- data ------------------------------------------------------------------------------------

    def connect(self, node: int) -> Connect:
        return ActorPair

    def pair(self, connection: Connection) -> Pair:
        return RayPair(self, self._actors[connection.index][0])

    def put(self, weights: torch.Tensor) -> Any:
        """Put ``weights`` into the store, once for all actors: they begin with their number."""
        number = bytes(weights[:16].numpy())
        if number != self._newest[0]:
            self._newest = number, self.ray.put(weights.numpy())
        return self._newest[1]


class RayPair:
    """The learner's side of the way for data between it and one actor."""

    def __init__(self, actors: RayActors, handle: Any) -> None:
        self._actors, self._handle = actors, handle
        self._sent, self._expected = 0, 0
        self._calls: list[Any] = []
        """Results of `RayNode.take` to come, in any order."""
        self._taken: dict[int, Array] = {}
        """Results that have come, by number."""
        self._problem = ""

    def send(self, tensor: torch.Tensor) -> Transfer:
        # In a list, so that Ray does not fetch it before the actor does.
        self._handle.give.remote(self._sent, [self._actors.put(tensor)])
        self._sent += 1
        return _PutTransfer()

    def receive(self, tensor: torch.Tensor) -> Transfer:
        self._calls.append(self._handle.take.remote())
        self._expected += 1
        return _TakeTransfer(self, self._expected - 1, tensor)

    def has_arrived(self, number: int, timeout: float | None = 0.0) -> bool:
        """Tell within ``timeout`` seconds whether `take` would return at once."""
        ray = self._actors.ray
        while not self._problem and number not in self._taken:
            try:
                ready, calls = ray.wait(self._calls, timeout=timeout)
                found = ray.get(ready)
            except (ray.exceptions.RayError, OSError) as err:
                self._problem = " ".join(str(err).split())
                break
            if not ready:
                return False
            self._taken.update(found)
            self._calls = calls  # last: an interrupt must not lose one
        return True

    def take(self, number: int) -> Array:
        """Wait for tensor ``number`` of the actor's, and return it."""
        self.has_arrived(number, None)
        if number not in self._taken:
            raise RuntimeError(self._problem)
        return self._taken.pop(number)


class _PutTransfer:
    """A `Transfer` that is over, because the sent tensor lies in the store."""

    over = True

    def finish(self) -> None:
        """Do nothing."""


class _TakeTransfer:
    """A `Transfer` from an actor."""

    def __init__(self, pair: RayPair, number: int, tensor: torch.Tensor) -> None:
        self._pair, self._number, self._tensor = pair, number, tensor

    @property
    def over(self) -> bool:
        return self._pair.has_arrived(self._number)

    def finish(self) -> None:
        np.copyto(self._tensor.numpy(), self._pair.take(self._number))
