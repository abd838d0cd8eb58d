"""One session with the workers of a backend: their start, commands, replies, losses and end."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeAlias

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import WORKER_NAME, ClosedError, CollectorTimeout, GleanError, WorkerDied
from gleanrl.core.layout import Layout
from gleanrl.core.options import warn
from gleanrl.core.platforms import naming_limits
from gleanrl.core.protocols import Backend, SourceFactory
from gleanrl.core.window import Window
from gleanrl.transport.interrupts import Deferred, FairLock, Turn

_EPISODES = 1 << 32
"""Trajectories that each environment of a worker may begin in one of the worker's lives."""
_NOTICE_S = 60.0
"""Seconds without a reply of a worker after which the user is warned of it."""
_LOOKS = 12
"""How often replies are checked meanwhile."""
_LOSSES = 100
"""Losses of workers that are remembered."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that workers have to end by themselves after an error."""
MakeBackend: TypeAlias = Callable[[Callable[[m.WindowRef], Window]], Backend]


@dataclass(eq=False, slots=True)
class Ticket:
    """One command on its way, and its reply once that has come."""

    worker: int
    number: int
    command: m.Command
    posted: float
    watched: bool = False
    """Whether no caller waits for the reply, so that an error is for the next one."""
    setting_up: bool = False
    """Whether the command brings a replacement up to date."""
    begun: bool = False
    """Whether the worker has said that it turns to the command."""
    reply: m.Reply | None = None
    arrived: int = 0
    """The reply's place among all replies."""
    lost: WorkerDied | CollectorTimeout | None = None
    """The reason for a missing reply, if the worker was lost before."""
    over: bool = True
    """Whether a worker that was lost certainly writes into the command's window no more."""

    @property
    def due(self) -> bool:
        """Whether the reply can still come."""
        return self.reply is None and self.lost is None

    @property
    def error(self) -> BaseException | None:
        """What the worker raised, or the reason for a missing reply."""
        return self.reply.error if isinstance(self.reply, m.Failed) else copy(self.lost)


