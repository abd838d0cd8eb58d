"""Workers that are Ray actors, on this machine or on any other of a cluster."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, ConfigError, WorkerDied
from gleanrl.core.messages import WeightsRef, WindowRef
from gleanrl.core.options import users_stacklevel
from gleanrl.core.protocols import SourceFactory
from gleanrl.core.window import Array, Window
from gleanrl.memory.arena import packed
from gleanrl.transport.frames import CommandWriter, reply_in
from gleanrl.transport.landing import in_one_piece
from gleanrl.transport.peer import RemoteBackend, RemoteFlag
from gleanrl.transport.pickling import pickled
from gleanrl.transport.ray_actor import COLLECTED, GROUPS, Answer, InOrder, RayWorker
from gleanrl.transport.waiting import interruptible
from gleanrl.transport.weights import FlatBuffer, plan_flat
from gleanrl.transport.worker import Boot, OpenWindow
from gleanrl.weights.shared import check_fit

_OURS = ("concurrency_groups", "lifetime", "max_concurrency", "max_restarts", "max_task_retries")
"""Options of an actor that a worker depends on."""


def require_ray() -> Any:
    """Return the ``ray`` module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as err:
        raise ImportError(
            f"collecting with Ray needs the package ray, which cannot be imported here ({err}); "
            "pip install 'gleanrl[ray]'"
        ) from err


class Session:
    """Who uses the Ray that was started for collectors, so that the last one ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[int] = set()
        self._node: str | None = None
        """What tells the Ray that was started here from one that somebody starts later."""

    def enter(self, user: object, config: Mapping[str, Any] | None) -> None:
        """Connect to Ray unless this process is connected; ``config`` are arguments for that."""
        ray = require_ray()
        with self._lock:
            if not ray.is_initialized():
                self._users.clear()
                ray.init(**(config or {}))
                self._node = ray.get_runtime_context().get_node_id()
            elif config:
                warnings.warn(
                    f"ray_init_config ({dict(config)}) has no effect: this process is connected "
                    "to Ray already",
                    UserWarning,
                    stacklevel=users_stacklevel(),
                )
            if self._node is not None:
                self._users.add(id(user))

    def leave(self, user: object, end: bool) -> None:
        """Disconnect if ``user`` was the last; ``end=False`` leaves that to somebody else."""
        with self._lock:
            if id(user) not in self._users:
                return
            self._users.discard(id(user))
            if not end:
                self._node = None  # it is the user's from here on
                self._users.clear()
            elif not self._users:
                node, self._node = self._node, None
                ray = require_ray()
                if ray.is_initialized() and ray.get_runtime_context().get_node_id() == node:
                    ray.shutdown()


session = Session()
"""That of this process."""


def store_capacity() -> int:
    """Return how many bytes Ray's object store on this machine holds; 0 if that is not known."""
    ray = require_ray()
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["NodeID"] == here]
    return int(sum(node["Resources"].get("object_store_memory", 0) for node in nodes))


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an actor, one CPU by default.

    Raises:
        ConfigError: no mapping, or options that are not the user's to choose.
    """
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
    """Tell why actors with ``options`` will not come up soon, if that can be told."""
    there = require_ray().cluster_resources()
    for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        asked = sum(float(own.get(option) or 0) for own in options)
        if asked > there.get(resource, 0.0):
            warnings.warn(
                f"{len(options)} actors ask for {asked:g} {resource}, the Ray cluster has "
                f"{there.get(resource, 0.0):g}: those that do not fit wait for more; lower "
                f"{option} in remote_configs (0 is allowed)",
                UserWarning,
                stacklevel=users_stacklevel(),
            )


_LENT_FROM = 1 << 18
"""Bytes of a rollout from which on copying costs more than making its tensors when it is there."""
_SHARE = 4
"""One part in so many of Ray's store may be in the hands of the user."""


