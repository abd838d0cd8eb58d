"""Samples made ahead of time, in a thread."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gleanrl.memory.replay.samplers import Draw


class Ahead:
    """Keeps some samples in the making; they come out in the order they were begun in."""

    def __init__(self, make: Callable[[int], tuple[Draw, Any]], number: int) -> None:
        """Keep ``number`` samples ahead, each made by ``make(size)``."""
        self._make = make
        self._number = number
        self._lock = threading.Lock()
        self._queue: deque[Future[tuple[Draw, Any]]] = deque()
        self._size = 0
        self._pool = ThreadPoolExecutor(1, "gleanrl-prefetch")
        self._pid = os.getpid()

    def next(self, size: int) -> tuple[Draw, Any]:
        """Return the next sample of ``size`` and begin others."""
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self.__init__(self._make, self._number)  # type: ignore[misc]  # begins anew
        with self._lock:
            if size != self._size:
                self._drop()
                self._size = size
            while len(self._queue) <= self._number:
                self._queue.append(self._pool.submit(self._make, size))
            future = self._queue.popleft()
        return future.result()

    def forget(self) -> None:
        """Drop what was made ahead."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        while self._queue:
            self._queue.popleft().cancel()
