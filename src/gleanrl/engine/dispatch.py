"""Commands and their replies, matched by ticket, in any order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, GleanError, WorkerDied
from gleanrl.core.options import warn
from gleanrl.core.protocols import Backend

if TYPE_CHECKING:
    from gleanrl.engine.replacing import Replacements

_NOTICE_S = 60.0
"""Seconds without a reply of a worker after which the user is warned of it."""
_LOOKS = 12
"""How often replies are checked meanwhile."""
_LOSSES = 100
"""Losses of workers that are remembered."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One command on its way, and its reply once that has come."""

    worker: int
    number: int
    command: m.Command
    posted: float
    watched: bool = False
    """Whether no caller will ask for the reply: an error is raised in the next wait."""
    reply: m.Reply | None = None
    arrived: int = 0
    """The reply's place among all replies."""
    lost: WorkerDied | CollectorTimeout | None = None
    """The reason for a missing reply, if the worker was lost before."""


class Dispatcher:
    """Posts commands to the workers of a backend and assigns every reply to its ticket."""

    def __init__(self, backend: Backend, workers: int) -> None:
        """Serve ``workers`` workers; tickets count from 1 (0 is a worker's start)."""
        self._backend = backend
        self.tolerant = False
        """Whether collection continues with the others when workers are lost."""
        self.replacing: Replacements | None = None
        """Replaces lost workers, if the user wants that."""
        self.joining: set[int] = set()
        """Lost workers whose replacement is expected."""
        self._setting_up: set[int] = set()
        """Tickets of commands that bring replacements up to date."""
        self.workers = workers
        self._open: dict[int, Ticket] = {}
        self._occupied: dict[int, int] = {}
        """Per worker that carries out a command other than `Collect`: its ticket."""
        self._number = 0
        self._arrivals = 0
        self._lost: dict[int, WorkerDied | CollectorTimeout] = {}
        self.losses: deque[tuple[float, int, str]] = deque(maxlen=_LOSSES)
        """The newest losses: time (seconds since the epoch), workers and error."""
        self.last_reply = [time.monotonic()] * workers
        """The time of each worker's last reply."""
        self._next_look = 0.0
        self._warned: dict[int, float] = {}
        """The time of the last warning about each silent worker."""

    @property
    def alive(self) -> list[int]:
        """Workers that were not lost."""
        return [worker for worker in range(self.workers) if worker not in self._lost]

    def has(self, worker: int) -> bool:
        """Tell whether ``worker`` was not lost."""
        return worker not in self._lost

    @property
    def lost(self) -> list[WorkerDied | CollectorTimeout]:
        """The errors of lost workers, first lost first."""
        return list(self._lost.values())

    @property
    def can_continue(self) -> bool:
        """Whether collection can continue: no worker was lost, or losses are tolerated."""
        some = len(self._lost) < self.workers or bool(self.joining)
        return not self._lost or (self.tolerant and some)

    def post(self, worker: int, command: m.Command, *, watch: bool = False) -> Ticket:
        """Send ``command``; never waits.

        With ``watch`` no caller will ask for the reply: an error is raised in the next wait.

        Raises:
            WorkerDied: the worker's process has ended.
            CollectorTimeout: the worker missed a deadline before, and its state is unknown.
        """
        if worker in self._lost:
            raise self._lost[worker]
        self._number += 1
        ticket = Ticket(worker, self._number, command, time.monotonic(), watch)
        self._open[ticket.number] = ticket
        try:
            self._backend.send(worker, ticket.number, command)
        except WorkerDied as err:
            raise self._lose(worker, err) from None
        except BaseException:  # it could not be sent: nothing will ever answer
            self.forget(ticket)
            raise
        return ticket

    def receive_one(self, timeout: float | None) -> Ticket | None:
        """Receive one reply; return its ticket, or ``None`` if no caller waits for it any more.

        Raises:
            CollectorTimeout: none came within ``timeout`` seconds.
            WorkerDied: a worker's process ended.
            Exception: what a watched command raised.
        """
        try:
            reply = self._backend.receive(timeout)
        except WorkerDied as err:
            lost = self._lose(err.worker, err)
            if self.can_continue and err.worker is not None:
                return None
            raise lost from None
        self.last_reply[reply.worker] = time.monotonic()
        if isinstance(reply, m.Begun):
            self._occupied[reply.worker] = reply.ticket
            return None
        if self._occupied.get(reply.worker) == reply.ticket:
            del self._occupied[reply.worker]
        if reply.ticket == 0 or reply.ticket in self._setting_up:
            self._bring_up(reply)
            return None
        ticket = self._open.pop(reply.ticket, None)
        if ticket is not None:
            self._arrivals += 1
            ticket.reply, ticket.arrived = reply, self._arrivals
            if ticket.watched and isinstance(reply, m.Failed):
                raise reply.error
        return ticket

    def _bring_up(self, reply: m.Reply) -> None:
        """Admit a replacement after its start; if anything about it fails, it is lost again."""
        worker = reply.worker
        self._open.pop(reply.ticket, None)
        self._setting_up.discard(reply.ticket)
        failure: BaseException | None = None
        if isinstance(reply, m.Failed):
            failure = reply.error
        elif isinstance(reply, m.Ready) and worker in self.joining:
            failure = self._welcome(reply)
        if failure is not None:
            self._lose(worker, _failed(worker, failure))
        self.raise_if_failed()

    def _welcome(self, reply: m.Ready) -> Exception | None:
        """Bring a replacement up to date; return the reason if that fails."""
        worker = reply.worker
        assert self.replacing is not None
        try:
            commands = self.replacing.welcome(reply)
            self.joining.discard(worker)
            del self._lost[worker]
            for command in commands:
                self._setting_up.add(self.post(worker, command).number)
        except (WorkerDied, CollectorTimeout):  # it is noted already
            return None
        except Exception as err:
            return err
        warn(f"worker {worker} was replaced and takes part again")
        return None

    def receive_available(self) -> None:
        """Receive the available replies, without waiting; note deaths for `raise_if_failed`."""
        while True:
            try:
                self.receive_one(0.0)
            except CollectorTimeout:
                return
            except WorkerDied as err:
                if err.worker is None:
                    raise

    def receive_and_check(self) -> None:
        """Receive the available replies, without waiting.

        Raises:
            WorkerDied: a worker's process ended.
        """
        self.raise_if_failed()
        self.receive_available()
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise the error of the first lost worker, if collection cannot continue."""
        if not self.can_continue:
            raise self.lost[0]

    def wait_for_reply(self, ticket: Ticket, timeout: float | None) -> Any:
        """Wait for a control command's reply and return its value.

        Time counts once the worker has turned to it: rollouts it may be in the middle of are not
        held against the command.

        Raises:
            Exception: what the worker's code raised.
            CollectorTimeout: no reply within ``timeout`` seconds.
        """
        worker, task = ticket.worker, f"answer {type(ticket.command).__name__}"
        while ticket.reply is None:
            if ticket.lost is not None:
                raise ticket.lost
            busy = worker not in self._occupied and self._may_collect(worker)
            since = max(ticket.posted, self.last_reply[worker])
            self.receive_in_time(Deadline(None if busy else timeout, since), [worker], task)
        if isinstance(ticket.reply, m.Failed):
            raise ticket.reply.error
        if isinstance(ticket.reply, m.Done):
            return ticket.reply.value
        raise GleanError(f"worker {worker} answered {ticket.command} with {ticket.reply!r}")

    def run_on_workers(
        self, commands: Mapping[int, m.Command], timeout: float | None
    ) -> tuple[dict[int, Ticket], dict[int, Any], list[Exception]]:
        """Carry out one command per worker; return tickets and values by worker, and the errors.

        Where losses are tolerated, workers that are lost have no value.

        Raises:
            WorkerDied: a worker's process had ended before, and losses are not tolerated.
            CollectorTimeout: likewise of one that missed a deadline.
        """
        tickets: dict[int, Ticket] = {}
        for worker, command in commands.items():
            try:
                tickets[worker] = self.post(worker, command)
            except (WorkerDied, CollectorTimeout) as err:
                if not self.can_continue:
                    raise
                _let_frames_go(err)
        values: dict[int, Any] = {}
        errors: list[Exception] = []
        for worker, ticket in tickets.items():
            try:
                values[worker] = self.wait_for_reply(ticket, timeout)
            except Exception as err:
                if ticket.lost is None or not self.can_continue:
                    errors.append(err)
                else:
                    _let_frames_go(err)
        return tickets, values, errors

    def _may_collect(self, worker: int) -> bool:
        return any(
            other.worker == worker and isinstance(other.command, m.Collect)
            for other in self._open.values()
        )

    def receive_in_time(self, deadline: Deadline, late: list[int], task: str) -> None:
        """Wait for one reply like `receive_one`; at the deadline, give up the ``late`` workers.

        Without a deadline, the wait ends now and then without a reply, and the user is warned of
        silent workers.

        Raises:
            CollectorTimeout: ``late`` workers did not do their ``task`` in time, and collection
                cannot continue without them.
        """
        waits = deadline.seconds is None
        left = _NOTICE_S / _LOOKS if waits else deadline.left
        if left:
            try:
                self.receive_one(left)
            except CollectorTimeout:
                left = 0.0
        if waits:
            self.warn_silent()
        elif not left:
            error = self.give_up(late, task, deadline)
            if not self.can_continue:
                raise error

    def warn_silent(self) -> None:
        """Warn of workers that owe a reply for a minute, even if other workers have replied.

        Raises:
            WorkerDied: a worker's process has ended, and collection cannot go on.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _NOTICE_S / _LOOKS
        if self._silent(now):
            self.receive_available()  # their replies may have come while the learner was busy
            self.raise_if_failed()
        silent = self._silent(now)
        if silent:
            self._warned.update(dict.fromkeys(silent, now))
            warn(
                f"still waiting for workers {silent}, which live but have not replied for "
                f"{_NOTICE_S:.0f} s; timeout= bounds how long a rollout may take"
            )

    def _silent(self, now: float) -> list[int]:
        """Return the workers that owe a reply for long, unless a warning has just named them."""
        since = dict.fromkeys(self.joining, 0.0)
        for ticket in self._open.values():
            since[ticket.worker] = min(since.get(ticket.worker, ticket.posted), ticket.posted)
        return sorted(
            worker
            for worker, posted in since.items()
            if now - max(posted, self.last_reply[worker], self._warned.get(worker, 0.0))
            >= _NOTICE_S
        )

    def forget(self, ticket: Ticket) -> None:
        """Ignore the ticket's reply on arrival."""
        self._open.pop(ticket.number, None)
        self._setting_up.discard(ticket.number)

    def ended(self, worker: int | None) -> None:
        """Note that ``worker`` ended by command, so that it was not lost."""
        if worker is not None and self._lost.pop(worker, None) is not None:
            self.losses.pop()

    def give_up(self, workers: list[int], task: str, deadline: Deadline) -> CollectorTimeout:
        """Count ``workers``, which did not do their ``task``, as lost; return the error."""
        error = CollectorTimeout(f"workers {workers} did not {task} within {deadline.seconds} s")
        for worker in workers:
            self._lose(worker, error)
        return error

    def _lose(self, worker: int | None, error: Any) -> Any:
        if worker is not None:
            new = worker not in self._lost or worker in self.joining
            if new:
                self._lost[worker] = error
                self.losses.append((time.time(), worker, str(error)))
                self.last_reply[worker] = (
                    time.monotonic()
                )  # from then on a replacement is waited for
            self.joining.discard(worker)
            self._occupied.pop(worker, None)
            for ticket in [t for t in self._open.values() if t.worker == worker]:
                ticket.lost = error
                self.forget(ticket)
            more = self.replacing.replace(worker) if new and self.replacing is not None else ""
            if new and self.can_continue:
                _let_frames_go(error)
                warn(f"collection continues without it{more}: {error}")
        return error


def _failed(worker: int, why: object) -> WorkerDied:
    error = WorkerDied(f"the replacement of worker {worker} failed: {why}")
    error.worker = worker
    return error


def _let_frames_go(error: BaseException) -> None:
    """Have an error that is kept but not raised keep no frames, and with them nothing alive."""
    error.__traceback__ = error.__context__ = None