class Session:
    """Starts the workers of a backend, sends them commands and gives every reply to its ticket.

    Tickets count from 1; ticket 0 is a worker's start. Threads take turns. Without `tolerant`, the
    loss of a worker ends everything but the end of the others.
    """

    closed = False
    """Whether `close` was called."""
    failure_raised = False
    """Whether a call has raised `failure`."""
    failure: BaseException | None = None
    """The error that ended collection in the background; the next call raises it."""
    awaited = False
    """Whether a caller waits for workers; otherwise they may collect ahead."""
    tolerant = False
    """Whether the others continue when workers are lost."""
    needs_all = False
    """Whether nothing continues without a worker that is not being replaced."""
    rollout_s: float | None = None
    """Seconds that a rollout may take, also while a command waits for its end."""
    replacing: Any = None
    """`Replacements` of lost workers, if the user wants these."""
    tells = True
    """Whether losses are warned of and counted here."""
    warns = True
    """Whether the user is warned here, and not by a collector around this one."""
    _busy = False
    _close_next: Callable[[], None] | None = None
    """Ends the session at the end of the rollout that this thread makes."""
    _next_look = 0.0

    def __init__(
        self,
        make_backend: MakeBackend,
        factories: Sequence[SourceFactory],
        *,
        start_timeout: float | None = 120.0,
    ) -> None:
        """Start a worker per factory, all in ``start_timeout`` seconds, and read their layouts."""
        self.workers = count = len(factories)
        self.joining = set(range(count))
        """Workers that are expected to come up: at first all, later replacements."""
        self.newest_losses: deque[tuple[float, str, str]] = deque(maxlen=_LOSSES)
        """Losses: time (seconds since the epoch), name of the worker, and error."""
        self.mishaps: deque[m.Mishap] = deque(maxlen=_LOSSES)
        """The newest losses and replacements, for a collector around this one."""
        self.standing: dict[str, m.Command] = {}
        """Commands, by what they set, that hold for the replacement of a worker as well."""
        self.layouts: list[Layout | None] = [None] * count
        """Per worker, the layout of its steps."""
        self.processes = [(0, "")] * count
        """Per worker its process id and host."""
        self.lives = [0] * count
        """Per worker how often it was lost before: its life now; if it is lost, its next one."""
        self.last_reply = [time.monotonic()] * count
        """The time of each worker's last reply, or of the last warning that it is silent."""
        self._owner = os.getpid()
        self._turns = FairLock()
        self._open: dict[int, Ticket] = {}
        self._number = self._arrivals = 0
        self.lost: dict[int, WorkerDied | CollectorTimeout] = {}
        """The errors of lost workers, first lost first; copies of them are raised."""
        self.changes = 0
        """Commands that failed, and workers that were lost or replaced, counted at each notice."""
        self._failures: list[BaseException] = []
        """The errors of commands whose replies no caller waits for."""
        self._ending: dict[int, Ticket] = {}
        """The tickets of the commands to end."""
        # Bound to a proxy, as a cycle would keep memory and descriptors.
        open_window = MethodType(type(self)._open_window, weakref.proxy(self))
        with naming_limits():
            self.backend = make_backend(open_window)
        try:
            self._start(factories, Deadline(start_timeout))
        except BaseException:
            self.close(5.0)
            raise

    def _start(self, factories: Sequence[SourceFactory], deadline: Deadline) -> None:
        # In this process, what the user's code raises is raised unchanged.
        with nullcontext() if self.backend.inline else naming_limits():
            self.backend.start(factories)
        self._await_ready(deadline)
        self.envs = [
            int(self.request(worker, m.Get("num_envs"))) if layout is None else layout.all_envs
            for worker, layout in enumerate(self.layouts)
        ]
        """Per worker, its environments."""
        self.num_envs = sum(self.envs)
        """Environments over all workers."""
        self.request_each({worker: self.place(worker) for worker in range(self.workers)})

    def _open_window(self, reference: m.WindowRef) -> Window:
        """Map the window of a rollout, in a session that collects."""
        raise NotImplementedError

    def _await_ready(self, deadline: Deadline) -> None:
        try:
            while self.joining:
                if not self.receive_one(deadline.left):
                    break
                self.raise_if_failed()
        finally:  # a worker that is still building cannot be told to end
            self.give_up(sorted(self.joining), "build their environments", deadline)
        self.raise_if_failed()

    def place(self, worker: int) -> m.Place:
        """Return the command that numbers the environments of ``worker``, in its current life."""
        base, stride = sum(self.envs[:worker]), self.num_envs
        return m.Place(base + self.lives[worker] * _EPISODES * stride, stride)

    # -- turns -----------------------------------------------------------------------------------

    def turn(self, timeout: float | None) -> Turn:
        """Keep other threads out during a ``with`` block; wait for them first.

        Raises:
            ClosedError: this process is a fork of the one that started the workers.
            CollectorTimeout: another thread did not finish within ``timeout`` seconds.
        """
        if self._owner != os.getpid() and self._foreign:
            raise ClosedError(
                f"the collector's workers belong to process {self._owner}, and this is process "
                f"{os.getpid()}, forked from it; make a collector of its own here"
            )
        return Turn(self._turns, timeout)

    @property
    def _foreign(self) -> bool:
        """Whether this process is a forked child whose workers belong to its parent."""
        return self._owner != os.getpid() and not self.backend.inline

    @contextmanager
    def _alone(self, timeout: float | None = None) -> Iterator[None]:
        """Keep other threads out, and Ctrl-C until workers are waited for; it ends the session.

        Refuses calls that an environment or a policy makes to the collector that runs it.
        """
        with nullcontext() if self.backend.inline else Deferred(), self.turn(timeout):
            if self._busy:
                raise GleanError(
                    "the collector was used from inside its own rollout (by an environment or a "
                    "policy); do that between batches"
                )
            self._busy = True
            try:
                yield
            except Exception:
                raise
            except BaseException:  # Ctrl-C: nobody knows any more what workers are in the middle of
                self.close(CLOSE_TIMEOUT_S)
                raise
            finally:
                self._busy = False
                if self._close_next is not None:
                    self._close_next()

    def _check_usable(self, advice: str = "") -> None:
        if self.failure is not None:
            self.raise_failure()
        if self.closed:
            raise ClosedError(f"the collector was shut down{advice}")

    def raise_failure(self) -> None:
        """Raise the error that ended collection in the background, if one did."""
        if self.failure is not None:
            self.failure_raised = True
            raise self.failure

    # -- commands, in turn -----------------------------------------------------------------------

    def request(self, worker: int, command: m.Command, timeout: float | None = 60.0) -> Any:
        """Carry out a control command on one worker and return its value; see `request_each`."""
        return self.request_each({worker: command}, timeout)[worker]

    def request_all(self, command: m.Command, timeout: float | None = 60.0) -> list[Any]:
        """Carry out a control command on every worker at once; values in worker order.

        Where losses are tolerated, that of a lost worker is ``None``.
        """
        values = self.request_each(dict.fromkeys(range(self.workers), command), timeout)
        return [values.get(worker) for worker in range(self.workers)]

    def ask(self, command: m.Command) -> Any:
        """Carry out a control command on the first worker that was not lost; return its value."""
        for worker in self.alive or [0]:
            values = self.request_each({worker: command})
            if values:
                return values[worker]
        raise self.first_loss

    def request_each(
        self, commands: Mapping[int, m.Command], timeout: float | None = 60.0
    ) -> dict[int, Any]:
        """Carry out one command per worker, all at once; return their values by worker.

        Where losses are tolerated, workers that are lost have none. ``timeout`` is what each may
        take once its worker is free.

        Raises:
            ClosedError: after `close`, except for reading.
            Exception: the exception of the first worker to fail, after all have replied.
        """
        with self._alone(timeout):
            return self._values(self._carry_out(commands, timeout))

    def order_each(self, commands: Mapping[int, m.Command]) -> dict[int, Ticket]:
        """Send one command per worker like `request_each`; `values_of` has to follow."""
        with self._alone():
            return self._send_each(commands)

    def values_of(self, tickets: Mapping[int, Ticket], timeout: float | None) -> dict[int, Any]:
        """Wait for commands that were sent by `order_each`, and return their values."""
        with self._alone(timeout):
            self._settle(tickets, timeout)
            return self._values(tickets)

    def _carry_out(
        self, commands: Mapping[int, m.Command], timeout: float | None
    ) -> dict[int, Ticket]:
        """Carry out one command per worker; return the tickets, none of which is due any more."""
        self._settle(tickets := self._send_each(commands), timeout)
        return tickets

    def _send_each(self, commands: Mapping[int, m.Command]) -> dict[int, Ticket]:
        if not (self.closed and all(isinstance(c, m.Reading) for c in commands.values())):
            self._check_usable()
        tickets: dict[int, Ticket] = {}
        for worker, command in commands.items():
            tickets[worker] = ticket = self.send(worker, command)
            if ticket.lost is not None and not self.can_continue:
                raise copy(ticket.lost)
        return tickets

    def _settle(self, tickets: Mapping[int, Ticket], timeout: float | None) -> None:
        """Wait until none of ``tickets`` is due."""
        for worker, ticket in tickets.items():
            while ticket.due:
                # A rollout that it may be in the middle of is not held against the command.
                limit = self.rollout_s if self._in_rollout(worker) else timeout
                since = max(ticket.posted, self.last_reply[worker])
                task = f"answer {type(ticket.command).__name__}"
                self.receive_in_time(Deadline(limit, since), [ticket], task)

    def _values(self, tickets: Mapping[int, Ticket]) -> dict[int, Any]:
        """Return the values that came; raise the first error, unless it is a tolerated loss."""
        for ticket in tickets.values():
            if ticket.error is not None and not (ticket.lost and self.can_continue):
                raise ticket.error
        return {w: t.reply.value for w, t in tickets.items() if isinstance(t.reply, m.Done)}

    def _in_rollout(self, worker: int) -> bool:
        """Tell whether ``worker`` may be in the middle of a rollout."""
        tickets = [ticket for ticket in self._open.values() if ticket.worker == worker]
        collects = any(isinstance(ticket.command, m.Collect) for ticket in tickets)
        return collects and not any(ticket.begun for ticket in tickets)

    def post(self, commands: Mapping[int, m.Command]) -> None:
        """Send one command per worker without waiting; an error is raised by a later call."""
        with self._alone():
            self._check_usable()
            for worker, command in commands.items():
                self.send(worker, command).watched = True
            self.raise_if_failed()

    def check(self) -> None:
        """Raise the error of a worker, if one is known without waiting."""
        with self._alone():
            self._check_usable()
            self.receive_available()
            self.raise_if_failed()

    def check_alive(self) -> None:
        """Do as `check`; but receive nothing while no worker has ended."""
        self._check_usable()
        if not (self.can_continue and self.backend.no_end_noticed()):
            self.check()

    def told_by(self, other: Session) -> None:
        """Leave it to ``other``, with the processes of these workers, to tell of losses."""
        self.newest_losses, self.mishaps, self.tells = other.newest_losses, other.mishaps, False

    def wait(self, seconds: float) -> None:
        """Wait for commands under way, until a worker replies or for ``seconds``."""
        self.awaited = True
        try:
            self.backend.wait(seconds)
        finally:
            self.awaited = False

    # -- sending and receiving -------------------------------------------------------------------

    def send(self, worker: int, command: m.Command) -> Ticket:
        """Send ``command``; never waits. The ticket of a lost worker is not due."""
        self._number += 1
        ticket = Ticket(worker, self._number, command, time.monotonic())
        if worker in self.lost:
            ticket.lost = self.lost[worker]
            self.changes += 1
            return ticket
        self._open[ticket.number] = ticket
        try:
            self.backend.send(worker, ticket.number, command)
        except WorkerDied as err:
            self._lose(worker, err)
        except BaseException:  # it could not be sent: nothing will ever answer
            del self._open[ticket.number]
            raise
        return ticket

    def receive_one(self, timeout: float | None) -> bool:
        """Receive a reply for its ticket, or a loss; return ``False`` if none came in time."""
        try:
            reply = self.backend.receive(timeout)
        except CollectorTimeout:
            return False
        except WorkerDied as err:
            if err.worker is None:
                raise
            self._lose(err.worker, err)
            return True
        self.last_reply[reply.worker] = time.monotonic()
        if isinstance(reply, m.Begun):
            if reply.ticket in self._open:
                self._open[reply.ticket].begun = True
            return True
        ticket = self._open.pop(reply.ticket, None)
        if reply.ticket == 0 or (ticket is not None and ticket.setting_up):
            self._bring_up(reply)
        elif ticket is not None:
            self._arrivals += 1
            ticket.reply, ticket.arrived = reply, self._arrivals
            if isinstance(reply, m.Failed):
                self._note_failure(ticket, reply.error)
        return True

    def _note_failure(self, ticket: Ticket, error: BaseException) -> None:
        """Note that a command failed, or that its worker has lost its environments."""
        of_envs = self.tolerant and self.backend.inline  # which are in other processes
        if of_envs and isinstance(error, WorkerDied | CollectorTimeout):
            ticket.reply, self._open[ticket.number] = None, ticket
            self._lose(ticket.worker, error)
            return
        self.changes += 1
        if ticket.watched:
            self._failures.append(error)

    def receive_available(self) -> None:
        """Receive the available replies, without waiting."""
        while self.receive_one(0.0):
            pass

    def receive_in_time(self, deadline: Deadline, tickets: Iterable[Ticket], task: str) -> None:
        """Wait for one reply like `receive_one`; at the deadline, give up workers that owe one.

        Without a deadline, the wait ends now and then without a reply, and the user is warned of
        silent workers.
        """
        waits = deadline.seconds is None
        left = _NOTICE_S / _LOOKS if waits else deadline.left
        received = left > 0 and self.receive_one(left)
        if waits:
            self.warn_silent()
        elif not received:
            self.give_up([ticket.worker for ticket in tickets if ticket.due], task, deadline)

    @property
    def can_continue(self) -> bool:
        """Whether work can continue: nothing has failed, but for losses that are tolerated."""
        if self._failures or not self.lost:
            return not self._failures
        if self.needs_all:
            return self.joining.issuperset(self.lost)
        return self.tolerant and (len(self.lost) < self.workers or bool(self.joining))

    def take_failures(self) -> list[BaseException]:
        """Return the errors of commands whose replies no caller waits for, once."""
        failures, self._failures = self._failures, []
        return failures

    def raise_if_failed(self) -> None:
        """Raise the first error of `take_failures`, or of a lost worker if work cannot continue."""
        for error in self.take_failures():
            raise error
        if not self.can_continue:
            raise self.first_loss

    def warn_silent(self) -> None:
        """Warn of workers that owe a reply for a minute, even if other workers have replied."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _NOTICE_S / _LOOKS
        if self._silent(now):
            self.receive_available()  # their replies may have come while the learner was busy
        silent = self._silent(now)
        for worker in silent:
            self.last_reply[worker] = now
        if silent:
            warn(
                f"still waiting for {self._names(silent)}, which live but have not replied for "
                f"{_NOTICE_S:.0f} s; timeout= bounds how long a rollout may take"
            )

    def _silent(self, now: float) -> list[int]:
        """Return the workers that owe a reply for long, unless a warning has just named them."""
        owing = {t.worker for t in self._open.values() if now - t.posted >= _NOTICE_S}
        last = self.last_reply
        return sorted(w for w in owing | self.joining if now - last[w] >= _NOTICE_S)

    # -- workers that come up or are lost --------------------------------------------------------

    @property
    def alive(self) -> list[int]:
        """Workers that were not lost."""
        return [worker for worker in range(self.workers) if worker not in self.lost]

    @property
    def first_loss(self) -> WorkerDied | CollectorTimeout:
        """The error of the worker that was lost first, to be raised."""
        return copy(next(iter(self.lost.values())))

    def name_of(self, worker: int) -> str:
        """Return the name of ``worker`` in messages."""
        return self.backend.worker_name.format(worker)

    def _names(self, workers: list[int]) -> str:
        name = self.backend.worker_name
        return f"workers {workers}" if name == WORKER_NAME else name

    @property
    def losses(self) -> int:
        """The number of losses of workers."""
        return sum(self.lives) + len(self.lost)

    def _bring_up(self, reply: m.Reply) -> None:
        """Note that a worker is up, or bring a replacement up to date; it is lost if that fails."""
        worker, first = reply.worker, reply.ticket == 0 and reply.worker not in self.lost
        failure: BaseException | None = None
        if isinstance(reply, m.Failed):
            failure = reply.error
        elif isinstance(reply, m.Ready) and worker in self.joining:
            failure = self._admit(reply)
        if failure is not None and first:
            self._failures.append(failure)
        elif failure is not None:
            text = f"the replacement of {self.name_of(worker)} failed: {failure}"
            self._lose(worker, WorkerDied(text, worker=worker))

    def is_up(self, worker: int) -> bool:
        """Tell whether ``worker`` lives, and is up to date if it is a replacement."""
        setting_up = any(t.setting_up for t in self._open.values() if t.worker == worker)
        return not (worker in self.joining or worker in self.lost or setting_up)

    def await_any(self, deadline: Deadline) -> bool:
        """Wait until a worker is up; return ``False`` if none is, or comes up in time."""
        while not (up := any(map(self.is_up, range(self.workers)))):
            if not ((self.joining or self.alive) and self.receive_one(deadline.left)):
                break
        return up

    def _admit(self, reply: m.Ready) -> Exception | None:
        """Count a worker among those that are up; return the reason if that is not possible."""
        worker, commands = reply.worker, list[m.Command]()
        if worker not in self.lost:
            self.layouts[worker] = reply.layout
        elif self.replacing is not None:
            try:
                commands = self.replacing.welcome(reply)
            except Exception as err:
                return err
            self.changes += 1
            if self.tells:
                self.note("relaunches", f"{self.name_of(worker)} was replaced and takes part again")
        self.processes[worker] = reply.process
        self.joining.discard(worker)
        self.lost.pop(worker, None)
        for command in commands:
            self.send(worker, command).setting_up = True
        return None

    def give_up(self, workers: list[int], task: str, deadline: Deadline) -> None:
        """Count ``workers``, which did not do their ``task``, as lost."""
        late = self._names(workers)
        error = CollectorTimeout(f"{late} did not {task} within {deadline.seconds:.4g} s")
        for worker in workers:
            self._lose(worker, error)

    def _lose(self, worker: int, error: WorkerDied | CollectorTimeout) -> None:
        # What is kept holds no frames, which would keep all alive: only copies of it are raised.
        error = copy(error)
        close = self._ending.get(worker)
        told_to_end = close is not None and close.reply is not None
        new = not told_to_end and (worker not in self.lost or worker in self.joining)
        self.joining.discard(worker)
        over = not new or self.backend.end(worker)
        for ticket in [t for t in self._open.values() if t.worker == worker]:
            ticket.lost, ticket.over = error, over
            del self._open[ticket.number]
        if not new:
            return
        if isinstance(error, WorkerDied) and self.backend.worker_name != WORKER_NAME:
            error.worker = None
        self.lost[worker] = error
        self.changes += 1
        if self.tells:
            self.newest_losses.append((time.time(), self.name_of(worker), str(error)))
        self.last_reply[worker] = time.monotonic()  # from then on a replacement is waited for
        more = "" if self.replacing is None else self.replacing.replace(worker)
        if not self.can_continue:
            error.args = (f"{error}{more}",)
        elif self.tells:
            goes_on = "waits" if self.needs_all else "continues without it"
            self.note("workers_lost", f"collection {goes_on}{more}: {error}")

    def note(self, counter: str, text: str) -> None:
        """Keep a survived failure for a collector around this one; warn of it unless that does."""
        self.mishaps.append((counter, text))
        if self.warns:
            warn(text)

    # -- the end ---------------------------------------------------------------------------------

    def close(self, timeout: float, close_env: bool = True, raise_on_error: bool = False) -> None:
        """End all workers. Idempotent. Delivered batches stay valid.

        In a forked child, which has none of the workers' processes, they are only let go of. If
        this thread is in the middle of a rollout of its own, that ends after its step, and then all
        of it. ``close_env=False`` leaves environments open; ``raise_on_error`` raises the exception
        of an environment's ``close``.
        """
        if self.closed:
            return
        if self._foreign:
            self.closed = True
            self.backend.stop(0.0)
            return
        self.backend.stop_byte[0] = 1  # a rollout that is under way ends after its step
        with self.turn(timeout):
            if self._busy and self.backend.inline:  # a signal came, or an environment asks for it
                self._close_next = partial(self._close, timeout, close_env, raise_on_error)
            elif not self.closed:  # by another thread, meanwhile
                self._close(timeout, close_env, raise_on_error)

    def _close(self, timeout: float, close_env: bool, raise_on_error: bool) -> None:
        self._close_next = self.replacing = None
        self.joining.clear()
        # A worker that ends while others are waited for is none that the others continue without.
        tolerant, self.tolerant = self.tolerant, False
        deadline, tickets = Deadline(timeout), self._ending.values()
        errors: list[BaseException] = []
        try:
            for worker in self.alive if close_env else ():
                self._ending[worker] = self.send(worker, m.Close())
            while any(ticket.due for ticket in tickets):
                self.receive_in_time(deadline, tickets, "end")
        except Exception as err:
            errors.append(err)
        errors += [ticket.error for ticket in tickets if ticket.error is not None]
        self.closed = True
        self.backend.stop(max(0.5, deadline.left))
        if tolerant:  # now as before
            errors = [err for err in errors if not isinstance(err, WorkerDied)]
        try:
            if errors and raise_on_error:
                raise errors[0]
        finally:
            errors.clear()  # they refer to this frame
