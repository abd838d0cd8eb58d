"""Workers in the calling thread: the reference every other backend is tested against."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import WORKER_NAME, ClosedError, CollectorTimeout, GleanError, name_worker
from gleanrl.core.protocols import InlineSource, SharedMemory, SourceFactory, Stop
from gleanrl.transport.pickling import pickled
from gleanrl.transport.worker_loop import OpenWindow, Worker


class _Byte(bytearray):
    """A stop byte that can be referred to weakly."""


class InlineBackend:
    """Runs a command when its reply is received, in the order of workers in processes."""

    inline, worker_name = True, WORKER_NAME

    def __init__(self, open_window: OpenWindow, *, apart: bool = False) -> None:
        self._apart = apart
        self._open_window = open_window
        self.stop_byte: Stop = _Byte(1)
        self._workers: list[Worker] = []
        self._collects: deque[tuple[int, int, m.Command]] = deque()
        self._others: deque[tuple[int, int, m.Command]] = deque()
        self._replies: deque[m.Reply] = deque()

    @property
    def memory(self) -> SharedMemory | None:
        """Private memory, unless the environments of the worker are in other processes."""
        return None if self._apart else cast("InlineSource", self._workers[0].source).memory

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers themselves: in process they can be looked at."""
        return self._workers

    def weight_publisher(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Return ``None``: weights travel as messages."""

    def start(self, factories: Sequence[SourceFactory]) -> None:
        if self._apart:
            blobs = [pickled(index, factory) for index, factory in enumerate(factories)]
            factories = [cloudpickle.loads(blob) for blob in blobs]
        for index, factory in enumerate(factories):
            try:
                worker = Worker(index, factory, self._open_window, self.stop_byte)
            except Exception as err:
                self._say_where(index, err)
                raise
            self._workers.append(worker)
            self._replies.append(worker.ready())

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        if worker >= len(self._workers):  # it was never built
            raise ClosedError("the collector was shut down")
        queue = self._collects if isinstance(command, m.Collect) else self._others
        queue.append((worker, ticket, command))

    def receive(self, timeout: float | None) -> m.Reply:
        if self._replies:
            return self._replies.popleft()
        queue = self._others or self._collects
        if not queue and timeout is not None:
            raise CollectorTimeout("no command is under way")
        if not queue:
            raise GleanError("no command is under way: nothing will ever reply")
        worker, ticket, command = queue.popleft()
        reply = self._workers[worker].handle(ticket, command)
        if isinstance(reply, m.Failed):
            self._say_where(worker, reply.error)
        return reply

    def _say_where(self, worker: int, error: BaseException) -> None:
        if self._apart:  # else there is one worker, which users do not see
            name_worker(error, worker)

    def no_end_noticed(self) -> bool:
        return True

    def end(self, worker: int) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        """Nothing happens between calls: there is nothing to wait for."""

    def stop(self, timeout: float) -> None:
        self._collects.clear()
        self._others.clear()
        self._replies.clear()
