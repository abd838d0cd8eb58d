"""Workers with environments: their start, commands and pulses, and the groups that step at once."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import torch

from gleanrl.core import messages as m
from gleanrl.core.affinity import Processors
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ClosedError, CollectorTimeout, WorkerDied
from gleanrl.core.keys import Key
from gleanrl.core.layout import Field, Layout
from gleanrl.core.options import GymOptions
from gleanrl.core.platforms import naming_limits, require_linux
from gleanrl.core.window import Array, Window
from gleanrl.engine.replacing_workers import Replacements, reseeded
from gleanrl.engine.session import Session, Ticket
from gleanrl.envs.factory import EnvFactory
from gleanrl.envs.simulator_state import StateError
from gleanrl.envs.state_kinds import Node
from gleanrl.memory.batch_arena import Slab, map_window
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.wakeup_pipes import WakeupPipes
from gleanrl.parallel.inside_env_worker import (
    ANEW,
    BEGIN,
    ENDED,
    FAILED,
    FINISH,
    GROUP_BITS,
    LEAVE,
    EnvWorkerBuilder,
)
from gleanrl.parallel.inside_env_worker_group import SHARED
from gleanrl.transport.interrupts import interruptible
from gleanrl.transport.process import ProcessBackend
from gleanrl.transport.verifying import CHECK_TIMEOUT_S

CONTROL_S = 60.0
"""Seconds that a command other than a step may take, if a step may not take longer."""
_LOOK_MS = 50
"""Milliseconds after which the workers are looked at again."""
_SOON_MS = 5
"""The same while a replacement is expected."""
_NEEDED = (
    "; on_failure='continue' begins when every environment has been reset once, because the first "
    "call of the policy and the layout of batches need all of them"
)
_MASK = (1 << GROUP_BITS) - 1
_NOTHING: list[int] = []
_made = itertools.count()


@dataclass
class EnvWorkersPlan:
    """What workers are made of; several `ParallelEnv`s that share them are groups in it."""

    storing: GymOptions
    """How data of Gymnasium environments are stored."""
    threads: int
    """torch threads of each worker."""
    timeout: float | None
    """Seconds that a step may take."""
    apart: bool = False
    """Whether each group has rollouts of its own. Then environments are stepped in rows even where
    that is not proven equal, and `WorkerRows.settle` follows every reset but the first."""
    start_timeout: float = 120.0
    """Seconds in which each process must start; all have the same time again to build."""
    affinity: Sequence[Processors] | None = None
    """The processors that each worker may use; all by default."""
    on_failure: str = "raise"
    """The reaction to a lost worker."""
    relaunches: tuple[int, float | None] | None = None
    """How often each lost worker is replaced, and within how many seconds; ``None`` for never."""
    needs_all: bool = True
    """Whether an error is raised if a worker is lost that is not replaced."""
    restarts: tuple[int, float | None] | None = None
    """How often each environment that raises is built anew; ``None`` for never."""
    groups: list[Mapping[int, Sequence[tuple[EnvFactory, Mapping[str, Any]]]]] = field(
        default_factory=list
    )
    """Per group, by worker: callables that make environments, and their arguments."""
    declared: dict[int, tuple[Sequence[int], Sequence[Any]]] = field(default_factory=dict)
    """For `check_alike`, by the first environment of each worker in each group."""
    started: EnvWorkers | None = None

    @property
    def only_rows(self) -> str:
        """The setting with which frames may be no transitions, if there is one."""
        names = [f"on_failure={self.on_failure!r}"] * (self.on_failure != "raise")
        names += ["on_env_error='restart'"] * (self.restarts is not None)
        return " and ".join(names)

    def start(self) -> EnvWorkers:
        """Start the workers, at the first call."""
        if self.started is None:
            self.started = EnvWorkers(self)
        return self.started


class EnvWorkers:
    """Processes with environments.

    Between two commands, workers are in `EnvWorker.serve`, where a pulse has a group step.
    """

    def __init__(self, plan: EnvWorkersPlan) -> None:
        require_linux("workers in other processes")
        self.timeout, self.start_timeout = plan.timeout, plan.start_timeout
        self.count = 1 + max(map(max, plan.groups))
        stream, workers = _stream(), range(self.count)
        self.groups = [WorkerGroup(self, list(group)) for group in plan.groups]
        self._served = [[group for group in self.groups if w in group.members] for w in workers]
        """Per worker, its groups, in the order of their numbers there."""
        self.pipes = WakeupPipes(self.count)
        self.only_rows, self.needs_all = plan.only_rows, plan.needs_all
        self.apart = plan.apart
        try:
            with naming_limits():
                self.memory = SharedMemory()
            self.session = Session(
                lambda _: ProcessBackend(
                    plan.threads,
                    plan.start_timeout,
                    replaces=plan.relaunches is not None,
                    affinity=plan.affinity,
                ),
                [self._builder(plan, worker, stream) for worker in workers],
                start_timeout=plan.start_timeout,
            )
        except BaseException:
            self.pipes.close()
            raise
        self.coming: set[int] = set()
        """Workers that were lost, until their replacements are up to date."""
        if plan.on_failure != "raise":
            self.session.tolerant = self.session.needs_all = True  # see `WorkerGroup.was_reset`
            _EnvReplacements(self, plan.relaunches)
        self._owner = os.getpid()
        self._serving: dict[int, Ticket] = {}
        """By worker that waits for orders: the command to do so, which is answered at its end."""
        self._answered_at = [0.0] * self.count
        """The moment of each worker's last answer."""
        self._next_look = 0.0
        self._closing = weakref.finalize(
            self, _close, self.pipes, self.session, self._owner, 5.0, False
        )

    def _builder(self, plan: EnvWorkersPlan, worker: int, stream: int) -> EnvWorkerBuilder:
        groups = [group[worker] for group in plan.groups if worker in group]
        factories, kwargs = zip(*itertools.chain(*groups), strict=True)
        return EnvWorkerBuilder(
            factories,
            kwargs,
            tuple(map(len, groups)),
            plan.storing,
            stream + worker,
            self.memory,
            self.pipes.address(worker),
            plan.restarts,
        )

    # -- pulses ----------------------------------------------------------------------------------

    def serve(self, workers: Iterable[int]) -> None:
        """Have ``workers`` wait for orders, if they do not already."""
        self._check_usable()
        if len(self._serving) < self.count:
            for worker in workers:
                if worker not in self._serving and worker not in self.coming:
                    self._serving[worker] = self.session.send(worker, m.Call("serve"))

    def number(self, group: WorkerGroup, worker: int) -> int:
        """Return the number of ``group`` in ``worker``."""
        return self._served[worker].index(group)

    def take_answers(self, seconds: float | None = None) -> None:
        """Wait for answers, at most ``seconds``, and give them to their groups.

        `WorkerDied` or `CollectorTimeout` if a worker ended, or its step took too long.
        """
        self._check_usable()
        look = _SOON_MS if self.coming else _LOOK_MS
        most = look if seconds is None else min(look, 1e3 * max(0.0, seconds))
        came, now = interruptible(self.pipes.wait, most), monotonic()
        if came:
            self._take(now)
        # Without answers, all workers may have ended; with answers, those that gave none.
        if not came or now >= self._next_look:
            self._look(now)

    def _take(self, now: float, but: int | None = None) -> None:
        """Give the answers that are there to their groups, except those of one worker."""
        for worker, answer in self.pipes.take():
            if worker != but:
                self._answered_at[worker] = now
                self._served[worker][answer >> GROUP_BITS].answered(worker, answer & _MASK)

    def _look(self, now: float) -> None:
        """Look for workers that have ended or are late."""
        self._next_look, session = now + 1e-3 * _LOOK_MS, self.session
        since: dict[int, float] = {}
        for group in self.groups:
            for worker in group.pending:  # which steps one group after the other
                began = max(group.began, self._answered_at[worker])
                since[worker] = min(began, since.get(worker, now))
        for worker in range(self.count):  # while a worker serves, pulses are its replies
            replied = since.get(worker, now)
            session.last_reply[worker] = max(session.last_reply[worker], replied)
        session.receive_available()
        session.warn_silent()
        due = {worker: began for worker, began in since.items() if worker not in self.coming}
        late = [worker for worker, began in due.items() if Deadline(self.timeout, began).expired]
        if late:
            deadline = Deadline(self.timeout, min(due.values()))
            session.give_up(sorted(late), "finish their step", deadline)
        self._check_alive()
        for worker in filter(session.is_up, sorted(self.coming)):
            self.coming.discard(worker)
            self._answered_at[worker] = now
            for group in self._served[worker]:
                if worker in group.pending:
                    group.begin_anew(worker)

    def _check_alive(self) -> None:
        try:
            self.session.raise_if_failed()
        except (WorkerDied, CollectorTimeout):
            self.close(1.0)
            raise

    def pause(self, workers: Collection[int]) -> Session:
        """Have ``workers`` turn to commands, after their present orders; return the session.

        The steps of all others continue.
        """
        self._check_usable()
        for group in self.groups:
            if not group.pending.isdisjoint(workers):
                group.wait()
        while not self.coming.isdisjoint(workers):
            self.take_answers()
        for worker in workers:
            if self._serving.pop(worker, None) is not None:
                self.pipes.send(worker, LEAVE)
        self._check_alive()
        return self.session

    # -- replacements ----------------------------------------------------------------------------

    def lost(self, worker: int) -> None:
        """Note that ``worker`` has ended, and is being replaced or missing from now on."""
        ticket = self._serving.pop(worker, None)
        missing = not (worker in self.session.joining or self.session.needs_all)
        if missing and ticket is not None and not ticket.over:  # it may still write
            self.needs_all = self.session.needs_all = True
        self.coming.discard(worker) if missing else self.coming.add(worker)
        self.pipes.drop_orders(worker)
        if self.pipes.wait(0):
            self._take(monotonic(), but=worker)  # else they would count as its replacement's
        for group in self._served[worker]:
            group.lost(worker, missing)

    def standing(self, worker: int) -> list[m.Command]:
        """Return the commands that bring a replacement of ``worker`` up to date."""
        life = self.session.lives[worker]
        return [call for group in self._served[worker] for call in group.standing_of(worker, life)]

    @property
    def were_reset(self) -> bool:
        """Whether all environments have shown an observation."""
        return all(group._was_reset for group in self.groups)

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
        for group in self.groups:
            group.pending.clear()
        if self._closing.detach() is not None:
            _close(self.pipes, self.session, self._owner, timeout, raise_on_error)


