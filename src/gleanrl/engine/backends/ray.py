"""Workers that are Ray actors, on this machine or on any other of a cluster."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, CollectorTimeout, WorkerDied
from gleanrl.core.protocols import Array, SourceFactory
from gleanrl.engine.backends.pickling import pickled
from gleanrl.engine.backends.process import reply_in
from gleanrl.engine.backends.ray_data import Landing, Lender, RayBoard
from gleanrl.engine.backends.ray_session import (
    check_room,
    require_ray,
    session,
    store_capacity,
)
from gleanrl.engine.backends.told import ToldByte
from gleanrl.engine.interrupts import interruptible
from gleanrl.rollout.actor import COLLECTED, GROUPS, ActorBoot, Answer, RayWorker
from gleanrl.rollout.wire import CommandWriter
from gleanrl.rollout.worker import OpenWindow
from gleanrl.weights.flat import plan_flat


@dataclass(eq=False, slots=True)
class _Actor:
    """One worker, seen from here."""

    worker: int
    handle: Any
    writer: CommandWriter = field(default_factory=CommandWriter)
    turns: int = 0
    """Calls made whose order matters."""
    heeded: int = 0
    """How many of those the actor has taken in, as far as is known."""
    usual: bool = False
    """Whether it was told what most rollouts are like: those that are not random."""
    collects: dict[int, int] = field(default_factory=dict)
    """By number: tickets of the rollouts under way."""
    asked: int = 0
    """Rollouts asked for."""
    done: tuple[int, int] = (0, 0)
    """Replies taken in, and the number of the next rollout: one, so that they change at once."""
    early: dict[int, Answer] = field(default_factory=dict)
    """Replies that came before others which were made earlier, by place."""
    beginnings: dict[int, Any] = field(default_factory=dict)
    """By ticket: what is resolved when the worker turns to that command."""
    windows: dict[int, m.WindowRef] = field(default_factory=dict)
    """By ticket: where rollouts under way are to lie."""
    died: WorkerDied | None = None


@dataclass(frozen=True, slots=True)
class _Expected:
    """What an object that does not exist yet will be."""

    actor: _Actor
    kind: str
    """``"reply"``, ``"begun"`` or ``"end"``."""
    ticket: int = 0
    """Of a beginning."""


class RayBackend:
    """One actor per worker. Rollouts are single objects, handed out where they are or copied once.

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
        self._landings: dict[tuple[int, int, int], Landing] = {}
        self._lender = Lender(store_capacity)
        self._boards = 0
        self.stop_byte = ToldByte(self._tell_stop)
        """The byte that running rollouts look at; actors are told when it changes."""
        self.ends_ray = True
        """Whether `stop` ends Ray if it was started for collectors and no other uses it."""
        self._ray = require_ray()
        session.enter(self, init)

    # -- commands --------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Create one actor per factory; all of them build their source at the same time.

        Raises:
            ConfigError: something that cannot be sent to another process.
        """
        blobs = [pickled(worker, factory) for worker, factory in enumerate(factories)]
        check_room(self._options)
        for name, group in GROUPS.items():
            self._ray.method(concurrency_group=group)(getattr(RayWorker, name))
        groups = dict.fromkeys(GROUPS.values(), 1)
        actor_class = self._ray.remote(concurrency_groups=groups)(RayWorker)
        for worker, blob in enumerate(blobs):
            boot = ActorBoot(worker, self._threads, tuple(sys.path), blob)
            chosen = dict(self._options[worker]) if self._options else {}
            actor = _Actor(worker, actor_class.options(**chosen).remote(boot))
            self._actors.append(actor)
            self._expected[actor.handle.ended.remote()] = _Expected(actor, "end")
            self._expected[actor.handle.serve.remote()] = _Expected(actor, "reply")

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

    def sound(self) -> bool:
        """Return False: only `receive` can tell."""
        return False

    def wait(self, timeout: float) -> None:
        """Wait until there may be a reply; safe while another thread uses the backend."""
        with contextlib.suppress(Exception):  # stopped meanwhile
            if not self._replies and self._ray.is_initialized():
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
            self._replies.append(m.Begun(expected.actor.worker, expected.ticket))
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
        if place < actor.done[0]:
            return
        actor.early[place] = answer
        while actor.done[0] in actor.early:
            self._deliver(actor, actor.done[0])

    def _deliver(self, actor: _Actor, place: int) -> None:
        _, _, frame, block = actor.early[place]
        reply, number = reply_in(frame), actor.done[1]
        if reply.ticket == COLLECTED:
            assert isinstance(reply, m.Rolled | m.Failed)
            collect = min(each for each in actor.collects if each >= number)
            reply, number = replace(reply, ticket=actor.collects[collect]), collect + 1
            if isinstance(reply, m.Rolled) and block is not None:
                reply = self._landed(actor.windows[reply.ticket], reply, block)
        self._replies.append(reply)
        actor.done = place + 1, number
        del actor.early[place]
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
            landing = Landing(self._open_window(reference), reference)
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
        with contextlib.suppress(self._ray.exceptions.RayError, OSError):
            for reference in self._ray.wait(own, num_returns=len(own), timeout=0)[0]:
                if self._expected[reference].kind == "reply":
                    self._take_reply(actor, self._ray.get(reference))
        for reference in own:
            self._expected.pop(reference, None)
        for place in sorted(place for place in actor.early if place >= actor.done[0]):
            self._deliver(actor, place)
        actor.early.clear()
        actor.beginnings.clear()
        actor.windows.clear()
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
