"""Workers in the calling thread: the reference every other backend is tested against."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, CollectorTimeout
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.memory.shared import SharedMemory
from gleanrl.rollout.worker import OpenWindow, Worker


class InlineBackend:
    """Runs each command when its reply is asked for, in the order commands were sent."""

    memory: SharedMemory | None = None

    def __init__(self, open_window: OpenWindow, stop: Stop) -> None:
        """Connect workers to the arena and the stop byte."""
        self._open_window = open_window
        self._stop_byte = stop
        self._workers: list[Worker] = []
        self._waiting: deque[tuple[int, m.Command]] = deque()
        self._replies: deque[m.Reply] = deque()

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers themselves: in process they can be looked at."""
        return self._workers

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Build the workers; what a factory raises comes through unchanged."""
        for index, factory in enumerate(factories):
            worker = Worker(index, factory, self._open_window, self._stop_byte)
            self._workers.append(worker)
            self._replies.append(worker.ready())

    def send(self, worker: int, command: m.Command) -> None:
        """Queue ``command``; it runs when a reply is received."""
        if not self._workers:
            raise ClosedError("the collector was shut down")
        self._waiting.append((worker, command))

    def receive(self, timeout: float | None) -> m.Reply:
        """Carry out the oldest command and return its reply."""
        if self._replies:
            return self._replies.popleft()
        if not self._waiting:
            raise CollectorTimeout("no command is under way: nothing will ever reply")
        worker, command = self._waiting.popleft()
        return self._workers[worker].handle(command)

    def open(self, payload: m.Payload) -> Any:
        """Return the rollout itself."""
        return payload.handle

    def stop(self, timeout: float) -> None:
        """Forget what was under way. Idempotent. Workers can still be read."""
        self._waiting.clear()
        self._replies.clear()
