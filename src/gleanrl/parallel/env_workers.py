"""The workers of a `ParallelEnv`, their commands, and the pulses with which they step."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

import numpy as np

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ClosedError, CollectorTimeout, WorkerDied
from gleanrl.core.keys import Key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.window import Array, Window
from gleanrl.engine.session import Session, Ticket
from gleanrl.envs import parallel_worker as worker
from gleanrl.envs.factory import EnvFactory
from gleanrl.envs.parallel_worker import EnvWorkerBuilder, EnvWorkerInfo, SharedPlaces
from gleanrl.memory.arena import Slab, map_window
from gleanrl.memory.pulses import Pulses
from gleanrl.memory.shared import SharedMemory
from gleanrl.transport.interrupts import interruptible
from gleanrl.transport.process import ProcessBackend

CONTROL_S = 60.0
"""Seconds that a command other than a step may take."""
_LOOK_MS = 50
"""Milliseconds of silence after which the workers are looked at."""
_NOTHING: list[int] = []


class EnvWorkers:
    """Processes with environments, which step all at once.

    Between two commands, workers are in `EnvWorker.serve`, where a pulse has them step.
    """

    def __init__(
        self,
        factories: Sequence[tuple[Sequence[EnvFactory], Sequence[Mapping[str, Any]], int]],
        threads: int,
        timeout: float | None,
    ) -> None:
        """Start the workers.

        Args:
            factories: Per worker, callables that make its environments, their arguments, and the
                seed of its random streams.
            threads: torch threads of each.
            timeout: Seconds that a step may take.
        """
        count = len(factories)
        self.memory, self._pulses, self.timeout = SharedMemory(), Pulses(count), timeout
        builders = [
            EnvWorkerBuilder(
                tuple(makes), tuple(kwargs), stream, self.memory, self._pulses.address(index)
            )
            for index, (makes, kwargs, stream) in enumerate(factories)
        ]
        try:
            self.session = Session(lambda _: ProcessBackend(threads), builders)
        except BaseException:
            self._pulses.close()
            raise
        self._pulses.opened()
        self._owner = os.getpid()
        self._serving: dict[int, Ticket] = {}
        self._pending: set[int] = set()
        """Workers that owe an answer."""
        self._failed: list[int] = []
        self._some_ended = False
        self._closing = weakref.finalize(self, _close, self._pulses, self.session, 5.0, False)

    def described(self) -> list[EnvWorkerInfo]:
        """Return each worker's description of its environments."""
        found: list[EnvWorkerInfo] = self.session.request_all(m.Call("described"))
        return found

    # -- memory ----------------------------------------------------------------------------------

    def share(self, envs: Sequence[int]) -> list[SharedPlaces]:
        """Reserve what workers with so many ``envs`` share with this process besides windows."""
        ends = [0, *itertools.accumulate(envs)]
        self.parts = [range(*pair) for pair in itertools.pairwise(ends)]
        """Each worker's rows."""
        workers, total = len(envs), sum(envs)
        base = self.memory.reserve(32 * workers + 2 * total)
        found = self.memory.map()
        small = np.frombuffer(found, np.int64, 4 * workers, base).reshape(workers, 4)
        self._orders = small[:, :3]
        self._reset_s = small[:, 3].view(np.float64)
        flags = base + 32 * workers
        self.cut: Array = np.frombuffer(found, np.bool_, total, flags)
        """Per environment, whether the next step truncates it."""
        self._ended: Array = np.frombuffer(found, np.bool_, total, flags + total)
        places = []
        for index, part in enumerate(self.parts):
            at, cut = base + 32 * index, flags + part.start
            places.append(SharedPlaces(at, at + 24, cut, cut + total, len(part)))
        return places

    def reserve(self, fields: Iterable[Field], steps: int) -> Window:
        """Return a window of all environments that workers can map."""
        slab = Slab([Layout((self.parts[-1].stop,), tuple(fields))], [steps])
        base = self.memory.reserve(slab.nbytes)
        return map_window(self.memory.map(), slab.reference(0, 0, base, 0))

    def sees(self, window: Window) -> bool:
        """Tell whether all of ``window`` is in the memory."""
        tensors = map(window.tensor, window.keys())
        return all(self.memory.offset_of(tensor.data_ptr()) is not None for tensor in tensors)

    def references(self, window: Window, keys: Collection[Key] | None = None) -> list[m.WindowRef]:
        """Return each worker's part of ``window``, a window in the memory: entries ``keys``."""
        found = [(key, window.tensor(key)) for key in keys or window.keys()]
        starts = [self.memory.offset_of(tensor.data_ptr()) for _, tensor in found]
        references = []
        for index, part in enumerate(self.parts):
            blocks = []
            for (key, tensor), start in zip(found, starts, strict=True):
                assert start is not None, "not in the memory of workers"
                env, time = (tensor.itemsize * stride for stride in tensor.stride()[:2])
                field = Field(key, tuple(tensor.shape[2:]), tensor.dtype)
                blocks.append(m.Block(field, start + part.start * env, env, time))
            references.append(m.WindowRef(0, index, len(part), window.steps, tuple(blocks)))
        return references

    @property
    def reset_s(self) -> float:
        """Seconds in resets, of the worker that spent most."""
        return float(self._reset_s.max())

    # -- orders ----------------------------------------------------------------------------------

    def give(self, order: int, window: int, t: int, resets: bool = False) -> None:
        """Give all workers an order; `settle` has to follow.

        Raises:
            ClosedError: after `close`, or in a forked child.
        """
        if t == 0:
            self._check_usable()
        if len(self._serving) < len(self._orders):
            self._enter()
        self._orders[:] = window, t, resets
        send = self._pulses.send
        for index in self._serving:
            send(index, order)
        self._pending.update(self._serving)

    def settle(self) -> list[int]:
        """Wait for the answers that are due; return the environments that ended.

        Raises:
            WorkerError: an exception in a worker.
            WorkerDied: a worker ended.
            CollectorTimeout: a step took longer than the timeout.
        """
        pending, pulses = self._pending, self._pulses
        if pending:
            began = monotonic()
            while pending:
                if not interruptible(pulses.wait, _LOOK_MS):
                    self._look(began)
                    continue
                for index, answer in pulses.take():
                    pending.discard(index)
                    self._some_ended |= answer == worker.ENDED
                    if answer == worker.FAILED:
                        self._failed.append(index)
        if self._failed:
            self._raise_failed()
        if not self._some_ended:
            return _NOTHING
        self._some_ended = False
        ended: list[int] = np.flatnonzero(self._ended).tolist()
        self._ended[ended] = False
        return ended

    def _look(self, began: float) -> None:
        """Look at workers that are late, since the moment ``began``."""
        session, now = self.session, monotonic()
        for index in range(session.workers):  # while a worker serves, pulses are its replies
            since = began if index in self._pending else now
            session.last_reply[index] = max(session.last_reply[index], since)
        session.receive_available()
        session.warn_silent()
        deadline = Deadline(self.timeout, began)
        if deadline.expired:
            session.give_up(sorted(self._pending), "finish their step", deadline)
        try:
            session.raise_if_failed()
        except (WorkerDied, CollectorTimeout):
            self.close(1.0)
            raise

    def _raise_failed(self) -> None:
        """Raise the exception of the first worker that failed; all others have stepped."""
        failed, self._failed = sorted(self._failed), []
        tickets = [self._serving.pop(index) for index in failed]
        self._await(tickets)
        for ticket in tickets:
            if ticket.error is not None:
                raise ticket.error

    def _enter(self) -> None:
        """Have all workers wait for orders."""
        for index in range(self.session.workers):
            if index not in self._serving:
                self._serving[index] = self.session.send(index, m.Call("serve"))

    def pause(self) -> Session:
        """Have all workers wait for commands, after what is under way; return their session."""
        self._check_usable()
        self.settle()
        for index in self._serving:
            self._pulses.send(index, worker.LEAVE)
        tickets, self._serving = list(self._serving.values()), {}
        self._await(tickets)
        return self.session

    def _await(self, tickets: Sequence[Ticket]) -> None:
        deadline = Deadline(CONTROL_S)
        for ticket in tickets:
            while ticket.due:
                self.session.receive_in_time(deadline, [ticket], "end their step")
        try:
            self.session.raise_if_failed()
        except (WorkerDied, CollectorTimeout):
            self.close(1.0)
            raise

    # -- the end ---------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._owner != os.getpid():
            raise ClosedError(
                f"the environments belong to process {self._owner}, and this is process "
                f"{os.getpid()}, forked from it; make environments of its own here"
            )
        if not self._closing.alive:
            raise ClosedError("the environment was closed; make a new one")

    def close(self, timeout: float, raise_on_error: bool = False) -> None:
        """End all workers within ``timeout`` seconds. Idempotent."""
        if self._closing.detach() is not None:
            _close(self._pulses, self.session, timeout, raise_on_error)


def _close(pulses: Pulses, session: Session, timeout: float, raise_on_error: bool) -> None:
    pulses.stop()
    try:
        session.close(timeout, raise_on_error=raise_on_error)
    finally:
        pulses.close()
