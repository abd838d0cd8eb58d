"""Samples made ahead of time, in a thread."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from gleanrl.core.errors import ReplayError
from gleanrl.memory.replay.samplers import Draw, Sampler

Sample: TypeAlias = tuple[Draw, Any]


class Ticket:
    """One sample that is to be made; changed under the buffer's lock only."""

    __slots__ = ("drawn", "dropped", "future", "position")

    def __init__(self) -> None:
        self.future: Future[Sample]
        self.drawn = False
        self.dropped = False
        self.position: Any = None
        """Where the sampler's epoch was before this sample was drawn."""


class Prefetcher:
    """Keeps some samples in the making; they come out in the order they were begun in."""

    def __init__(
        self,
        make: Callable[[int, Ticket], Sample],
        sampler: Sampler,
        lock: AbstractContextManager[Any],
        number: int,
    ) -> None:
        """Keep ``number`` samples ahead; ``make`` draws them under ``lock``, the buffer's."""
        self._make = make
        self._sampler = sampler
        self._lock = lock
        self._number = number
        self._queue: deque[Ticket] = deque()
        self._size = 0
        self._pool = ThreadPoolExecutor(1, "gleanrl-prefetch")
        self._pid = os.getpid()

    def next(self, size: int) -> Sample:
        """Return the next sample of ``size`` and begin others; errors are those of now."""
        ahead, ticket = self._take(size)
        try:
            return ticket.future.result()
        except ReplayError:
            with self._lock:
                self.forget()
            if not ahead:
                raise
        except BaseException:
            with self._lock:
                self.forget()
            raise
        # It could not be made then: what counts is whether it can be made now.
        return self.next(size)

    def _take(self, size: int) -> tuple[bool, Ticket]:
        """Return the next ticket, and whether it was given out by an earlier call."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child has none of its parent's threads
                self.forget()
                self._pool, self._pid = ThreadPoolExecutor(1, "gleanrl-prefetch"), os.getpid()
            if size != self._size:
                self.forget()
                self._size = size
            ahead = bool(self._queue)
            while len(self._queue) <= self._number:
                ticket = Ticket()
                ticket.future = self._pool.submit(self._make, size, ticket)
                self._queue.append(ticket)
            return ahead, self._queue.popleft()

    def position(self) -> Any:
        """Return the sampler's position before the samples not delivered yet; under the lock."""
        drawn = (ticket.position for ticket in self._queue if ticket.drawn)
        return next(drawn, self._sampler.position())

    def forget(self) -> None:
        """Drop what was made ahead, as if it had never been drawn; under the lock."""
        self._sampler.seek(self.position())
        for ticket in self._queue:
            ticket.dropped = True
        self._queue.clear()