class _EnvReplacements(Replacements):
    """Replaces lost workers, if at all.

    Groups have replacements begin in the step under way, or continue without the lost worker.
    """

    def __init__(self, workers: EnvWorkers, allowed: tuple[int, float | None] | None) -> None:
        self._workers: EnvWorkers = weakref.proxy(workers)  # see `WorkerGroup`
        self._replaces = allowed is not None
        commands = partial(EnvWorkers.standing, self._workers)
        super().__init__(workers.session, allowed or (0, None), commands)

    def replace(self, worker: int) -> str:
        more = "" if self._workers.were_reset else _NEEDED
        more = super().replace(worker) if self._replaces else more
        self._workers.lost(worker)
        return more


def _stream() -> int:
    """Return the seed of workers' random streams, without drawing from the learner's."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return int(torch.randint(1 << 40, (), generator=generator)) + (next(_made) << 20)


def _close(
    pipes: WakeupPipes, session: Session, owner: int, timeout: float, raise_on_error: bool
) -> None:
    if owner == os.getpid():  # a forked child has the pipes, too
        pipes.stop()
    try:
        session.close(timeout, raise_on_error=raise_on_error)
    finally:
        pipes.close()


class WorkerGroup:
    """The environments in some of the workers that step at once."""

    parts: Sequence[range]
    """Each member's environments, among those of the group."""
    cut: Array
    """Per environment, whether the next step truncates it."""

    def __init__(self, workers: EnvWorkers, members: Sequence[int]) -> None:
        """Be a group in the workers ``members`` of ``workers``."""
        # A cycle would keep processes until the garbage collector runs.
        self.workers: EnvWorkers = weakref.proxy(workers)
        self.members = members
        self.pending: set[int] = set()
        """Workers that owe an answer."""
        self.began = 0.0
        """The moment of the last order."""
        self._order = 0
        """The last order."""
        self._failed: list[int] = []
        self._some_ended = self._some_anew = self._some_failed = False
        self._beginning: set[int] = set()
        """Workers that were lost, whose replacements begin with this order or the next."""
        self.gone: set[int] = set()
        """Environments that are lost for good, as far as `began_anew` has told."""
        self._missing: set[int] = set()
        self._leaving: set[int] = set()
        """Workers that are lost for good, and those of which `began_anew` has not told."""
        self._was_reset = False
        self._standing: dict[Any, tuple[str, Sequence[tuple[Any, ...]]]] = {}
        """Commands that replacements get as well, by what they set: a method, and the arguments of
        each member."""

    # -- memory ----------------------------------------------------------------------------------

    def share(self, envs: Sequence[int]) -> list[m.WindowRef]:
        """Reserve what workers with so many ``envs`` share with this process besides steps."""
        self._find_numbers()
        ends = [0, *itertools.accumulate(envs)]
        self.parts = [range(*pair) for pair in itertools.pairwise(ends)]
        shared = self.reserve(SHARED, 1)
        fields = (shared.array(field.key)[:, 0] for field in SHARED)
        self._orders, self._reset_s, self.cut, self._ended, self._anew = fields
        return self.references(shared)

    def reserve(self, fields: Iterable[Field], steps: int) -> Window:
        """Return a window of all environments that workers can map."""
        memory = self.workers.memory
        slab = Slab([Layout((self.parts[-1].stop,), tuple(fields))], [steps])
        base = memory.reserve(slab.nbytes)
        return map_window(memory.map(), slab.reference(0, 0, base, 0))

    def sees(self, window: Window) -> bool:
        """Tell whether all of ``window`` is in the memory."""
        return all(self._offset(window.tensor(key)) is not None for key in window.keys())

    def _offset(self, tensor: torch.Tensor) -> int | None:
        """Return where ``tensor`` begins in the memory; ``None`` if it is elsewhere."""
        if not tensor.numel():  # nothing is nowhere
            return 0
        return self.workers.memory.offset_of(tensor.data_ptr())

    def references(self, window: Window, keys: Collection[Key] | None = None) -> list[m.WindowRef]:
        """Return each worker's part of ``window``, a window in the memory: entries ``keys``."""
        found = [(key, window.tensor(key)) for key in keys or window.keys()]
        starts = [self._offset(tensor) for _, tensor in found]
        references = []
        for index, part in enumerate(self.parts):
            blocks = []
            for (key, tensor), start in zip(found, starts, strict=True):
                assert start is not None, "not in the memory of workers"
                env, time = (tensor.itemsize * stride for stride in tensor.stride()[:2])
                blocks.append(m.Block(field_of(key, tensor), start + part.start * env, env, time))
            references.append(m.WindowRef(0, index, len(part), window.steps, tuple(blocks)))
        return references

    @property
    def reset_s(self) -> float:
        """Seconds in resets, of the worker that spent most."""
        return float(self._reset_s.max())

    # -- commands --------------------------------------------------------------------------------

    def ask(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Call a method of `EnvGroup` in workers, after their present orders; see `order`."""
        return self.order(method, *arguments, **options)()

    def order(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]] | tuple[Any, ...] = (),
        seconds: float | None = CONTROL_S,
        kwargs: Mapping[str, Any] | None = None,
        begins: bool = False,
    ) -> Callable[[], list[Any]]:
        """Begin to call a method of `EnvGroup`, or what is at a path in it, after present orders.

        ``arguments`` are those of all members, or by index of each member that is asked. It may
        take so many ``seconds``, if a step may not take longer. ``begins``: Environments begin
        episodes that the learner knows of, those of replacements as well.

        Returns:
            A function that waits for the values of the members that were asked, ``None`` for those
            that are lost for good, and raises `WorkerDied` if all are.
        """
        if seconds is not None:
            seconds = max(seconds, self.workers.timeout or 0.0)
        if not isinstance(arguments, Mapping):
            arguments = dict.fromkeys(range(len(self.members)), arguments)
        commands: dict[int, m.Command] = {}
        for index, own in arguments.items():
            worker = self.members[index]
            path = f"groups[{self.workers.number(self, worker)}].{method}"
            commands[worker] = m.Call(path, own, kwargs)
        return partial(self._values, commands, self._send(commands), seconds, begins)

    def _send(self, commands: Mapping[int, m.Command]) -> Mapping[int, Ticket]:
        """Send the members that are not lost for good their commands."""
        there = {w: command for w, command in commands.items() if w not in self._missing}
        return self.workers.pause(there).order_each(there) if there else {}

    def _values(
        self,
        commands: Mapping[int, m.Command],
        tickets: Mapping[int, Ticket],
        seconds: float | None,
        begins: bool,
    ) -> list[Any]:
        found: dict[int, Any] = {}
        while tickets:
            came = self.workers.session.values_of(tickets, seconds)
            found |= came  # those that were lost have no values, and are asked again
            if begins:
                self.go_on([worker for worker in came if worker not in self.workers.coming])
            tickets = self._send({w: c for w, c in commands.items() if w not in found})
        self._check_there()
        return [found.get(worker) for worker in commands]

    def ask_for_good(
        self, method: str, arguments: Sequence[tuple[Any, ...]], what: Any = None
    ) -> None:
        """Call a method of `EnvGroup` in all members, and in all replacements of these.

        An earlier call that set the same (``what``, by default ``method``) counts no more.
        """
        # First: a replacement may come up meanwhile, and a second call changes nothing.
        self.stand(method, arguments, what)
        self.ask(method, dict(enumerate(arguments)))

    def stand(self, method: str, arguments: Sequence[tuple[Any, ...]], what: Any = None) -> None:
        """Have replacements begin with a call; see `ask_for_good`."""
        self._standing[what or method] = method, arguments

    def forget_standing(self, kept: Callable[[Any], bool]) -> None:
        """Forget the calls for replacements that set something which is not ``kept``."""
        self._standing = {what: call for what, call in self._standing.items() if kept(what)}

    def standing_of(self, worker: int, life: int) -> Iterator[m.Call]:
        """Yield the calls for the replacement of ``worker`` in its ``life``."""
        index, number = self.members.index(worker), self.workers.number(self, worker)
        for method, arguments in self._standing.values():
            own = arguments[index]
            if method == "seed":
                seed = reseeded(m.Seed(*own), life)
                own = seed.seed, seed.static
            yield m.Call(f"groups[{number}].{method}", own)

    def snapshot(self, allow_pickle: bool) -> Node:
        """Return the state of all environments in the middle of their episodes."""
        self.wait()
        found = self.ask("snapshot", (allow_pickle,))
        if self._beginning or self._missing:
            raise StateError("a worker was lost since the last rollout, and its episodes with it")
        return found

    def resume(self, snapshot: Node, allow_pickle: bool) -> None:
        self.wait()
        there, here = len(snapshot), len(self.members)
        if there != here:
            raise StateError(f"the environments were in {there} workers, and are in {here}")
        parts = {i: (part, allow_pickle) for i, part in enumerate(snapshot)}
        self.ask("resume", parts, begins=True)

    def verify(self, command: m.Verify) -> str | None:
        """Return how environments that load the state of these differ, if they do."""
        self.wait()
        if self._beginning or self._missing:
            return None  # `snapshot` says so
        commands = {w: replace(command, group=self.workers.number(self, w)) for w in self.members}
        session = self.workers.pause(commands)
        for worker, found in session.request_each(commands, 2 * CHECK_TIMEOUT_S).items():
            if found is not None:
                return f"in environment worker {worker}, {found}"
        return None

    def was_reset(self) -> None:
        """Note that all environments have shown an observation; then workers may be missing."""
        self._was_reset = True
        if self.workers.were_reset:
            self.workers.session.needs_all = self.workers.needs_all

    # -- orders ----------------------------------------------------------------------------------

    def give(self, order: int, window: int, t: int, resets: bool = False) -> None:
        """Give all workers an order; `settle` must follow."""
        workers = self.workers
        workers.serve(self._present)
        self._orders[:] = window, t, resets
        self.pending.update(self._present)
        self.began, self._order, send = monotonic(), order, workers.pipes.send
        for worker, number in self._numbers:
            send(worker, number << GROUP_BITS | order)
        if self._beginning and order != FINISH:  # without steps, there is nothing to finish
            self.pending |= self._beginning
            for worker in self._beginning:
                if worker not in workers.coming:
                    self.begin_anew(worker)

    def answered(self, worker: int, answer: int) -> None:
        """Note that ``worker`` has carried out the order."""
        self.pending.discard(worker)
        if answer == ENDED:
            self._some_ended = True
        elif answer == FAILED:
            self._failed.append(worker)
        elif answer == ANEW:
            self._some_ended = self._some_anew = True
            self.go_on({worker})

    def wait(self) -> None:
        """Wait for the answers that are due."""
        while self.pending:
            self.workers.take_answers()

    def forget(self) -> None:
        """Forget the remains of a rollout that failed."""
        self.wait()
        self._failed, self._some_ended, self._some_anew = [], False, bool(self._leaving)
        self._ended[:] = self.cut[:] = self._anew[:] = False

    def settle(self) -> list[int]:
        """Wait for the answers that are due, or raise an error; return the ended environments."""
        self.wait()
        if self._failed:
            failed = sorted(map(self.members.index, self._failed))
            try:
                self.ask("reraise", dict.fromkeys(failed, ()))
            finally:
                self._failed.clear()
            return self.settle()  # they were lost before they could say
        if not self._some_ended:
            return _NOTHING
        self._some_ended = False
        ended: list[int] = np.flatnonzero(self._ended).tolist()
        self._ended[ended] = False
        return ended

    # -- replacements ----------------------------------------------------------------------------

    def _find_numbers(self) -> None:
        """Tell the members that get orders as they are from those that begin anew, or are gone."""
        others = self._beginning | self._missing
        self._present = [worker for worker in self.members if worker not in others]
        self._numbers = [(worker, self.workers.number(self, worker)) for worker in self._present]

    def lost(self, worker: int, missing: bool) -> None:
        """Note that ``worker`` was lost; its replacement begins with this order or the next.

        If it is ``missing`` from now on, its step under way is no transition.
        """
        (self._missing if missing else self._beginning).add(worker)
        if worker in self._failed:
            self._failed.remove(worker)
            self.pending.add(worker)
        elif self._order == FINISH:  # its steps are whole
            self.pending.discard(worker)
        if missing:
            self._leaving.add(worker)
            self._beginning.discard(worker)
            self.pending.discard(worker)
            self._some_anew = True
        self._find_numbers()
        if missing or worker in self.pending:
            self._ended[self._part(worker)] = False

    def _part(self, worker: int) -> slice:
        part = self.parts[self.members.index(worker)]
        return slice(part.start, part.stop)

    def _check_there(self) -> None:
        """Raise the error of the first member if all are lost for good."""
        if self._missing.issuperset(self.members):
            raise copy(self.workers.session.lost[self.members[0]])

    def begin_anew(self, worker: int) -> None:
        """Order a replacement to begin, in place of the order under way."""
        self.workers.serve([worker])
        number = self.workers.number(self, worker)
        self.workers.pipes.send(worker, number << GROUP_BITS | BEGIN)

    def go_on(self, workers: Collection[int]) -> None:
        """Have replacements that have begun take steps, with the next order."""
        if not self._beginning.isdisjoint(workers):
            self._beginning.difference_update(workers)
            self._find_numbers()

    def began_anew(self) -> list[int]:
        """Return the environments that began anew in the last step, or are `gone` since it."""
        if not self._some_anew:
            return _NOTHING
        self._check_there()
        self._some_anew, self._some_failed = False, True
        for worker in self._leaving:
            self._anew[self._part(worker)] = True
            self.gone.update(self.parts[self.members.index(worker)])
        self._leaving.clear()
        anew: list[int] = np.flatnonzero(self._anew).tolist()
        self._anew[anew] = False
        return anew

    def take_failures(self) -> Iterator[str]:
        """Yield the errors of environments that were built anew since the last call."""
        if self._some_failed:
            self._some_failed = False
            for worker, texts in zip(self.members, self.ask("take_failures"), strict=True):
                yield from (f"in worker {worker}, {text}" for text in texts or ())


def field_of(key: Key, tensor: torch.Tensor) -> Field:
    """Return the field of an entry of a window."""
    return Field(key, tuple(tensor.shape[2:]), tensor.dtype)
