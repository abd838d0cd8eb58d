"""Workers that are Ray actors, on this machine or on any other of a cluster."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, CollectorTimeout, ConfigError, WorkerDied
from gleanrl.core.protocols import Array, SourceFactory
from gleanrl.engine.backends.pickling import pickled
from gleanrl.engine.backends.process import reply_in
from gleanrl.memory.slab import packed
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.actor import ActorBoot, Answer, RayWorker
from gleanrl.rollout.wire import CommandWriter
from gleanrl.rollout.worker import OpenWindow
from gleanrl.weights.flat import FlatBuffer, check_fit, plan_flat

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


class _Session:
    """Who uses the Ray that was started for collectors, so that the last one ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[int] = set()
        self._node: str | None = None
        """What tells the Ray that was started here from one that somebody starts later."""

    def enter(self, user: object, config: Mapping[str, Any] | None) -> None:
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
                    stacklevel=2,
                )
            if self._node is not None:
                self._users.add(id(user))

    def leave(self, user: object, end: bool) -> None:
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


_session = _Session()


@dataclass(eq=False, slots=True)
class _Actor:
    """One worker, seen from here."""

    worker: int
    handle: Any
    writer: CommandWriter = field(default_factory=CommandWriter)
    turns: int = 0
    """Calls made whose order matters."""
    place: int = 0
    """Replies taken in."""
    early: dict[int, m.Reply] = field(default_factory=dict)
    """Replies that came before others which were made earlier, by place."""
    beginnings: dict[int, Any] = field(default_factory=dict)
    """By ticket: what is resolved when the worker turns to that command."""
    died: WorkerDied | None = None


@dataclass(frozen=True, slots=True)
class _Expected:
    """What an object that does not exist yet will be."""

    actor: _Actor
    kind: str
    """``"reply"``, ``"begun"`` or ``"end"``."""
    ticket: int = 0
    window: m.WindowRef | None = None


