"""When a batch is complete: pure logic over a `Dispatcher`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, WorkerDied
from gleanrl.core.protocols import Stop
from gleanrl.engine.budget import Budget
from gleanrl.engine.dispatch import Dispatcher, Ticket
from gleanrl.engine.slots import Slots

_GRACE = 3.0
"""Seconds the others get to end their rollouts once one worker has failed."""


Rollouts: TypeAlias = Mapping[int, m.Report]
"""Per worker that contributed to a batch: what it says of its rollout."""


class Gather(Protocol):
    """Has workers collect and says when there is a batch."""

    def batch(
        self, budget: Budget, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Return the next batch and who made it; ``None`` for one that workers kept.

        With ``feed=False`` nothing is begun that `ready` has not found under way.
        """
        ...

    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        """Tell whether `batch` would give one now; begin new rollouts only if told to ``feed``.

        Takes in what has come, without waiting for more.
        """
        ...

    @property
    def idle(self) -> bool:
        """Whether no rollout is under way."""
        ...

    def discard(self, since: Mapping[int, int], budget: Budget) -> int:
        """Drop rollouts of each worker that arrived before its given arrival; return frames."""
        ...

    @property
    def copies(self) -> int:
        """Batches copied because the user held every slot."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of batch memory reserved."""
        ...


@dataclass(slots=True)
class _Round:
    """A batch on its way."""

    slot: int
    timeout: float | None
    random: bool
    """Whether its rollouts act at random."""
    deadline: float | None = None
    tickets: list[Ticket] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    asked: int = 0
    """Workers that were asked, or could not be."""
    interrupted: bool = False
    """Whether somebody who waited for it was interrupted: the time since does not count."""

    def renew(self) -> None:
        """Count time from now on."""
        self.deadline = None if self.timeout is None else time.monotonic() + self.timeout


