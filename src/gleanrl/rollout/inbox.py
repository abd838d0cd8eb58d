"""What a worker has to do next, and the loop that does it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from gleanrl.core import messages as m
from gleanrl.rollout.worker import Worker

Addressed = tuple[int, m.Command]
"""A command and its ticket."""


class Queued:
    """Commands in the order they are carried out: rollouts not begun yet come last."""

    def __init__(self) -> None:
        """Start empty."""
        self._collects: deque[Addressed] = deque()
        self._others: deque[Addressed] = deque()

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._others or self._collects)

    def put(self, ticket: int, command: m.Command) -> None:
        """Queue ``command``."""
        queue = self._collects if isinstance(command, m.Collect) else self._others
        queue.append((ticket, command))

    def pop(self) -> Addressed:
        """Return the next command."""
        return (self._others or self._collects).popleft()


class Inbox:
    """Commands that come in from any thread, for one thread to carry out."""

    def __init__(self) -> None:
        """Start empty."""
        self._queued = Queued()
        self._arrived = threading.Condition()

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._queued)

    def put(self, ticket: int, command: m.Command) -> None:
        """Queue ``command``; safe in any thread."""
        with self._arrived:
            self._queued.put(ticket, command)
            self._arrived.notify()

    def next(self) -> Addressed:
        """Wait for a command, as long as it takes, and return it."""
        with self._arrived:
            while not self._queued:
                self._arrived.wait()
            return self._queued.pop()


def work(
    index: int,
    build: Callable[[], Worker],
    following: Callable[[], Addressed],
    answer: Callable[[m.Reply], None],
) -> None:
    """Build a worker and have it carry out commands until `Close`.

    Args:
        index: The worker's.
        build: Builds it here; what that raises is answered under ticket 0.
        following: Waits for the next command.
        answer: Is given every reply.
    """
    try:
        worker = build()
        answer(worker.ready())
    except Exception as err:
        answer(m.Failed(index, 0, err))
        return
    while True:
        ticket, command = following()
        if not isinstance(command, m.Collect):
            answer(m.Begun(index, ticket))
        answer(worker.handle(ticket, command))
        if isinstance(command, m.Close):
            return