class RayBackend:
    """One actor per worker. Rollouts are single objects, copied once into the learner's memory.

    Commands and replies are frames, as between processes. Replies are the objects that actor calls
    return: waiting for them is `ray.wait`, and an actor that dies fails the ones that are missing.
    """

    memory = None
    inline = False

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
        self._open_window = open_window
        self._options = options
        self._threads = threads
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._actors: list[_Actor] = []
        self._expected: dict[Any, _Expected] = {}
        self._replies: deque[m.Reply | WorkerDied] = deque()
        self._landings: dict[tuple[int, int, int], _Landing] = {}
        self._boards = 0
        self.stop_byte = ToldByte(self._tell_stop)
        """The byte that running rollouts look at; actors are told when it changes."""
        self.ends_ray = True
        """Whether `stop` ends Ray if it was started for collectors and no other uses it."""
        self._ray = require_ray()
        _session.enter(self, init)

    # -- commands --------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Create one actor per factory; all of them build their source at the same time.

        Raises:
            ConfigError: something that cannot be sent to another process.
        """
        blobs = [pickled(worker, factory) for worker, factory in enumerate(factories)]
        self._check_room(len(blobs))
        actor_class = self._ray.remote(RayWorker)
        for worker, blob in enumerate(blobs):
            boot = ActorBoot(worker, self._threads, tuple(sys.path), blob)
            chosen = dict(self._options[worker]) if self._options else {}
            actor = _Actor(worker, actor_class.options(**chosen).remote(boot))
            self._actors.append(actor)
            self._expected[actor.handle.ended.remote()] = _Expected(actor, "end")
            self._expected[actor.handle.serve.remote()] = _Expected(actor, "reply")

    def _check_room(self, workers: int) -> None:
        """Tell why actors will not come up soon, if that can be told."""
        there = self._ray.cluster_resources()
        for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
            asked = sum(float(options.get(option) or 0) for options in self._options)
            if asked > there.get(resource, 0.0):
                warnings.warn(
                    f"{workers} actors ask for {asked:g} {resource}, the Ray cluster has "
                    f"{there.get(resource, 0.0):g}: actors that do not fit wait for more; lower "
                    f"{option} in remote_configs (0 is allowed)",
                    UserWarning,
                    stacklevel=2,
                )

    @property
    def handles(self) -> list[Any]:
        """The actors, in worker order; empty after `stop`."""
        return [actor.handle for actor in self._actors]

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Post ``command``; if the actor is gone, `receive` says so, after what it had sent.

        Raises:
            ClosedError: after `stop`, or Ray was shut down.
            WorkerDied: `receive` has said already that the actor died.
        """
        self._check()
        actor = self._actors[worker]
        if actor.died is not None:
            raise actor.died
        window = command.window if isinstance(command, m.Collect) else None
        if window is None:
            beginning = actor.handle.begun.remote(ticket)
            actor.beginnings[ticket] = beginning
            self._expected[beginning] = _Expected(actor, "begun", ticket)
        frame = actor.writer.write(ticket, command)
        reply = self._call(actor, actor.handle.do, frame)
        self._expected[reply] = _Expected(actor, "reply", ticket, window)

    def _call(self, actor: _Actor, method: Any, *args: Any) -> Any:
        """Call a method that is to be taken in in the order of these calls."""
        with self._lock:  # the stop byte is changed from any thread
            reply = method.remote(actor.turns, *args)
            actor.turns += 1
        return reply

    def _tell_stop(self, value: int) -> None:
        self._tell_all(lambda handle: handle.stop, value)

    def _tell_all(self, method: Callable[[Any], Any], *args: Any) -> None:
        if self._owner != os.getpid() or not self._ray.is_initialized():
            return
        for actor in list(self._actors):
            if actor.died is None:
                self._call(actor, method(actor.handle), *args)

    def board(self, weights: Mapping[str, torch.Tensor]) -> RayBoard:
        """Set up a board: one object per publication, whatever the number of actors."""
        self._boards += 1
        return RayBoard(plan_flat(self._boards, weights), self._ray.put, self._publish)

    def _publish(self, number: int, reference: Any) -> None:
        self._check()
        # In a list, so that Ray does not fetch it for an actor that will get a newer one.
        self._tell_all(lambda handle: handle.publish, number, [reference])

    def _check(self) -> None:
        if not self._actors:
            raise ClosedError("the collector was shut down")
        if not self._ray.is_initialized():
            raise ClosedError("Ray was shut down, and this collector's actors with it")

    # -- replies ---------------------------------------------------------------------------------

    def receive(self, timeout: float | None) -> m.Reply:
        """Return the next reply of any worker; replies that came earlier come first.

        Raises:
            CollectorTimeout: none came within ``timeout`` seconds.
            WorkerDied: an actor died.
            ClosedError: after `stop`, or Ray was shut down.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._replies:
            self._check()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._ready(left)
            if not ready and left is not None and left <= 0.0:
                raise CollectorTimeout(f"no worker replied within {timeout} s")
            for reference in ready:
                self._take(reference)
        reply = self._replies.popleft()
        if isinstance(reply, WorkerDied):
            raise reply
        return reply

    def wait(self, timeout: float) -> None:
        """Wait until there may be a reply; safe while another thread uses the backend."""
        with contextlib.suppress(Exception):  # stopped meanwhile
            if not self._replies and self._ray.is_initialized():
                self._ready(timeout)

    def _ready(self, timeout: float | None) -> list[Any]:
        references = list(self._expected)
        if not references:
            return []
        found: list[Any] = self._ray.wait(references, num_returns=1, timeout=timeout)[0]
        return found

    def _take(self, reference: Any) -> None:
        expected = self._expected.get(reference)
        if expected is None:  # of an actor whose death was found meanwhile
            return
        try:
            value = self._ray.get(reference)
        except self._ray.exceptions.RayError as err:
            self._mourn(expected.actor, _reason(err))
            return
        # Nothing is forgotten before it was taken in: an interrupt must not lose a reply. One that
        # is taken in twice is ignored by who waits for it.
        if expected.kind == "end":
            self._mourn(expected.actor, value)
        elif expected.kind == "begun":
            self._replies.append(m.Begun(expected.actor.worker, expected.ticket))
            self._forget_beginning(expected.actor, expected.ticket)
        else:
            self._take_reply(expected, value)
            self._forget_beginning(expected.actor, expected.ticket)
            self._expected.pop(reference, None)

    def _take_reply(self, expected: _Expected, answer: Answer) -> None:
        """Deliver a reply, in the order in which its worker made them."""
        actor, (place, frame, block) = expected.actor, answer
        if block is not None and expected.window is not None:
            self._land(expected.window, block)
        if place >= actor.place:
            actor.early[place] = reply_in(frame)
        while actor.place in actor.early:
            self._replies.append(actor.early[actor.place])
            del actor.early[actor.place]
            actor.place += 1

    def _land(self, reference: m.WindowRef, block: Array) -> None:
        key = (reference.arena, reference.slot, reference.worker)
        landing = self._landings.get(key)
        if landing is None:
            landing = _Landing(self._open_window(reference), reference)
            self._landings[key] = landing
        landing.fill(block)

    def _forget_beginning(self, actor: _Actor, ticket: int) -> None:
        self._expected.pop(actor.beginnings.pop(ticket, None), None)

    def _mourn(self, actor: _Actor, why: str) -> None:
        """Note that ``actor`` died, after everything that it had answered before."""
        if actor.died is not None:
            return
        actor.died = WorkerDied(f"worker {actor.worker} (a Ray actor) died: {why}")
        actor.died.worker = actor.worker
        own = [ref for ref, expected in self._expected.items() if expected.actor is actor]
        with contextlib.suppress(self._ray.exceptions.RayError):
            for reference in self._ray.wait(own, num_returns=len(own), timeout=0)[0]:
                if self._expected[reference].kind == "reply":
                    self._take_reply(self._expected[reference], self._ray.get(reference))
        for reference in own:
            self._expected.pop(reference, None)
        actor.beginnings.clear()
        self._replies.extend(actor.early[place] for place in sorted(actor.early))
        actor.early.clear()
        self._replies.append(actor.died)

    def open(self, payload: m.Payload) -> Any:
        """Return the rollout, which travelled with the reply."""
        return payload.handle

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        """Kill all actors and wait until they are gone. Idempotent.

        Ends Ray, too, if it was started for collectors and this was the last one (`ends_ray`).
        """
        if self._owner != os.getpid():  # in a forked child they are somebody else's
            self._actors = []
            return
        with self._lock:
            actors, self._actors = self._actors, []
        self._replies.clear()
        with contextlib.suppress(Exception):  # whatever Ray raises when it is ending itself
            if self._ray.is_initialized():
                self._kill(actors, timeout)
        self._expected.clear()
        with contextlib.suppress(Exception):
            _session.leave(self, self.ends_ray)

    def _kill(self, actors: Sequence[_Actor], timeout: float) -> None:
        ends = [r for r, expected in self._expected.items() if expected.kind == "end"]
        for actor in actors:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor.handle)
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=timeout)


class _Landing:
    """Where in the learner's memory the bytes of one window's rollouts belong."""

    def __init__(self, window: RolloutWindow, reference: m.WindowRef) -> None:
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


class ToldByte:
    """A byte that tells somebody when it changes."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        """Begin with zero; ``tell`` is called with every new value."""
        self._value = 0
        self._tell = tell
        self._lock = threading.Lock()

    def __getitem__(self, index: int, /) -> int:
        return self._value

    def __setitem__(self, index: int, value: int, /) -> None:
        with self._lock:
            if value != self._value:
                self._value = value
                self._tell(value)


class RayBoard:
    """The weights of one model, published to all actors."""

    def __init__(
        self,
        ref: m.BoardRef,
        put: Callable[[Array], Any],
        tell: Callable[[int, Any], None],
    ) -> None:
        """Publish what ``put`` has stored by means of ``tell``, under the number in ``ref``."""
        self.ref = ref
        self._put = put
        self._tell = tell
        self._buffer = FlatBuffer(ref)
        self._newest: Any = None

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, into one object and tell all actors of it.

        Raises:
            WeightsError: a shape that is not the board's; nothing is published.
        """
        check_fit(self.ref, tensors)
        self._buffer.fill(tensors, version, serial)
        self._newest = self._put(self._buffer.bytes.numpy())
        self._tell(self.ref.offset, self._newest)


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


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())