class SyncGather:
    """A batch is complete when every worker has delivered its rollout.

    With ``enough``, the rollouts of the others are stopped once that many workers are done.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        slots: Slots,
        frames: Sequence[int],
        *,
        stop: Stop | None = None,
        enough: int | None = None,
        stopped: Callable[[], bool] = bool,
    ) -> None:
        """Gather from every worker.

        Args:
            dispatcher: Speaks to the workers.
            slots: Of batches that hold the rollouts of all.
            frames: What each worker is asked for.
            stop: The byte running rollouts look at; needed with ``enough``.
            enough: Number of workers that have to finish.
            stopped: Whether rollouts are to be stopped from outside.
        """
        self._dispatcher = dispatcher
        self._slots = slots
        self._frames = tuple(frames)
        self._stop = stop
        self._enough = enough
        self._stopped = stopped
        self._begun: _Round | None = None

    @property
    def copies(self) -> int:
        """Batches copied because the user held every slot."""
        return self._slots.copies

    @property
    def nbytes(self) -> int:
        """Bytes of batch memory reserved."""
        return self._slots.nbytes

    def batch(
        self, budget: Budget, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Have every worker fill its part of a slot.

        Raises:
            CollectorTimeout: not all had replied after ``timeout`` seconds.
            WorkerDied: a worker's process ended.
            Exception: what a worker's code raised.
        """
        begun = self._begun or self._begin(budget, timeout)
        reports = self._complete(begun, budget, timeout)
        budget.deliver(sum(self._frames), sum(report.frames for report in reports))
        return self._slots.hand_over(begun.slot, reports), dict(enumerate(reports))

    def _complete(self, begun: _Round, budget: Budget, timeout: float | None) -> list[m.Report]:
        """Finish a round; one that nobody waits for any longer stays begun."""
        if begun.interrupted:
            begun.interrupted = False
            begun.renew()
        try:
            self._ask(begun)
            self._slots.prepare(begun.slot)  # workers are at it, and nobody waits for this
            reports = self._finish(begun, timeout)
        except Exception as err:
            self._begun = None
            budget.cancel(sum(self._frames))
            if not isinstance(err, CollectorTimeout | WorkerDied):
                self._slots.release(begun.slot)
            raise  # else: a worker may still write into this slot, and nobody else may have it
        except BaseException:  # an interrupt: workers go on, and the next call takes over
            begun.interrupted = True
            self._let_run(finished=0)
            self._hurry(False)
            raise
        self._begun = None
        return reports

    def _begin(self, budget: Budget, timeout: float | None) -> _Round:
        """Ask every worker for its part of a slot."""
        self._let_run(finished=0)
        begun = _Round(self._slots.acquire(), timeout, budget.random)
        begun.renew()
        self._begun = begun
        budget.dispatch(sum(self._frames))
        self._ask(begun)
        return begun

    def _ask(self, begun: _Round) -> None:
        """Ask the workers that were not asked yet."""
        for worker, window in enumerate(self._slots.windows(begun.slot)):
            if worker < begun.asked:
                continue
            self._ask_for(begun, worker, window)
            begun.asked = worker + 1

    def _ask_for(self, begun: _Round, worker: int, window: m.WindowRef) -> None:
        try:
            begun.tickets.append(self._dispatcher.post(worker, m.Collect(window, begun.random)))
        except (WorkerDied, CollectorTimeout) as err:
            begun.errors.append(err)

    def _finish(self, begun: _Round, timeout: float | None) -> list[m.Report]:
        """Wait for all replies.

        After a failure the others are stopped and heard out: a worker that still writes would
        write into memory that is used again.
        """
        tickets, errors, deadline = begun.tickets, begun.errors, begun.deadline
        hurried = False
        if not (errors or self._dispatcher.intact):  # noticed by whoever asked in between
            errors.append(self._dispatcher.lost[0])
            tickets = [t for t in tickets if t.worker in self._dispatcher.alive]
        while waiting := [ticket for ticket in tickets if ticket.reply is None]:
            found = errors or _failures(tickets)
            if found and not hurried:
                errors = list(found)  # what went wrong first is what is raised
                hurried, deadline = True, time.monotonic() + _GRACE
                self._hurry(True)
            try:
                self._wait(waiting, deadline, timeout)
            except (WorkerDied, CollectorTimeout) as err:
                errors.append(err)
                tickets = [t for t in tickets if t.worker in self._dispatcher.alive]
            if not hurried:
                self._let_run(sum(ticket.reply is not None for ticket in tickets))
        self._let_run(finished=0)
        if hurried:
            self._hurry(False)
        errors = errors or _failures(tickets)
        if errors:
            raise errors[0]
        return [t.reply.report for t in tickets if isinstance(t.reply, m.Rolled)]

    def _wait(
        self, waiting: Sequence[Ticket], deadline: float | None, timeout: float | None
    ) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if self._dispatcher.wait(left) or left is None:
            return
        late = [ticket.worker for ticket in waiting]
        raise self._dispatcher.give_up(
            late, f"workers {late} did not deliver their rollout within {timeout} s"
        )

    def _hurry(self, stop: bool) -> None:
        if self._stop is not None:
            self._stop[0] = stop or self._stopped()

    def _let_run(self, finished: int) -> None:
        if self._enough is not None:
            assert self._stop is not None
            self._stop[0] = finished >= self._enough or self._stopped()

    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        """Tell whether all rollouts have arrived, or something that `batch` will raise."""
        if self._begun is None:
            if not feed or budget.exhausted:
                return False
            self._begin(budget, timeout)
        begun = self._begun
        assert begun is not None
        self._dispatcher.check()
        if timeout is None:
            self._dispatcher.warn_silent()
        finished = sum(ticket.reply is not None for ticket in begun.tickets)
        self._let_run(finished)
        late = begun.deadline is not None and time.monotonic() > begun.deadline
        return bool(late or begun.errors or finished == len(begun.tickets))

    @property
    def idle(self) -> bool:
        """Whether no rollout is under way."""
        return self._begun is None

    def discard(self, since: Mapping[int, int], budget: Budget) -> int:
        """Have the rollouts that are to go made again, each by its worker; the others stay.

        Which workers had begun theirs before a command came is a matter of chance: what they make
        after it is not.
        """
        begun = self._begun
        if begun is None:
            return 0
        stale = [t for t in begun.tickets if t.reply and t.arrived < since.get(t.worker, 0)]
        if not stale:
            return 0
        begun.tickets = [ticket for ticket in begun.tickets if ticket not in stale]
        self._let_run(sum(ticket.reply is not None for ticket in begun.tickets))
        begun.renew()
        windows = self._slots.windows(begun.slot)
        for ticket in stale:
            self._ask_for(begun, ticket.worker, windows[ticket.worker])
        begun.tickets.sort(key=lambda ticket: ticket.worker)
        replies = (ticket.reply for ticket in stale)
        return sum(reply.report.frames for reply in replies if isinstance(reply, m.Rolled))


def _failures(tickets: Sequence[Ticket]) -> list[BaseException]:
    return [t.reply.error for t in tickets if isinstance(t.reply, m.Failed)]