class StoreView:
    """A block in Ray's store, as memory that may be written.

    Ray marks what it returns read-only because others might have it, too. A rollout is nobody
    else's: only the reply refers to it, and that is forgotten when it was taken in.
    """

    def __init__(self, block: Array) -> None:
        self._block = block
        self.nbytes = block.nbytes
        """Of the store."""
        _VIEWS.add(self)
        plain = block.__array_interface__
        self.start: int = plain["data"][0]
        """Its address."""
        self.__array_interface__ = {**plain, "data": (self.start, False)}

    def keep(self) -> None:
        """Keep the block until this process ends, whatever becomes of this."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._block))


_VIEWS: weakref.WeakSet[StoreView] = weakref.WeakSet()
"""All of this process: they share one store."""


def _after_fork() -> None:
    # A child that let go of a block would tell the store so through its parent's connection, and
    # the store would give away what the parent still holds. Even the child's end must not do it.
    for loan in _VIEWS:
        loan.keep()


os.register_at_fork(after_in_child=_after_fork)


class ZeroCopyPolicy:
    """Says which rollouts are handed out where they lie in Ray's store."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        """Lend a part of the ``capacity`` bytes, a function that is called when it matters.

        What other collectors of this process have lent counts, too.
        """
        self._capacity = capacity
        self._limit = 0
        self._writable: list[range] = []
        self._whole: dict[tuple[int, int, int], bool] = {}

    def lend(self, reference: WindowRef, block: Array) -> Array | None:
        """Return ``block``, writable; ``None`` if it has to be copied into its window."""
        if block.nbytes < _LENT_FROM or not self._is_whole(reference):
            return None
        if not self._limit:
            self._limit = self._capacity() // _SHARE
        if sum(loan.nbytes for loan in list(_VIEWS)) + block.nbytes > self._limit:
            return None
        loan = StoreView(block)
        if loan.start % 64 or not self._may_be_written(loan):
            return None
        return np.asarray(loan)

    def _is_whole(self, reference: WindowRef) -> bool:
        """Tell whether a window lies in a slab of its own; worked out once."""
        key = (reference.arena, reference.slot, reference.worker)
        whole = self._whole.get(key)
        if whole is None:
            whole = self._whole[key] = in_one_piece(reference, packed(reference)[0])
        return whole

    def _may_be_written(self, loan: StoreView) -> bool:
        """Ask the kernel: a Ray that maps its store read-only would end who writes into it."""
        first, last = loan.start, loan.start + loan.nbytes - 1
        for known in self._writable:
            if first in known and last in known:
                return True
        self._writable = writable_memory()
        return any(first in known and last in known for known in self._writable)


def writable_memory() -> list[range]:
    """Return the addresses that this process may write."""
    found = []
    try:
        lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:  # where there is no such file everything is copied
        return []
    for line in lines:
        place, mode, _ = line.split(maxsplit=2)
        if mode.startswith("rw"):
            first, end = place.split("-")
            found.append(range(int(first, 16), int(end, 16)))
    return found


class RayLanding:
    """Where in the learner's memory the bytes of one window's rollouts belong."""

    def __init__(self, window: Window, reference: WindowRef) -> None:
        plan, _ = packed(reference)
        self._parts: list[tuple[Array, slice]] = []
        for block in plan.blocks:
            target = window.tensor(block.field.key)
            if target.numel():
                rows = target.flatten(1).view(torch.uint8).numpy()
                self._parts.append((rows, slice(block.offset, block.offset + rows.size)))

    def fill(self, block: Array) -> None:
        """Copy a rollout, which came as uint8 ``[nbytes]``."""
        for rows, part in self._parts:
            np.copyto(rows, block[part].reshape(rows.shape))


class RayWeightPublisher:
    """The weights of one model, published to all actors."""

    def __init__(
        self, ref: WeightsRef, put: Callable[[Array], Any], tell: Callable[[Any], None]
    ) -> None:
        self.ref = ref
        self._put = put
        self._tell = tell
        self._buffer = FlatBuffer(ref)
        self._newest: Any = None

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, into one object and tell all actors of it.

        Raises:
            WeightsError: a shape that is not the plan's; nothing is published.
        """
        check_fit(self.ref, tensors)
        self._buffer.fill(tensors, version, serial)
        self._newest = self._put(self._buffer.bytes.numpy())
        self._tell(self._newest)


