"""When a batch is complete: pure logic over a `Backend`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, GleanError
from gleanrl.core.protocols import Backend


class SyncGather:
    """A batch is complete when every worker has delivered its rollout."""

    def __init__(self, backend: Backend, workers: int) -> None:
        """Gather from ``workers`` workers of ``backend``."""
        self._backend = backend
        self._workers = workers
        self._sequence = 0

    def batch(
        self, windows: Sequence[m.WindowRef], random: bool, timeout: float | None
    ) -> list[m.Report]:
        """Have every worker fill its window; return their reports in worker order.

        Raises:
            CollectorTimeout: not all had replied after ``timeout`` seconds.
            Exception: what a worker's code raised.
        """
        self._sequence += 1
        for worker, window in enumerate(windows):
            self._backend.send(worker, m.Collect(self._sequence, window, random))
        deadline = None if timeout is None else time.monotonic() + timeout
        reports: dict[int, m.Report] = {}
        while len(reports) < self._workers:
            reply = self._receive(deadline, reports)
            # A reply to an earlier, abandoned request is not this batch's.
            if isinstance(reply, m.Rolled) and reply.sequence == self._sequence:
                reports[reply.worker] = reply.report
            elif isinstance(reply, m.Failed):
                raise reply.error
        return [reports[worker] for worker in range(self._workers)]

    def _receive(self, deadline: float | None, reports: dict[int, m.Report]) -> m.Reply:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._backend.receive(left)
        except CollectorTimeout as err:
            missing = [worker for worker in range(self._workers) if worker not in reports]
            raise CollectorTimeout(
                f"workers {missing} did not deliver their rollout: {err}"
            ) from err


def request(backend: Backend, worker: int, command: m.Command, timeout: float | None) -> object:
    """Send one control command and return its value; nothing else may be under way.

    Raises:
        Exception: what the worker's code raised.
    """
    backend.send(worker, command)
    reply = backend.receive(timeout)
    match reply:
        case m.Failed(error=error):
            raise error
        case m.Done(value=value):
            return value
        case _:
            raise GleanError(f"worker {worker} answered {type(command).__name__} with {reply!r}")
