"""Workers in the calling thread whose environments are in processes, and step meanwhile."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from time import monotonic
from typing import cast

from gleanrl.core import messages as m
from gleanrl.core.errors import EnvError, GleanError
from gleanrl.core.protocols import InlineSource, JointAct, Stop
from gleanrl.transport.inline import InlineBackend
from gleanrl.transport.worker_loop import OpenWindow


class InterleavedBackend(InlineBackend):
    """While the environments of one worker step, the policy acts in those of another."""

    def receive(self, timeout: float | None) -> m.Reply:
        if self._replies or self._others or not self._collects:
            return super().receive(timeout)
        rollouts = []
        for worker, ticket, command in self._collects:
            assert isinstance(command, m.Collect)
            rollouts.append(self._workers[worker].collecting(ticket, command))
        self._collects.clear()
        while rollouts:
            for rollout in list(rollouts):
                try:
                    next(rollout)  # the last step is over, and the policy has acted
                    next(rollout)  # the environments step
                except StopIteration as end:
                    self._replies.append(_placed(end.value, "group"))
                    rollouts.remove(rollout)
        return self._replies.popleft()


def _placed(reply: m.Rolled | m.Failed, kind: str) -> m.Rolled | m.Failed:
    """Say whose rollout failed, where the error only numbers the environments of that rollout."""
    if isinstance(reply, m.Failed) and isinstance(reply.error, EnvError):
        reply.error.add_note(f"in the rollout of {kind} {reply.worker}")
    return reply


@dataclass(frozen=True, slots=True)
class CallSizes:
    """How many environments a call of the policy acts for."""

    least: int = 1
    """Fewer are acted for only when they have waited for ``wait_s`` seconds."""
    most: int | None = None
    """More wait for the next call; rollouts with more environments have calls of their own."""
    wait_s: float = 0.0
    ahead: int | None = None
    """A rollout so many steps ahead of the slowest one waits for it."""


@dataclass(eq=False, slots=True)
class _Rollout:
    """A rollout under way."""

    worker: int
    source: InlineSource
    steps: Generator[JointAct | None, None, m.Rolled | m.Failed]
    taken: int
    """The steps that its environments took, in earlier rollouts as well."""
    stop: Stop
    reply: m.Rolled | m.Failed | None = None
    """The answer, once the rollout has ended."""
    act: JointAct | None = None
    """The act that is due."""
    due_since: float = 0.0
    """The moment at which it became due."""

    def resume(self, error: Exception | None = None) -> None:
        """Continue until the policy has acted, or until its act is due; or raise ``error`` there.

        An act that was due has been carried out: then environments step.
        """
        try:
            acted = self.act is not None or error is not None
            self.act = next(self.steps) if error is None else self.steps.throw(error)
            if self.act is None and not acted:
                next(self.steps)
        except StopIteration as end:
            self.act, self.reply = None, end.value


_TAKEN = attrgetter("taken")
_SOON = m.Load, m.Get, m.Close
"""Commands that wait for no rollout: weights change between two calls of the policy, `Get` is a
part of every update of weights, and neither must wait for an environment that is slow."""


class JointBackend(InlineBackend):
    """Rollouts that run at their own pace, and a policy that acts for all that wait for it."""

    def __init__(self, open_window: OpenWindow, sizes: CallSizes) -> None:
        """Act for as many environments at once as ``sizes`` says."""
        super().__init__(open_window)
        self._sizes = sizes
        self._running: dict[int, _Rollout] = {}
        """By worker."""
        self._taken: defaultdict[int, int] = defaultdict(int)
        """By worker, the steps of its rollouts that have ended."""
        self._drift = 0
        """The most steps that one was ahead of the slowest one at the end of a rollout."""
        self._due: list[_Rollout] = []
        """Rollouts whose act is due, in the order in which they came to that."""

    def receive(self, timeout: float | None) -> m.Reply:
        while not self._replies:
            if not self._others:
                self._begin()
            elif not self._blocked:
                self._carry_out()
                break
            if not self._running:
                break
            self._stop_some()
            self._advance()
        return super().receive(timeout)

    def stop(self, timeout: float) -> None:
        super().stop(timeout)
        self._running.clear()  # at exit, generators must end before modules are taken apart
        self._due.clear()

    def _stop_some(self) -> None:
        """End rollouts after their step if all are to end, or if they will be discarded."""
        begin_anew = {w for w, _, one in self._others if isinstance(one, m.Reset | m.Seed)}
        for worker in self._running.keys() & (self._running if self.stop_byte[0] else begin_anew):
            self._running[worker].stop[0] = 1

    @property
    def _blocked(self) -> bool:
        """Whether the next command waits for the ends of rollouts.

        These are the rollouts of all workers with such commands, which then carry them out at once.
        """
        waiting = (worker for worker, _, command in self._others if not isinstance(command, _SOON))
        return not isinstance(self._others[0][2], _SOON) and any(
            worker in self._running for worker in waiting
        )

    def _carry_out(self) -> None:
        """Carry out a command per worker; the environments of all reset at the same time."""
        replies: dict[int, m.Reply] = {}
        while self._others and not self._blocked and self._others[0][0] not in replies:
            worker, ticket, command = self._others.popleft()
            replies[worker] = self._workers[worker].handle(ticket, command)
        for worker, reply in replies.items():
            try:
                cast("InlineSource", self._workers[worker].source).settle()
                self._replies.append(reply)
            except Exception as err:
                self._replies.append(m.Failed(worker, reply.ticket, err))

    def _begin(self) -> None:
        """Begin rollouts that are requested of workers that have none under way."""
        waiting = list(self._collects)
        self._collects.clear()
        for worker, ticket, command in waiting:
            if worker in self._running:
                self._collects.append((worker, ticket, command))
                continue
            assert isinstance(command, m.Collect)
            one = self._workers[worker]
            source, stop = cast("InlineSource", one.source), bytearray(1)
            steps, taken = one.collecting(ticket, command, stop), self._taken[worker]
            rollout = self._running[worker] = _Rollout(worker, source, steps, taken, stop)
            self._continue(rollout)

    def _continue(self, rollout: _Rollout, error: Exception | None = None) -> None:
        rollout.resume(error)
        if rollout.reply is not None:
            del self._running[rollout.worker]
            self._replies.append(_placed(rollout.reply, "worker"))
            self._taken[rollout.worker] = rollout.taken
            if isinstance(rollout.reply, m.Rolled):
                others = map(_TAKEN, self._running.values())
                ahead = rollout.taken - min(others, default=rollout.taken)
                rollout.reply.report.drift = self._drift = max(self._drift, ahead)
        elif rollout.act is not None:
            rollout.due_since = monotonic()
            self._due.append(rollout)

    def _advance(self) -> None:
        """Continue where a step is over, and have the policy act; else wait for a step."""
        for rollout in self._over():
            rollout.taken += 1
            self._continue(rollout)
        if self._replies and not self._others:
            self._begin()  # so that the policy acts for the next rollouts of these workers as well
        if chosen := self._choose():
            self._act(chosen)
        elif not self._replies:
            self._wait()

    def _over(self) -> Iterable[_Rollout]:
        """Return the rollouts whose step is over, and which may continue."""
        running = self._running.values()
        return [one for one in running if one.act is None and not one.source.under_way]

    def _choose(self) -> list[_Rollout]:
        """Return rollouts that the policy acts for now."""
        sizes, due = self._sizes, self._due
        envs = [cast("JointAct", rollout.act).envs for rollout in due]
        if not due or (sum(envs) < sizes.least and self._wait_left() > 0 and self._under_way()):
            return []
        totals = list(itertools.accumulate(envs))
        count = len(due) if sizes.most is None else max(1, bisect_right(totals, sizes.most))
        chosen, self._due = due[:count], due[count:]
        return chosen

    def _wait_left(self) -> float:
        """Return the seconds for which the rollout that is due longest may still wait."""
        return self._due[0].due_since + self._sizes.wait_s - monotonic()

    def _act(self, chosen: Sequence[_Rollout]) -> None:
        first, *others = (cast("JointAct", rollout.act) for rollout in chosen)
        error: Exception | None = None
        try:
            with chosen[0].source.acting():
                first.act_with(others)
        except Exception as err:
            error = err
        for rollout in chosen:
            self._continue(rollout, error)

    def _under_way(self) -> list[_Rollout]:
        return [rollout for rollout in self._running.values() if rollout.source.under_way]

    def _wait(self) -> None:
        """Wait until a step is over, or until rollouts have waited long enough for the policy."""
        left = self._wait_left() if self._due else None
        under_way = self._under_way()
        try:
            under_way[0].source.wait(left)
        except Exception as err:  # a worker is lost, and all others with it
            for rollout in under_way:  # each has an error of its own, as one of them is raised
                self._continue(rollout, copy(err) if isinstance(err, GleanError) else err)


class BoundedJointBackend(JointBackend):
    """Rollouts that wait for the slowest one while they are too many steps ahead of it.

    The slowest one never waits, so there is always one that continues.
    """

    def _over(self) -> Iterator[_Rollout]:
        most, slowest = cast("int", self._sizes.ahead), 0
        for rollout in sorted(super()._over(), key=_TAKEN):
            if rollout.taken - slowest >= most:  # perhaps less, since those before it continued
                slowest = min(map(_TAKEN, self._running.values()))
                if rollout.taken - slowest >= most:
                    return
            yield rollout
