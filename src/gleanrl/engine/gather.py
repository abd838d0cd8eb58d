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
        errors: dict[int, BaseException] = {}
        # After a failure the others are heard out: a worker that still writes would write into
        # memory that is used again, and its late reply would be taken for another one.
        while len(reports) + len(errors) < self._workers:
            reply = self._receive(deadline, {*reports, *errors})
            # A reply to an earlier, abandoned request is not this batch's.
            if isinstance(reply, m.Rolled) and reply.sequence == self._sequence:
                reports[reply.worker] = reply.report
            elif isinstance(reply, m.Failed):
                errors[reply.worker] = reply.error
        if errors:
            raise errors[min(errors)]
        return [reports[worker] for worker in range(self._workers)]

    def _receive(self, deadline: float | None, heard: set[int]) -> m.Reply:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._backend.receive(left)
        except CollectorTimeout as err:
            missing = [worker for worker in range(self._workers) if worker not in heard]
            raise CollectorTimeout(
                f"workers {missing} did not deliver their rollout: {err}"
            ) from err


def request(backend: Backend, worker: int, command: m.Command, timeout: float | None) -> object:
    """Send one control command and return its value; nothing else may be under way.

    Raises:
        Exception: what the worker's code raised.
    """
    backend.send(worker, command)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        reply = backend.receive(left)
        if isinstance(reply, m.Rolled) or reply.worker != worker:
            continue  # the late end of a rollout that was given up
        if isinstance(reply, m.Failed):
            raise reply.error
        if isinstance(reply, m.Done):
            return reply.value
        raise GleanError(f"worker {worker} answered {type(command).__name__} with {reply!r}")
