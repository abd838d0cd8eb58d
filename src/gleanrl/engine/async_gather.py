"""Batches that are the rollout of the worker that was first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TypeAlias

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.engine.batch_delivery import Slots
from gleanrl.engine.gather import TASK, FrameCounts, Gather, Rollouts, Undelivered, reports_of
from gleanrl.engine.session import Session, Ticket

_DEPTH = 2
"""Rollouts an asynchronous worker has ahead of it, so that it never waits for the learner."""


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
        self, counts: FrameCounts, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Return the rollout that arrived first, and keep every worker busy."""
        session = self.session
        if feed and session.can_continue:
            self._feed_all(counts, one=True)
        if self._taken_back:
            worker, report, batch = self._taken_back.popleft()
            counts.deliver(self._frames[worker], report.frames)
            return batch, {worker: report}
        if timeout is not None:
            self._catch_up(timeout)
        while (first := self._first()) is None:
            session.raise_if_failed()
            self._drop_lost(counts)
            if feed and self.idle:  # all workers with a request were lost
                self._feed_all(counts, one=True)
            session.receive_in_time(Deadline(timeout), self._heads(), TASK)
            if not session.can_continue:  # raised after the delivery of all arrived rollouts
                session.receive_available()
        worker, requested = first.worker, self._frames[first.worker]
        slots, (_, slot) = self._slots[worker], self._queues[worker].popleft()
        if not isinstance(first.reply, m.Rolled):
            slots.release(slot)
            counts.cancel(requested)
            assert first.error is not None
            raise first.error
        report = first.reply.report
        counts.deliver(requested, report.frames)
        batch = slots.hand_over(slot, [report])
        if feed and self.session.can_continue:  # else: only what was begun is delivered
            self._feed(worker, counts, _DEPTH)
        return batch, {worker: report}

    def ready(self, counts: FrameCounts, feed: bool, timeout: float | None) -> bool:
        if feed and self.session.can_continue:
            self._feed_all(counts)
        if self._taken_back:
            return True
        if timeout is None:
            self.session.warn_silent()
        if timeout is not None or self._first() is None:
            self._catch_up(timeout)
        if self._first() is None and self.session.can_continue:
            self._drop_lost(counts)
            return False
        return True

    @property
    def idle(self) -> bool:
        return not (any(self._queues) or self._taken_back)

    def waiting(self) -> list[m.Report]:
        arrived = reports_of(ticket for queue in self._queues for ticket, _ in queue.copy())
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

    def take_back(self, rollouts: Sequence[Undelivered], counts: FrameCounts) -> None:
        for worker, report, batch in rollouts:
            counts.dispatch(self._frames[worker])
            self._taken_back.append((worker, report, batch))

    def _feed_all(self, counts: FrameCounts, one: bool = False) -> None:
        """Request rollouts as the frame counts allow, and in any case ``one``, for a caller."""
        self._drop_lost(counts)
        for depth in range(1, _DEPTH + 1):  # in turn: a small rest is shared out
            for worker in range(len(self._slots)):
                self._feed(worker, counts, depth)
        for worker in self.session.alive if one else ():
            if self.idle:
                self._begin(worker, counts)

    def _feed(self, worker: int, counts: FrameCounts, depth: int) -> None:
        """Request rollouts of ``worker`` until ``depth`` are ahead, as the frame counts allow."""
        queue = self._queues[worker]
        if queue and queue[0][0].lost is not None:
            self._drop_lost_of(worker, counts)
        while len(queue) < depth and counts.wants_more and self._begin(worker, counts):
            pass

    def _begin(self, worker: int, counts: FrameCounts) -> bool:
        """Request a rollout of ``worker``; return ``False`` if it was lost."""
        if worker in self.session.lost:
            return False
        slots = self._slots[worker]
        slot = slots.acquire()
        assert slot is not None  # a batch was copied otherwise
        ticket = self.session.send(worker, m.Collect(slots.windows[slot][0], counts.random))
        if ticket.lost is not None:
            slots.release(slot)
            return False  # raised when the rollouts that did arrive have been delivered
        counts.dispatch(self._frames[worker])
        self._queues[worker].append((ticket, slot))
        return True

    def _drop_lost(self, counts: FrameCounts) -> None:
        """Expect no rollouts of lost workers; others may make them."""
        for worker in range(len(self._queues)):
            self._drop_lost_of(worker, counts)

    def _drop_lost_of(self, worker: int, counts: FrameCounts) -> None:
        queue = self._queues[worker]
        while queue and queue[0][0].lost is not None:
            self._slots[worker].release(queue.popleft()[1])
            counts.cancel(self._frames[worker])

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
                self.session.give_up(late, TASK, Deadline(timeout))

    def discard(self, since: Mapping[int, int], counts: FrameCounts) -> int:
        frames = sum(report.frames for worker, report, _ in self._taken_back if worker in since)
        for worker, *_ in self._taken_back:
            if worker in since:
                counts.cancel(self._frames[worker])
        self._taken_back = deque(one for one in self._taken_back if one[0] not in since)
        for worker, mark in since.items():
            queue = self._queues[worker]
            while queue and queue[0][0].reply is not None and queue[0][0].arrived < mark:
                ticket, slot = queue.popleft()
                self._slots[worker].release(slot)
                counts.cancel(self._frames[worker])
                if isinstance(ticket.reply, m.Rolled):
                    frames += ticket.reply.report.frames
        return frames
