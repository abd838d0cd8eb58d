"""When a batch is complete, without waiting for anybody in particular."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout, WorkerDied
from gleanrl.engine.budget import Budget
from gleanrl.engine.dispatch import Dispatcher, Ticket
from gleanrl.engine.gather import Rollouts
from gleanrl.engine.slots import Slots

_DEPTH = 2
"""Rollouts an asynchronous worker has ahead of it, so that it never waits for the learner."""


_Asked: TypeAlias = tuple[Ticket, Slots, int]
"""A rollout that is due, and the slot it belongs into."""


class AsyncGather:
    """A batch is complete when any worker has delivered its rollout."""

    def __init__(
        self, dispatcher: Dispatcher, make_slots: Callable[[int], Slots], frames: Sequence[int]
    ) -> None:
        """Gather from whoever is first.

        Args:
            dispatcher: Speaks to the workers.
            make_slots: Makes those of a worker's rollouts.
            frames: Per worker, what it is asked for.
        """
        self._dispatcher = dispatcher
        self._make_slots = make_slots
        self._frames = tuple(frames)
        self._slots = [make_slots(worker) for worker in range(len(frames))]
        self._queues: list[deque[_Asked]] = [deque() for _ in frames]

    @property
    def copies(self) -> int:
        """Batches copied because the user held every slot."""
        return sum(slots.copies for slots in self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of batch memory reserved."""
        return sum(slots.nbytes for slots in self._slots)

    def batch(
        self, budget: Budget, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Return the rollout that arrived first, and keep every worker busy.

        Raises:
            CollectorTimeout: a worker took longer than ``timeout`` seconds for its rollout.
            WorkerDied: a worker's process ended.
            Exception: what a worker's code raised.
        """
        if feed and self._dispatcher.intact:
            self._feed_all(budget)
            self._begin_one(budget)
        if timeout is not None:
            self._catch_up(timeout)
        while (first := self._first()) is None:
            self._dispatcher.raise_lost()
            self._let_go(budget)
            if feed and self.idle:  # whoever had been asked was lost
                self._feed_all(budget)
                self._begin_one(budget)
            self._wait(timeout)
        worker, asked = first.worker, self._frames[first.worker]
        _, slots, slot = self._queues[worker].popleft()
        if not isinstance(first.reply, m.Rolled):
            slots.release(slot)
            budget.cancel(asked)
            assert isinstance(first.reply, m.Failed)
            raise first.reply.error
        report = first.reply.report
        budget.deliver(asked, report.frames)
        batch = slots.hand_over(slot, [report])
        if feed and self._dispatcher.intact:  # else: only what was begun is delivered
            self._feed(worker, budget, _DEPTH)
        return batch, {worker: report}

    def ready(self, budget: Budget, feed: bool, timeout: float | None) -> bool:
        """Tell whether a rollout has arrived."""
        if feed and self._dispatcher.intact:
            self._feed_all(budget)
        if timeout is None:
            self._dispatcher.warn_silent()
        if timeout is not None or self._first() is None:
            self._catch_up(timeout)
        if self._first() is None:
            self._dispatcher.raise_lost()
            self._let_go(budget)
            return False
        return True

    @property
    def idle(self) -> bool:
        """Whether no rollout is under way."""
        return not any(self._queues)

    def renew(self, worker: int) -> None:
        """Have a replacement write elsewhere: the lost ``worker`` may still be writing."""
        fresh = self._make_slots(worker)
        fresh.copies = self._slots[worker].copies
        self._slots[worker] = fresh

    def _begin_one(self, budget: Budget) -> None:
        """Begin a rollout if none is under way: whatever the budget says, who asks gets one."""
        alive = iter(self._dispatcher.alive)
        while self.idle and (worker := next(alive, None)) is not None:
            self._begin(worker, budget)

    def _feed_all(self, budget: Budget) -> None:
        self._let_go(budget)
        for depth in range(1, _DEPTH + 1):  # in turn: a short budget is shared out
            for worker in range(len(self._slots)):
                self._feed(worker, budget, depth)

    def _feed(self, worker: int, budget: Budget, depth: int) -> None:
        """Give ``worker`` work until ``depth`` rollouts are ahead of it, as the budget allows."""
        queue = self._queues[worker]
        while len(queue) < depth and budget.wants_more and self._begin(worker, budget):
            pass

    def _begin(self, worker: int, budget: Budget) -> bool:
        """Ask ``worker`` for a rollout; return ``False`` if it was lost."""
        if not self._dispatcher.has(worker):  # and some of its slots with it
            return False
        slots = self._slots[worker]
        slot = slots.acquire()
        window, random = slots.windows(slot)[0], budget.random
        try:
            ticket = self._dispatcher.post(worker, m.Collect(window, random))
        except (WorkerDied, CollectorTimeout):
            slots.release(slot)
            return False  # raised when the rollouts that did arrive have been delivered
        budget.dispatch(self._frames[worker])
        self._queues[worker].append((ticket, slots, slot))
        return True

    def _let_go(self, budget: Budget) -> None:
        """Expect nothing more of lost workers; others may make what they owe."""
        for worker, queue in enumerate(self._queues):
            while queue and queue[0][0].lost is not None:
                queue.popleft()  # its slot is not used again: the worker may still write into it
                budget.cancel(self._frames[worker])

    def _heads(self) -> list[Ticket]:
        return [queue[0][0] for queue in self._queues if queue]

    def _first(self) -> Ticket | None:
        arrived = [ticket for ticket in self._heads() if ticket.reply is not None]
        return min(arrived, key=lambda ticket: ticket.arrived, default=None)

    def _wait(self, timeout: float | None) -> None:
        """Wait for a reply. What goes wrong is raised once all that had arrived is delivered."""
        try:
            replied = self._dispatcher.wait(timeout)
        except WorkerDied as err:
            if err.worker is None:
                raise
            self._dispatcher.take_in()
            return
        if not replied and timeout is not None:
            self._give_up([ticket.worker for ticket in self._heads()], timeout)

    def _catch_up(self, timeout: float | None) -> None:
        """Take in what came while the learner was busy, and note who is late."""
        self._dispatcher.take_in()
        if timeout is not None:
            self._give_up_late(timeout)

    def _give_up_late(self, timeout: float) -> None:
        now, heard = time.monotonic(), self._dispatcher.heard
        waiting = [ticket for ticket in self._heads() if ticket.reply is None]
        late = [t.worker for t in waiting if now - max(t.posted, heard[t.worker]) >= timeout]
        self._give_up(late, timeout)

    def _give_up(self, late: list[int], timeout: float) -> None:
        alive = self._dispatcher.alive
        late = [worker for worker in late if worker in alive]
        if late:
            self._dispatcher.give_up(
                late, f"workers {late} did not deliver their rollout within {timeout} s"
            )

    def discard(self, since: Mapping[int, int], budget: Budget) -> int:
        """Drop the rollouts that arrived before their worker's arrival number in ``since``."""
        frames = 0
        for worker, mark in since.items():
            queue = self._queues[worker]
            while queue and queue[0][0].reply is not None and queue[0][0].arrived < mark:
                ticket, slots, slot = queue.popleft()
                slots.release(slot)
                budget.cancel(self._frames[worker])
                if isinstance(ticket.reply, m.Rolled):
                    frames += ticket.reply.report.frames
        return frames
