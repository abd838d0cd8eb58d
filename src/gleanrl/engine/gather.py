"""The completion of batches, and the requests to workers for them."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import TypeAlias

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ConfigError, GleanError
from gleanrl.engine.batches import Slots
from gleanrl.engine.budget import Budget
from gleanrl.engine.interruptor import EarlyStop
from gleanrl.engine.session import Session, Ticket

_EXIT_GRACE_S = 2.0
"""Seconds for the other workers to end their rollouts, before the error of one is raised."""
_TASK = "deliver their rollout"
_DEPTH = 2
"""Rollouts an asynchronous worker has ahead of it, so that it never waits for the learner."""

Rollouts: TypeAlias = Mapping[int, m.Report]
"""Per worker that contributed to a batch: the report about its rollout."""
Undelivered: TypeAlias = tuple[int, m.Report, TensorDictBase]
"""A rollout that has arrived and was not delivered: its worker, the report, and the batch."""


class Gather(abc.ABC):
    """Requests rollouts of workers and returns complete batches."""

    def __init__(self, session: Session, slots: Sequence[Slots], frames: Sequence[int]) -> None:
        """Request ``frames[w]`` frames of worker ``w`` at a time."""
        self.session = session
        self._slots = list(slots)
        self._frames = tuple(frames)
        self.dropped = 0
        """Frames of rollouts that had ended and were dropped, because another one failed."""
        self.meanwhile: Callable[[], object] = bool
        """A function called once for every batch, while all workers are busy."""

    @abc.abstractmethod
    def batch(
        self, budget: Budget, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Return the next batch and the reports of its workers; ``None`` if workers kept it.

        With ``feed=False`` nothing is begun that `ready` has not found under way.

        Raises:
            CollectorTimeout: a worker took longer than ``timeout`` seconds for its rollout.
            WorkerDied: a worker's process ended.
            Exception: what a worker's code raised.
        """

    @abc.abstractmethod
    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        """Tell whether `batch` would return or raise now; begin rollouts only with ``feed``.

        Takes in what has come, without waiting for more.
        """

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether no rollout is under way."""

    @abc.abstractmethod
    def waiting(self) -> list[m.Report]:
        """Return the reports of rollouts that wait to be delivered; safe in any thread."""

    @abc.abstractmethod
    def discard(self, since: Mapping[int, int], budget: Budget) -> int:
        """Drop rollouts of each worker that arrived before its given arrival; return frames."""

    @abc.abstractmethod
    def undelivered(self, since: Mapping[int, int]) -> Sequence[Undelivered]:
        """Return copies of rollouts of each worker that arrived before its given arrival."""

    def take_back(self, rollouts: Sequence[Undelivered], budget: Budget) -> None:
        """Deliver ``rollouts`` of `undelivered` before all others."""
        if rollouts:
            raise ConfigError("the state is that of an asynchronous collector")

    @property
    def copies(self) -> int:
        """Batches copied because the user held every slot."""
        return sum(slots.copies for slots in self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of batch memory reserved."""
        return sum(slots.nbytes for slots in self._slots)


@dataclass(slots=True)
class _Round:
    """A batch under way."""

    slot: int
    windows: Sequence[m.WindowRef]
    """The windows of the workers."""
    random: bool
    """Whether the rollouts use random actions."""
    deadline: Deadline
    tickets: list[Ticket] = field(default_factory=list)

    def finished(self) -> int:
        """Return the number of workers that have replied."""
        return sum(ticket.reply is not None for ticket in self.tickets)


def _reports(tickets: Iterable[Ticket]) -> list[m.Report]:
    """Return the reports of rollouts that have arrived."""
    return [ticket.reply.report for ticket in tickets if isinstance(ticket.reply, m.Rolled)]


