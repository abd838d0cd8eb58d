"""Workers, memory and a gather together: each call collects one batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ClosedError, CollectorTimeout, GleanError, WorkerDied
from gleanrl.core.layout import Layout
from gleanrl.core.options import FrameBudget
from gleanrl.core.platforms import naming_limits
from gleanrl.core.protocols import Backend, SourceFactory
from gleanrl.core.window import Window
from gleanrl.engine.batches import BatchOptions, BatchPlan
from gleanrl.engine.budget import Budget, Tally
from gleanrl.engine.dispatch import Dispatcher, Ticket
from gleanrl.engine.gather import AsyncGather, Gather, Rollouts, SyncGather
from gleanrl.transport.interrupts import Deferred, FairLock, Turn

_OF_WORKERS = (
    "backend",
    "batches",
    "dispatcher",
    "envs",
    "gather",
    "layouts",
    "num_envs",
    "processes",
    "sizes",
    "steps",
)
"""Attributes of an engine that are about its workers."""
_EPISODES = 1 << 32
"""Trajectories that each environment of a worker may begin in one of the worker's lives."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that workers have to end by themselves after an error."""
MakeBackend = Callable[[Callable[[m.WindowRef], Window]], Backend]


class Engine:
    """Runs sources behind a backend and turns their rollouts into batches."""

    def __init__(
        self,
        make_backend: MakeBackend,
        factories: Sequence[SourceFactory],
        *,
        start_timeout: float = 120.0,
    ) -> None:
        """Start the workers and read the layout of their steps.

        Args:
            make_backend: Builds the backend from a function that maps windows.
            factories: One per worker.
            start_timeout: Seconds all workers together may take to come up.
        """
        self.workers = len(factories)
        self.closed = False
        """Whether `close` was called."""
        self._owner = os.getpid()
        self._turns = FairLock()
        self._busy = False
        self._close_next: Callable[[], None] | None = None
        """Closes the engine at the end of the rollout that this thread makes."""
        self.set_aside: Engine | None = None
        """The engine with the workers from before `exchange`, which closes with this one."""
        self.awaited = False
        """Whether a caller waits for a batch; otherwise workers may collect ahead."""
        self.failure: BaseException | None = None
        """The error that ended collection in the background; the next call raises it."""
        self.discarded = 0
        """Frames that were stepped but not delivered."""
        self.tallies = [Tally() for _ in factories]
        """Per worker, its delivered rollouts and frames."""
        self.processes = [(0, "")] * self.workers
        """Per worker its process id and host."""
        self.lives = [0] * self.workers
        """Per worker how often it was lost before: its life now; if it is lost, its next one."""
        self.standing: dict[str, m.Command] = {}
        """Commands, by what they set, that hold for the replacement of a worker as well."""
        with naming_limits():
            self.backend = make_backend(self._open_window)
        self.dispatcher = Dispatcher(self.backend, self.workers)
        try:
            # In this process, what the user's code raises is raised unchanged.
            with nullcontext() if self.backend.inline else naming_limits():
                self.backend.start(factories)
            self.layouts = self._await_ready(start_timeout)
            self.envs = [
                int(self.request(worker, m.Get("num_envs"))) if layout is None else layout.all_envs
                for worker, layout in enumerate(self.layouts)
            ]
            self.num_envs = sum(self.envs)
            """Environments over all workers."""
            self.request_each({worker: self.place(worker) for worker in range(self.workers)})
        except BaseException:
            self.close(5.0)
            raise

    def _await_ready(self, timeout: float) -> list[Layout | None]:
        layouts: dict[int, Layout | None] = {}
        deadline = Deadline(timeout)
        try:
            self._hear_ready(layouts, deadline)
        except BaseException as err:
            # A worker that is still building cannot be asked to end.
            missing = sorted(set(range(self.workers)) - set(layouts))
            late = self.dispatcher.give_up(missing, "build their environments", deadline)
            if type(err) is CollectorTimeout:
                raise late from None
            raise
        return [layouts[worker] for worker in range(self.workers)]

    def _hear_ready(self, layouts: dict[int, Layout | None], deadline: Deadline) -> None:
        while len(layouts) < self.workers:
            reply = self.backend.receive(deadline.left)
            if isinstance(reply, m.Failed):
                raise reply.error
            if isinstance(reply, m.Ready):
                layouts[reply.worker] = reply.layout
                self.processes[reply.worker] = reply.process

    def place(self, worker: int) -> m.Place:
        """Return the command that numbers the environments of ``worker``, in its current life."""
        base, stride = sum(self.envs[:worker]), self.num_envs
        return m.Place(base + self.lives[worker] * _EPISODES * stride, stride)

    def plan(
        self,
        limits: FrameBudget,
        frames: Sequence[int],
        options: BatchOptions,
        *,
        enough: int | None = None,
        stopped: Callable[[], bool] = bool,
    ) -> Budget:
        """Decide the layout of batches and reserve their memory; call once, first.

        Args:
            limits: What was asked for.
            frames: Per worker, the frames of its rollouts; rounded up to whole steps.
            options: How batches are handed out.
            enough: Workers that have to finish; then the rollouts of the others are stopped.
            stopped: Whether rollouts are to be stopped from outside.

        Returns:
            The budget of batches of the size that they will have.

        Raises:
            ConfigError: rollouts that cannot be put together so, or more memory than there is.
        """
        layouts = self.layouts
        rows = [
            envs if layout is None else layout.num_envs
            for layout, envs in zip(layouts, self.envs, strict=True)
        ]
        self.steps = tuple(
            -(-asked // count) if layout is None or layout.steps is None else layout.steps
            for asked, layout, count in zip(frames, layouts, rows, strict=True)
        )
        """Per worker, the steps of its rollouts."""
        self.sizes = [steps * count for steps, count in zip(self.steps, rows, strict=True)]
        """Per worker, the frames of its rollouts."""
        size = max(self.sizes) if options.single else sum(self.sizes)
        budget = Budget(limits.rounded(size, max(rows) if options.single else self.num_envs))
        self.batches = plan = BatchPlan(self.backend.memory, layouts, self.steps, options)
        if options.single:
            self.gather: Gather = AsyncGather(self.dispatcher, plan.worker_slots, self.sizes)
        else:
            self.gather = SyncGather(
                self.dispatcher,
                plan.common_slots(),
                self.sizes,
                self.backend.stop_byte,
                enough=enough,
                stopped=stopped,
            )
        return budget

    def exchange(self, other: Engine) -> None:
        """Exchange workers with ``other``, which was planned for the same batches.

        Turns and counters stay with each engine. Neither may be collecting.
        """
        for name in _OF_WORKERS:
            ours, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, ours)
        self.set_aside = None if self.set_aside is other else other

    def _open_window(self, reference: m.WindowRef) -> Window:
        if not reference.blocks:  # a source without fixed layout writes no window
            return Window({}, reference.envs, reference.steps)
        return self.batches.arenas[reference.arena].window(reference)

    def collect(
        self, budget: Budget, timeout: float | None = None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Collect one batch.

        Args:
            budget: What is still needed; counts along.
            timeout: Seconds a rollout may take.
            feed: Whether workers are given more to do.

        Returns:
            The batch, whose memory is the caller's until its last tensor is gone (``None`` if
            workers kept it), and the reports of the workers that made it.

        Raises:
            ClosedError: after `close`.
            CollectorTimeout: a rollout took longer than ``timeout`` seconds.
        """
        with self._alone():
            self._check_usable("; make a new one to collect more")
            self.awaited = True
            try:
                batch, rollouts = self.gather.batch(budget, timeout, feed)
            except Exception as err:
                if self.closed:  # by a signal's handler, meanwhile
                    raise ClosedError("the collector was shut down while it collected") from err
                raise
            finally:
                self.awaited = False
            for worker, report in rollouts.items():
                self.discarded += report.discarded
                self.tallies[worker].add(report)
            return batch, rollouts

    def wait(self, seconds: float) -> None:
        """Wait for commands under way, until a worker replies or for ``seconds``."""
        self.awaited = True
        try:
            self.backend.wait(seconds)
        finally:
            self.awaited = False

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

    @contextmanager
    def _alone(self, timeout: float | None = None) -> Iterator[None]:
        """Keep other threads out, and Ctrl-C until workers are waited for; it closes the engine.

        Refuses what an environment or a policy asks of the collector that is just running it.
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

    # -- commands --------------------------------------------------------------------------------

    def request(self, worker: int, command: m.Command, timeout: float | None = 60.0) -> Any:
        """Carry out a control command on one worker and return its value.

        Raises:
            ClosedError: after `close`, except for reading.
        """
        return self.request_each({worker: command}, timeout)[worker]

    def request_all(self, command: m.Command, timeout: float | None = 60.0) -> list[Any]:
        """Carry out a control command on every worker at once; values in worker order.

        Where losses are tolerated, that of a lost worker is ``None``.
        """
        values = self.request_each(dict.fromkeys(range(self.workers), command), timeout)
        return [values.get(worker) for worker in range(self.workers)]

    def ask(self, command: m.Command) -> Any:
        """Carry out a control command on the first worker that was not lost; return its value."""
        while True:
            alive = self.dispatcher.alive
            values = self.request_each({alive[0] if alive else 0: command})
            if values:
                return next(iter(values.values()))
            if not alive:
                raise self.dispatcher.lost[0]

    def request_each(
        self,
        commands: dict[int, m.Command],
        timeout: float | None = 60.0,
        discard: Budget | None = None,
    ) -> dict[int, Any]:
        """Carry out one command per worker, all at once; return their values by worker.

        Where losses are tolerated, workers that are lost have none.

        Args:
            commands: By worker.
            timeout: Seconds each may take once its worker is free.
            discard: Throw away the rollouts that were made before the commands, and count them as
                not delivered here.

        Raises:
            ClosedError: after `close`, except for reading.
            Exception: what the first worker to fail raised, after all have replied.
        """
        with self._alone(timeout):
            reading = all(isinstance(c, m.GetState | m.Get) for c in commands.values())
            if not (self.closed and reading):
                self._check_usable()
            tickets, values, errors = self.dispatcher.run_on_workers(commands, timeout)
            if discard is not None:
                answered = {w: t.arrived for w, t in tickets.items() if t.lost is None}
                since = {worker: answered.get(worker, sys.maxsize) for worker in commands}
                self.discarded += self.gather.discard(since, discard)
            if errors:
                raise errors[0]
            return values

    def post(self, commands: dict[int, m.Command]) -> None:
        """Send one command per worker without waiting; an error is raised by a later call.

        Raises:
            ClosedError: after `close`.
            WorkerDied: a worker's process ended.
        """
        with self._alone():
            self._check_usable()
            for worker, command in commands.items():
                self.dispatcher.post(worker, command, watch=True)

    def check(self) -> None:
        """Raise the error of a worker, if one is known without waiting.

        Raises:
            ClosedError: after `close`.
            WorkerDied: a worker's process ended.
        """
        with self._alone():
            self._check_usable()
            self.dispatcher.receive_and_check()

    def check_alive(self) -> None:
        """Raise the error of a worker that has ended; receive nothing while none has ended.

        Raises:
            ClosedError: after `close`.
            WorkerDied: a worker's process ended.
        """
        self._check_usable()
        if not (self.dispatcher.can_continue and self.backend.no_end_noticed()):
            self.check()

    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        """Tell whether `collect` would give a batch now; see `Gather.ready`."""
        with self._alone():
            self._check_usable()
            return self.gather.ready(budget, feed, timeout)

    def _check_usable(self, advice: str = "") -> None:
        if self.failure is not None:
            raise self.failure
        if self.closed:
            raise ClosedError(f"the collector was shut down{advice}")

    @property
    def losses(self) -> int:
        """The number of losses of workers."""
        return sum(self.lives) + self.workers - len(self.dispatcher.alive)

    @property
    def _foreign(self) -> bool:
        """Whether this process is a forked child whose workers belong to its parent."""
        return self._owner != os.getpid() and not self.backend.inline

    # -- the end ---------------------------------------------------------------------------------

    def close(self, timeout: float, close_env: bool = True, raise_on_error: bool = False) -> None:
        """End all workers. Idempotent. Delivered batches stay valid.

        In a forked child, which has none of the workers' processes, they are only let go of. If
        this thread is in the middle of a rollout of its own, that ends after its step, and then all
        of it.

        Args:
            timeout: Seconds it may take.
            close_env: ``False`` leaves the environments open, or those that are set aside.
            raise_on_error: Raise what closing an environment raised.
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
                try:
                    self._close(timeout, close_env, raise_on_error)
                finally:
                    if self.set_aside is not None:
                        self.set_aside.close(timeout, close_env, raise_on_error)

    def _close(self, timeout: float, close_env: bool, raise_on_error: bool) -> None:
        self._close_next = None
        errors: list[BaseException] = []
        deadline = Deadline(timeout)
        self.dispatcher.replacing = None
        self.dispatcher.joining.clear()
        # A worker that ends while others are waited for is none that collection continues without.
        tolerant, self.dispatcher.tolerant = self.dispatcher.tolerant, False
        tickets: dict[int | None, Ticket] = {}
        for worker in self.dispatcher.alive if close_env or self.set_aside is not None else ():
            try:
                tickets[worker] = self.dispatcher.post(worker, m.Close())
            except Exception as err:
                errors.append(err)
        while late := [w for w in self.dispatcher.alive if self._unanswered(tickets, w)]:
            try:
                self.dispatcher.receive_in_time(deadline, late, "end")
            except WorkerDied as err:
                if self._unanswered(tickets, err.worker):
                    errors.append(err)
                else:
                    self.dispatcher.ended(err.worker)
            except Exception as err:
                errors.append(err)
        errors += [t.reply.error for t in tickets.values() if isinstance(t.reply, m.Failed)]
        self.closed = True
        self.backend.stop(max(0.5, deadline.left))
        if tolerant:  # now as before
            errors = [err for err in errors if not isinstance(err, WorkerDied)]
        if errors and raise_on_error:
            raise errors[0]

    @staticmethod
    def _unanswered(tickets: Mapping[int | None, Ticket], worker: int | None) -> bool:
        return worker in tickets and tickets[worker].reply is None
