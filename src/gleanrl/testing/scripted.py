"""A backend whose workers are late, fail and die as scripted, on a virtual clock."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, WorkerDied
from gleanrl.core.protocols import SourceFactory
from gleanrl.transport.worker import OpenWindow, Worker


@dataclass(frozen=True, slots=True)
class Act:
    """Carry the command out and reply ``after`` virtual seconds, ``copies`` times."""

    after: float = 0.0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Fail:
    """Reply with ``error`` instead."""

    error: BaseException
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class Die:
    """Never reply; the death is seen ``after`` virtual seconds."""

    after: float = 0.0


Script = Mapping[tuple[int, int], Act | Fail | Die]
"""What worker ``w`` does with the ``n``-th command it gets: ``{(w, n): ...}``."""


class ScriptedBackend:
    """Runs real sources; only the timing and the failures are made up."""

    memory = None
    inline = True

    def __init__(self, open_window: OpenWindow, script: Script | None = None) -> None:
        """Follow ``script``; where it says nothing, act at once."""
        self._open_window = open_window
        self._script = dict(script or {})
        self._workers: list[Worker] = []
        self._counts: list[int] = []
        self._due: list[tuple[float, int, m.Reply | Die, int]] = []
        self._order = 0
        self.stop_byte = bytearray(1)
        self.now = 0.0
        """Virtual seconds since the start."""

    def board(self, weights: Mapping[str, Any]) -> None:
        """Return ``None``: weights travel as messages."""

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Build the workers; all are ready at once."""
        for index, factory in enumerate(factories):
            worker = Worker(index, factory, self._open_window, self.stop_byte)
            self._workers.append(worker)
            self._counts.append(0)
            self._post(0.0, worker.ready(), index)

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Have ``worker`` do what the script says of this command (`Place` is not counted)."""
        if isinstance(command, m.Place):
            self._post(0.0, self._workers[worker].handle(ticket, command), worker)
            return
        number, self._counts[worker] = self._counts[worker], self._counts[worker] + 1
        match self._script.get((worker, number), Act()):
            case Act(after, copies):
                reply = self._workers[worker].handle(ticket, command)
                for _ in range(copies):
                    self._post(after, reply, worker)
            case Fail(error, after):
                self._post(after, m.Failed(worker, ticket, error), worker)
            case Die(after) as death:
                self._post(after, death, worker)

    def _post(self, after: float, what: m.Reply | Die, worker: int) -> None:
        self._order += 1
        heapq.heappush(self._due, (self.now + after, self._order, what, worker))

    def receive(self, timeout: float | None) -> m.Reply:
        """Move the clock to the next reply and return it."""
        if not self._due or (timeout is not None and self._due[0][0] > self.now + timeout):
            self.now += timeout or 0.0
            raise CollectorTimeout(f"no reply within {timeout} s")
        self.now, _, what, worker = heapq.heappop(self._due)
        if isinstance(what, Die):
            death = WorkerDied(f"worker {worker} died")
            death.worker = worker
            raise death
        return what

    def sound(self) -> bool:
        """Return False: whether somebody died is a matter of the script."""
        return False

    def wait(self, timeout: float) -> None:
        """Nothing happens between calls: there is nothing to wait for."""

    def open(self, payload: m.Payload) -> Any:
        """Return the rollout itself."""
        return payload.handle

    def stop(self, timeout: float) -> None:
        """Let go of the workers."""
        self._workers = []
        self._due = []