class SyncGather(Gather):
    """A batch is complete when every worker has delivered its rollout."""

    def __init__(
        self,
        session: Session,
        slots: Slots,
        frames: Sequence[int],
        *,
        early: EarlyStop,
        blanks: bool = False,
    ) -> None:
        """Gather from every worker into ``slots`` of all; options as in `Engine.plan`."""
        super().__init__(session, [slots], frames)
        self._early = early
        self._blanks = blanks
        self._begun: _Round | None = None
        self._changes = session.changes
        """The session's changes that were looked at."""

    def batch(
        self, budget: Budget, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Let every worker fill its part of a slot. An error ends collection."""
        slots = self._slots[0]
        try:
            begun = self._begun or self._begin(budget, timeout)
            slots.prepare(begun.slot)
            self.meanwhile()
            self._finish(begun)
        except BaseException:
            if self._begun is not None:
                budget.cancel(sum(self._frames))
                self._count_dropped(self._begun, budget)
            self._begun = None
            raise
        self._begun = None
        reports = _reports(begun.tickets)
        rollouts: Rollouts = dict(enumerate(reports))
        if len(reports) < len(begun.tickets):
            rollouts, reports = self._with_blanks(begun)
        budget.deliver(sum(self._frames), sum(report.frames for report in reports))
        return slots.hand_over(begun.slot, reports), rollouts

    def _with_blanks(self, begun: _Round) -> tuple[Rollouts, list[m.Report]]:
        """Return the reports there are by worker, and of all: lost workers have made no steps."""
        rollouts: dict[int, m.Report] = {}
        for ticket in begun.tickets:
            if isinstance(ticket.reply, m.Rolled):
                rollouts[ticket.worker] = ticket.reply.report
            else:
                self._slots[0].blank(begun.slot, ticket.worker)
        blank = m.Report(0, 0, min(report.policy_version for report in rollouts.values()))
        return rollouts, [rollouts.get(ticket.worker, blank) for ticket in begun.tickets]

    def _begin(self, budget: Budget, timeout: float | None) -> _Round:
        """Request the rollouts of all workers, in one slot."""
        if self._early.enough is not None:
            self._early.begin(self.session.backend.stop_byte)
        slot = self._slots[0].acquire()
        if slot is None:
            raise GleanError("no slot is free: a batch was handed out that should have been copied")
        windows = self._slots[0].windows[slot]
        self._begun = begun = _Round(slot, windows, budget.random, Deadline(timeout))
        budget.dispatch(sum(self._frames))
        for worker in range(len(windows)):
            begun.tickets.append(self._requested(begun, worker))
        return begun

    def _requested(self, begun: _Round, worker: int) -> Ticket:
        return self.session.send(worker, m.Collect(begun.windows[worker], begun.random))

    def _count_dropped(self, begun: _Round, budget: Budget) -> None:
        """Count the rollouts of a failed round; those that workers have stored were delivered."""
        for ticket in begun.tickets:
            if isinstance(ticket.reply, m.Rolled):
                report = ticket.reply.report
                if begun.windows[ticket.worker].blocks or report.payload is not None:
                    self.dropped += report.frames
                else:
                    budget.deliver(0, report.frames)

    def _finish(self, begun: _Round) -> None:
        """Wait for all replies, but after a failure only a moment, in which rollouts are stopped.

        Replacements of lost workers make these workers' rollouts.

        Raises:
            Exception: the first failure, which may be that of an earlier command.
        """
        session, failures = self.session, list[BaseException]()
        for worker in range(len(begun.tickets)):
            while (ticket := begun.tickets[worker]).reply is None and (
                ticket.lost is None or self._replaced(ticket)
            ):
                if session.changes != self._changes and not failures:
                    failures = self._look(begun)
                    continue
                if ticket.lost is not None and failures:
                    break
                session.receive_in_time(self._deadline(begun), begun.tickets, _TASK)
                if self._early.enough is not None and not failures:
                    self._early.update(session.backend.stop_byte, begun.finished)
        if session.changes != self._changes:
            failures = failures or self._look(begun)
        for error in failures:
            raise error

    def _replaced(self, ticket: Ticket) -> bool:
        """Whether a replacement makes the rollout of a worker that was lost, if it was."""
        session = self.session
        if ticket.lost is None:
            return False
        coming = ticket.worker in session.joining or ticket.worker not in session.lost
        return session.tolerant and coming

    def _deadline(self, begun: _Round) -> Deadline:
        """Return that of the rollouts; of replacements that come up the backend has its own."""
        waits = not self.session.tolerant or any(ticket.due for ticket in begun.tickets)
        return begun.deadline if waits else Deadline(None)

    def _look(self, begun: _Round) -> list[BaseException]:
        """Return the errors since the last look, and stop the rollouts if there are any."""
        session = self.session
        self._changes = session.changes
        failures: list[BaseException] = []
        self._request_again(begun)
        for ticket in begun.tickets:
            excused = self._replaced(ticket) or self._tolerated(ticket)
            if ticket.error is not None and not excused:
                failures.append(session.lost.get(ticket.worker, ticket.error))
        failures = failures or session.take_failures()
        if failures:
            begun.deadline = Deadline(_EXIT_GRACE_S)
            self._early.set(session.backend.stop_byte, True)
        return failures

    def _tolerated(self, ticket: Ticket) -> bool:
        """Whether the worker was lost, and the batch may lack its rollout."""
        lost = ticket.lost is not None and ticket.over
        return lost and self._blanks and bool(self.session.alive)

    def _request_again(self, begun: _Round) -> None:
        """Request the rollouts of lost workers from replacements that are up."""
        for worker, ticket in enumerate(begun.tickets):
            if ticket.lost is not None and worker not in self.session.lost:
                begun.deadline = Deadline(begun.deadline.seconds)
                begun.tickets[worker] = self._requested(begun, worker)

    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        """Tell whether all rollouts have arrived, or an error that `batch` will raise."""
        if self._begun is None:
            if not feed or budget.exhausted:
                return False
            self._begin(budget, timeout)
        begun = self._begun
        assert begun is not None
        self.session.receive_available()
        if timeout is None:
            self.session.warn_silent()
        self._early.update(self.session.backend.stop_byte, begun.finished)
        self._request_again(begun)
        waits = self.session.can_continue and any(t.due or self._replaced(t) for t in begun.tickets)
        return not waits or self._deadline(begun).expired

    @property
    def idle(self) -> bool:
        return self._begun is None

    def waiting(self) -> list[m.Report]:
        begun = self._begun
        return [] if begun is None else _reports(begun.tickets)

    def undelivered(self, since: Mapping[int, int]) -> Sequence[Undelivered]:
        """Return nothing: a state is taken between batches."""
        return ()

    def discard(self, since: Mapping[int, int], budget: Budget) -> int:
        """Request dropped rollouts again, each of its worker; the others stay.

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
        self._early.update(self.session.backend.stop_byte, begun.finished)
        begun.deadline = Deadline(begun.deadline.seconds)
        for ticket in stale:
            begun.tickets.append(self._requested(begun, ticket.worker))
        begun.tickets.sort(key=lambda ticket: ticket.worker)
        return sum(report.frames for report in _reports(stale))


_Requested: TypeAlias = tuple[Ticket, int]
"""A due rollout and its slot."""


class AsyncGather(Gather):
    """A batch is complete when any worker has delivered its rollout."""

    def __init__(self, session: Session, slots: Sequence[Slots], frames: Sequence[int]) -> None:
        """Gather from the first worker to finish; each has ``slots`` of its own."""
        super().__init__(session, slots, frames)
        self._queues: list[deque[_Requested]] = [deque() for _ in frames]
        self._taken_back: deque[Undelivered] = deque()
        """Rollouts of an earlier collector that it did not deliver."""

    def batch(
        self, budget: Budget, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Return the rollout that arrived first, and keep every worker busy."""
        session = self.session
        if feed and session.can_continue:
            self._feed_all(budget, one=True)
        self.meanwhile()
        if self._taken_back:
            worker, report, batch = self._taken_back.popleft()
            budget.deliver(self._frames[worker], report.frames)
            return batch, {worker: report}
        if timeout is not None:
            self._catch_up(timeout)
        while (first := self._first()) is None:
            session.raise_if_failed()
            self._drop_lost(budget)
            if feed and self.idle:  # all workers with a request were lost
                self._feed_all(budget, one=True)
            session.receive_in_time(Deadline(timeout), self._heads(), _TASK)
            if not session.can_continue:  # raised after the delivery of all arrived rollouts
                session.receive_available()
        worker, requested = first.worker, self._frames[first.worker]
        slots, (_, slot) = self._slots[worker], self._queues[worker].popleft()
        if not isinstance(first.reply, m.Rolled):
            slots.release(slot)
            budget.cancel(requested)
            assert first.error is not None
            raise first.error
        report = first.reply.report
        budget.deliver(requested, report.frames)
        batch = slots.hand_over(slot, [report])
        if feed and self.session.can_continue:  # else: only what was begun is delivered
            self._feed(worker, budget, _DEPTH)
        return batch, {worker: report}

    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        if feed and self.session.can_continue:
            self._feed_all(budget)
        if self._taken_back:
            return True
        if timeout is None:
            self.session.warn_silent()
        if timeout is not None or self._first() is None:
            self._catch_up(timeout)
        if self._first() is None and self.session.can_continue:
            self._drop_lost(budget)
            return False
        return True

    @property
    def idle(self) -> bool:
        return not (any(self._queues) or self._taken_back)

    def waiting(self) -> list[m.Report]:
        arrived = _reports(ticket for queue in self._queues for ticket, _ in queue.copy())
        return [*(report for _, report, _ in self._taken_back), *arrived]

    def undelivered(self, since: Mapping[int, int]) -> Sequence[Undelivered]:
        found = list(self._taken_back)
        made = [
            (ticket.arrived, ticket.worker, ticket.reply.report, slot)
            for queue in self._queues
            for ticket, slot in queue
            if isinstance(ticket.reply, m.Rolled) and ticket.arrived < since.get(ticket.worker, 0)
        ]
        for _, worker, report, slot in sorted(made, key=itemgetter(0)):
            if (batch := self._slots[worker].copied(slot, report)) is not None:
                found.append((worker, replace(report, payload=None), batch))
        return found

    def take_back(self, rollouts: Sequence[Undelivered], budget: Budget) -> None:
        for worker, report, batch in rollouts:
            budget.dispatch(self._frames[worker])
            self._taken_back.append((worker, report, batch))

    def _feed_all(self, budget: Budget, one: bool = False) -> None:
        """Request rollouts as the budget allows, and ``one`` in any case, which a caller gets."""
        self._drop_lost(budget)
        for depth in range(1, _DEPTH + 1):  # in turn: a short budget is shared out
            for worker in range(len(self._slots)):
                self._feed(worker, budget, depth)
        for worker in self.session.alive if one else ():
            if self.idle:
                self._begin(worker, budget)

    def _feed(self, worker: int, budget: Budget, depth: int) -> None:
        """Request rollouts of ``worker`` until ``depth`` are ahead, as the budget allows."""
        queue = self._queues[worker]
        if queue and queue[0][0].lost is not None:
            self._drop_lost_of(worker, budget)
        while len(queue) < depth and budget.wants_more and self._begin(worker, budget):
            pass

    def _begin(self, worker: int, budget: Budget) -> bool:
        """Request a rollout of ``worker``; return ``False`` if it was lost."""
        if worker in self.session.lost:
            return False
        slots = self._slots[worker]
        slot = slots.acquire()
        assert slot is not None  # a batch was copied otherwise
        ticket = self.session.send(worker, m.Collect(slots.windows[slot][0], budget.random))
        if ticket.lost is not None:
            slots.release(slot)
            return False  # raised when the rollouts that did arrive have been delivered
        budget.dispatch(self._frames[worker])
        self._queues[worker].append((ticket, slot))
        return True

    def _drop_lost(self, budget: Budget) -> None:
        """Expect no rollouts of lost workers; others may make them."""
        for worker in range(len(self._queues)):
            self._drop_lost_of(worker, budget)

    def _drop_lost_of(self, worker: int, budget: Budget) -> None:
        queue = self._queues[worker]
        while queue and queue[0][0].lost is not None:
            self._slots[worker].release(queue.popleft()[1])
            budget.cancel(self._frames[worker])

    def _heads(self) -> list[Ticket]:
        return [queue[0][0] for queue in self._queues if queue]

    def _first(self) -> Ticket | None:
        first = None
        for queue in self._queues:
            if queue and (ticket := queue[0][0]).reply is not None:
                first = ticket if first is None or ticket.arrived < first.arrived else first
        return first

    def _catch_up(self, timeout: float | None) -> None:
        """Receive replies that came while the learner was busy, and note late workers."""
        self.session.receive_available()
        if timeout is not None:
            last = self.session.last_reply
            due = [(t.worker, max(t.posted, last[t.worker])) for t in self._heads() if t.due]
            late = [worker for worker, since in due if Deadline(timeout, since).expired]
            if late:
                self.session.give_up(late, _TASK, Deadline(timeout))

    def discard(self, since: Mapping[int, int], budget: Budget) -> int:
        frames = sum(report.frames for worker, report, _ in self._taken_back if worker in since)
        for worker, *_ in self._taken_back:
            if worker in since:
                budget.cancel(self._frames[worker])
        self._taken_back = deque(one for one in self._taken_back if one[0] not in since)
        for worker, mark in since.items():
            queue = self._queues[worker]
            while queue and queue[0][0].reply is not None and queue[0][0].arrived < mark:
                ticket, slot = queue.popleft()
                self._slots[worker].release(slot)
                budget.cancel(self._frames[worker])
                if isinstance(ticket.reply, m.Rolled):
                    frames += ticket.reply.report.frames
        return frames