class _Actor:
    """One worker, seen from here."""

    def __init__(self, index: int, handle: Any) -> None:
        self.index, self.handle = index, handle
        self.writer = CommandWriter()
        self.turns = 0
        """Calls made whose order matters."""
        self.heeded = 0
        """How many of those the actor has taken in, as far as is known."""
        self.usual = False
        """Whether it was told what most rollouts are like: those that are not random."""
        self.collects: dict[int, int] = {}
        """By number: tickets of the rollouts under way."""
        self.asked = 0
        """Rollouts asked for."""
        self.next_collect = 0
        """The number of the rollout that is done next."""
        self.beginnings: dict[int, Any] = {}
        """By ticket: what is resolved when the worker turns to that command."""
        self.windows: dict[int, m.WindowRef] = {}
        """By ticket: where rollouts under way are to lie."""
        self.replies: InOrder[tuple[_Actor, Answer]]
        """Replies, which may come before others that were made earlier."""
        self.death = ""
        """Why it died."""

    @property
    def gone(self) -> bool:
        return bool(self.death)


@dataclass(frozen=True, slots=True)
class _Expected:
    """What an object that does not exist yet will be."""

    actor: _Actor
    kind: str
    """``"reply"``, ``"begun"`` or ``"end"``."""
    ticket: int = 0
    """Of a beginning."""


