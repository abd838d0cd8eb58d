"""Batches with a rollout of every worker: requests, early stops, replacements and blanks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.engine.batch_delivery import Slots
from gleanrl.engine.gather import TASK, FrameCounts, Gather, Rollouts, Undelivered, reports_of
from gleanrl.engine.session import Session, Ticket

_EXIT_GRACE_S = 2.0
"""Seconds for the other workers to end their rollouts, before the error of one is raised."""


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


class SyncGather(Gather):
    """A batch is complete when every worker has delivered its rollout."""

    def __init__(
        self,
        session: Session,
        slots: Slots,
        frames: Sequence[int],
        enough: int | None,
        stopped: Callable[[], bool],
        blanks: bool,
    ) -> None:
        """Gather from every worker into ``slots`` of all; options as in `Engine.plan`."""
        super().__init__(session, [slots], frames)
        self._enough, self._stopped, self._blanks = enough, stopped, blanks
        self._begun: _Round | None = None
        self._changes = session.changes
        """The session's changes that were looked at."""

    def batch(
        self, counts: FrameCounts, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Let every worker fill its part of a slot. An error ends collection."""
        slots = self._slots[0]
        try:
            begun = self._begun or self._begin(counts, timeout)
            slots.prepare(begun.slot)
            self._finish(begun)
        except BaseException:
            if self._begun is not None:
                counts.cancel(sum(self._frames))
                self._count_dropped(self._begun, counts)
            self._begun = None
            raise
        self._begun = None
        reports = reports_of(begun.tickets)
        rollouts: Rollouts = dict(enumerate(reports))
        if len(reports) < len(begun.tickets):
            rollouts, reports = self._with_blanks(begun)
        counts.deliver(sum(self._frames), sum(report.frames for report in reports))
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

    def _begin(self, counts: FrameCounts, timeout: float | None) -> _Round:
        if self._enough is not None:  # none: each rollout is one step
            self._set_stop(self._enough == 0)
        slot = self._slots[0].acquire()
        assert slot is not None  # a batch was copied otherwise
        windows = self._slots[0].windows[slot]
        self._begun = begun = _Round(slot, windows, counts.random, Deadline(timeout))
        counts.dispatch(sum(self._frames))
        for worker in range(len(windows)):
            begun.tickets.append(self._requested(begun, worker))
        return begun

    def _set_stop(self, stop: bool) -> None:
        """Raise the byte that workers read after each step, if anything stops rollouts."""
        byte, wanted = self.session.backend.stop_byte, None
        while wanted != (now := stop or self._stopped()):  # another thread may interrupt meanwhile
            byte[0] = wanted = now

    def _stop_others(self, begun: _Round) -> None:
        """Stop the other rollouts if enough workers have finished."""
        if self._enough is not None:
            self._set_stop(begun.finished() >= self._enough)

    def _requested(self, begun: _Round, worker: int) -> Ticket:
        return self.session.send(worker, m.Collect(begun.windows[worker], begun.random))

    def _count_dropped(self, begun: _Round, counts: FrameCounts) -> None:
        """Count the rollouts of a failed round; those that workers have stored were delivered."""
        for ticket in begun.tickets:
            if isinstance(ticket.reply, m.Rolled):
                report = ticket.reply.report
                if begun.windows[ticket.worker].blocks or report.payload is not None:
                    self.dropped += report.frames
                else:
                    counts.deliver(0, report.frames)

    def _finish(self, begun: _Round) -> None:
        """Wait for all replies, after a failure only a moment, in which rollouts are stopped.

        Replacements of lost workers make these workers' rollouts. Raises the first failure, which
        may be that of an earlier command.
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
                session.receive_in_time(self._deadline(begun), begun.tickets, TASK)
                if self._enough is not None and not failures:
                    self._stop_others(begun)
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
            blank = ticket.lost is not None and ticket.over and self._blanks and session.alive
            if ticket.error is not None and not (blank or self._replaced(ticket)):
                failures.append(copy(session.lost.get(ticket.worker)) or ticket.error)
        failures = failures or session.take_failures()
        if failures:
            begun.deadline = Deadline(_EXIT_GRACE_S)
            self._set_stop(True)
        return failures

    def _request_again(self, begun: _Round) -> None:
        for worker, ticket in enumerate(begun.tickets):
            if ticket.lost is not None and worker not in self.session.lost:
                begun.deadline = Deadline(begun.deadline.seconds)
                begun.tickets[worker] = self._requested(begun, worker)

    def ready(self, counts: FrameCounts, feed: bool, timeout: float | None) -> bool:
        """Tell whether all rollouts have arrived, or an error that `batch` will raise."""
        if self._begun is None:
            if not feed or counts.exhausted:
                return False
            self._begin(counts, timeout)
        begun = self._begun
        assert begun is not None
        self.session.receive_available()
        if timeout is None:
            self.session.warn_silent()
        self._stop_others(begun)
        self._request_again(begun)
        waits = self.session.can_continue and any(t.due or self._replaced(t) for t in begun.tickets)
        return not waits or self._deadline(begun).expired

    @property
    def idle(self) -> bool:
        return self._begun is None

    def waiting(self) -> list[m.Report]:
        begun = self._begun
        return [] if begun is None else reports_of(begun.tickets)

    def undelivered(self, since: Mapping[int, int]) -> Sequence[Undelivered]:
        """Return nothing: a state is taken between batches."""
        return ()

    def discard(self, since: Mapping[int, int], counts: FrameCounts) -> int:
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
        self._stop_others(begun)
        begun.deadline = Deadline(begun.deadline.seconds)
        for ticket in stale:
            begun.tickets.append(self._requested(begun, ticket.worker))
        begun.tickets.sort(key=lambda ticket: ticket.worker)
        return sum(report.frames for report in reports_of(stale))