class RayBackend(RemoteBackend[_Actor]):
    """One actor per worker. Rollouts are single objects, handed out where they are or copied once.

    Commands and replies are frames, as between processes. Replies are the objects that actor calls
    return: waiting for them is `ray.wait`, and an actor that dies fails the ones that are missing.
    """

    def __init__(
        self,
        open_window: OpenWindow,
        *,
        init: Mapping[str, Any] | None = None,
        options: Sequence[Mapping[str, Any]] = (),
        threads: int = 1,
    ) -> None:
        """Connect to Ray, or start it here if this process is not connected to any.

        Args:
            open_window: Maps windows.
            init: Arguments of `ray.init`, for when it has to be called.
            options: Per worker, options of its actor (``num_cpus``, ``num_gpus``, …).
            threads: torch threads of each worker.

        Raises:
            ImportError: Ray is not installed.
        """
        super().__init__()
        self._open_window = open_window
        self._options = options
        self._threads = threads
        self._lock = threading.RLock()
        self._expected: dict[Any, _Expected] = {}
        self._landings: dict[tuple[int, int, int], RayLanding] = {}
        self._lender = ZeroCopyPolicy(store_capacity)
        self.stop_byte = RemoteFlag(self._send_stop)
        """The byte that running rollouts look at; actors are told when it changes."""
        self.ends_ray = True
        """Whether `stop` ends Ray if it was started for collectors and no other uses it."""
        self._ray = require_ray()
        session.enter(self, init)

    # -- commands --------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        blobs = [pickled(worker, factory) for worker, factory in enumerate(factories)]
        check_room(self._options)
        for name, group in GROUPS.items():
            self._ray.method(concurrency_group=group)(getattr(RayWorker, name))
        groups = dict.fromkeys(GROUPS.values(), 1)
        actor_class = self._ray.remote(concurrency_groups=groups)(RayWorker)
        for worker, blob in enumerate(blobs):
            boot = Boot(worker, blob, self._threads)
            chosen = dict(self._options[worker]) if self._options else {}
            actor = _Actor(worker, actor_class.options(**chosen).remote(boot))
            # Not bound to the actor: the garbage collection of a forked child would free a handle
            # in a cycle through its parent's connections, after which Ray answers neither.
            actor.replies = InOrder(self._deliver)
            self._peers.append(actor)
            self._expected[actor.handle.ended.remote()] = _Expected(actor, "end")
            self._expected[actor.handle.serve.remote()] = _Expected(actor, "reply")

    @property
    def handles(self) -> list[Any]:
        """The actors, in worker order; empty after `stop`."""
        return [actor.handle for actor in self._peers]

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        self._check()
        super().send(worker, ticket, command)

    def _post(self, actor: _Actor, ticket: int, command: m.Command) -> None:
        if actor.gone:
            raise self._died(actor, "")
        if isinstance(command, m.Collect):
            reply = self._ask(actor, ticket, command)
        else:
            self._call(actor, actor.handle.post, actor.writer.write(ticket, command))
            beginning = actor.handle.begun.remote(ticket)
            actor.beginnings[ticket] = beginning
            self._expected[beginning] = _Expected(actor, "begun", ticket)
            reply = actor.handle.step.remote(0, None)
        self._expected[reply] = _Expected(actor, "reply")

    def _ask(self, actor: _Actor, ticket: int, command: m.Collect) -> Any:
        actor.windows[ticket] = command.window
        actor.collects[actor.asked] = ticket
        actor.asked += 1
        # What has no arguments has no turn: it may only follow what is known to have arrived.
        if actor.usual and actor.heeded == actor.turns and not command.random:
            return actor.handle.again.remote()
        actor.usual |= not command.random
        return self._call(actor, actor.handle.step, actor.writer.write(ticket, command))

    def _call(self, actor: _Actor, method: Any, *args: Any) -> Any:
        """Call a method that is to be taken in in the order of these calls."""
        with self._lock:  # the stop byte is changed from any thread
            reply = method.remote(actor.turns, *args)
            actor.turns += 1
        return reply

    def _send_stop(self, value: int) -> None:
        self._tell_all(lambda handle: handle.stop, value)

    def _tell_all(self, method: Callable[[Any], Any], *args: Any) -> None:
        if self._owner != os.getpid() or not self._ray.is_initialized():
            return
        for actor in list(self._peers):
            if not actor.gone:
                self._call(actor, method(actor.handle), *args)

    def weight_publisher(self, weights: Mapping[str, torch.Tensor]) -> RayWeightPublisher:
        return RayWeightPublisher(plan_flat(weights), self._ray.put, self._publish)

    def _publish(self, reference: Any) -> None:
        self._check()
        # In a list, so that Ray does not fetch it for an actor that will get a newer one.
        self._tell_all(lambda handle: handle.publish, [reference])

    def _check(self) -> None:
        if not self._peers:
            raise ClosedError("the collector was shut down")
        if not self._ray.is_initialized():
            raise ClosedError("Ray was shut down, and this collector's actors with it")

    # -- replies ---------------------------------------------------------------------------------

    def receive(self, timeout: float | None) -> m.Reply:
        if not self._arrived:
            self._await(timeout)
        reply: m.Reply | WorkerDied = self._arrived.popleft()
        if isinstance(reply, WorkerDied):
            raise reply
        return reply

    def _poll(self, timeout: float | None) -> None:
        self._check()
        for reference in self._ready(timeout):
            self._take(reference)

    def wait(self, timeout: float) -> None:
        with contextlib.suppress(Exception):  # stopped meanwhile
            if not self._arrived and self._ray.is_initialized():
                self._ready(timeout)

    def _ready(self, timeout: float | None) -> list[Any]:
        references = list(self._expected)
        if not references:
            return []
        try:
            ready = interruptible(self._ray.wait, references, num_returns=1, timeout=timeout)
        except OSError as err:
            why = f"Ray on this machine has ended or cannot be reached ({err})"
            raise WorkerDied(f"all workers (Ray actors) are lost: {why}") from err
        found: list[Any] = ready[0]
        return found

    def _take(self, reference: Any) -> None:
        expected = self._expected.get(reference)
        if expected is None:  # of an actor whose death was found meanwhile
            return
        try:
            value = interruptible(self._ray.get, reference)
        except (self._ray.exceptions.RayError, OSError) as err:  # the latter if the store is gone
            self._mourn(expected.actor, _reason(err))
            return
        # Nothing is forgotten before it was taken in: an interrupt must not lose a reply. One that
        # is taken in twice is ignored by who waits for it.
        if expected.kind == "end":
            self._mourn(expected.actor, value)
        elif expected.kind == "begun":
            self._arrived.append(m.Begun(expected.actor.index, expected.ticket))
            self._forget_beginning(expected.actor, expected.ticket)
        else:
            self._take_reply(expected.actor, value)
            self._expected.pop(reference, None)

    def _take_reply(self, actor: _Actor, answer: Answer | None) -> None:
        """Deliver a reply, in the order in which its worker made them."""
        if answer is None:  # its command had not arrived yet: here is another chance to do it
            again = actor.handle.step.remote(0, None)
            self._expected[again] = _Expected(actor, "reply")
            return
        place, heeded, _, _ = answer
        actor.heeded = max(actor.heeded, heeded)
        actor.replies.take(place, (actor, answer))

    def _deliver(self, item: tuple[_Actor, Answer]) -> None:
        actor, (_, _, frame, block) = item
        reply = reply_in(frame)
        if reply.ticket == COLLECTED:
            assert isinstance(reply, m.Rolled | m.Failed)
            number = min(each for each in actor.collects if each >= actor.next_collect)
            reply = replace(reply, ticket=actor.collects[number])
            if isinstance(reply, m.Rolled) and block is not None:
                reply = self._landed(actor.windows[reply.ticket], reply, block)
            actor.next_collect = number + 1
        self._arrived.append(reply)
        if actor.windows.pop(reply.ticket, None) is not None:
            actor.collects = {n: t for n, t in actor.collects.items() if t != reply.ticket}
        self._forget_beginning(actor, reply.ticket)

    def _landed(self, reference: m.WindowRef, reply: m.Rolled, block: Array) -> m.Rolled:
        lent = self._lender.lend(reference, block)
        if lent is not None:
            return replace(reply, report=replace(reply.report, block=lent))
        self._land(reference, block)
        return reply

    def _land(self, reference: m.WindowRef, block: Array) -> None:
        key = (reference.arena, reference.slot, reference.worker)
        landing = self._landings.get(key)
        if landing is None:
            landing = RayLanding(self._open_window(reference), reference)
            self._landings[key] = landing
        landing.fill(block)

    def _forget_beginning(self, actor: _Actor, ticket: int) -> None:
        self._expected.pop(actor.beginnings.pop(ticket, None), None)

    def _mourn(self, actor: _Actor, why: str) -> None:
        """Note that ``actor`` died, after everything that it had answered before."""
        if actor.gone:
            return
        actor.death = f"(a Ray actor) died: {why}"
        own = [ref for ref, expected in self._expected.items() if expected.actor is actor]
        with contextlib.suppress(self._ray.exceptions.RayError, OSError):
            for reference in self._ray.wait(own, num_returns=len(own), timeout=0)[0]:
                if self._expected[reference].kind == "reply":
                    self._take_reply(actor, self._ray.get(reference))
        for reference in own:
            self._expected.pop(reference, None)
        actor.replies.skip_missing()
        self._arrived.append(self._died(actor, why))

    def _exit_reason(self, peer: _Actor, reason: str) -> str:
        return peer.death

    def _drop(self, peer: _Actor) -> None:
        peer.beginnings.clear()
        peer.windows.clear()

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        if self._owner != os.getpid():  # in a forked child they are somebody else's
            self._peers = []
            return
        with self._lock:
            actors, self._peers = self._peers, []
        self._arrived.clear()
        with contextlib.suppress(Exception):  # whatever Ray raises when it is ending itself
            if self._ray.is_initialized():
                self._kill(actors, timeout)
        self._expected.clear()
        with contextlib.suppress(Exception):
            session.leave(self, self.ends_ray)

    def _kill(self, actors: Sequence[_Actor], timeout: float) -> None:
        ends = [r for r, expected in self._expected.items() if expected.kind == "end"]
        for actor in actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=timeout)


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())
