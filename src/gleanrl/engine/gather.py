"""The counts of frames, and the common part of batches of every worker, or of any."""

from __future__ import annotations

import abc
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import FrameLimits
from gleanrl.engine.batch_delivery import Slots
from gleanrl.engine.session import Session, Ticket

TASK = "deliver their rollout"
Rollouts: TypeAlias = Mapping[int, m.Report]
"""Per worker that contributed to a batch: the report about its rollout."""
Undelivered: TypeAlias = tuple[int, m.Report, TensorDictBase]
"""A rollout that has arrived and was not delivered: its worker, the report, and the batch."""


@dataclass(eq=False, slots=True)
class FrameCounts:
    """Counts frames from dispatch to delivery, over all workers."""

    limits: FrameLimits
    delivered: int = 0
    under_way: int = 0
    """Frames that were requested and have not arrived."""
    whole: int = 0
    """Frames of whole trajectories that the user got, if these are counted."""
    most_whole: float = math.inf
    """The number of ``whole`` that ends the collection, if that is what ends it."""

    @property
    def exhausted(self) -> bool:
        """Whether all frames were delivered."""
        total = self.limits.total_frames
        return self.whole >= self.most_whole or (total is not None and self.delivered >= total)

    @property
    def wants_more(self) -> bool:
        """Whether delivered frames and frames under way are fewer than the total."""
        total = self.limits.total_frames
        left = self.whole < self.most_whole
        return left and (total is None or self.delivered + self.under_way < total)

    @property
    def random(self) -> bool:
        """Whether the next rollouts act at random."""
        return self.delivered + self.under_way < self.limits.init_random_frames

    def dispatch(self, frames: int) -> None:
        """Note a request for ``frames`` frames."""
        self.under_way += frames

    def deliver(self, requested: int, frames: int) -> None:
        """Note that a rollout of ``requested`` frames arrived with ``frames`` valid ones."""
        self.under_way -= requested
        self.delivered += frames

    def cancel(self, requested: int) -> None:
        """Note that a rollout of ``requested`` frames will not be delivered."""
        self.under_way -= requested


class Gather(abc.ABC):
    """Requests rollouts of workers and returns complete batches."""

    def __init__(self, session: Session, slots: Sequence[Slots], frames: Sequence[int]) -> None:
        """Request ``frames[w]`` frames of worker ``w`` at a time."""
        self.attach(session)
        self._slots = list(slots)
        self._frames = tuple(frames)
        self.dropped = 0
        """Frames of rollouts that had ended and were dropped, because another one failed."""

    def attach(self, session: Session) -> None:
        """Gather the rollouts of ``session``, to which this belongs."""
        # A cycle would keep memory and descriptors until the garbage collector runs.
        self.session: Session = weakref.proxy(session)

    @abc.abstractmethod
    def batch(
        self, counts: FrameCounts, timeout: float | None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Return the next batch and the reports of its workers; ``None`` if workers kept it.

        With ``feed=False`` nothing is begun that `ready` has not found under way.

        Raises:
            CollectorTimeout: a worker took longer than ``timeout`` seconds for its rollout.
            WorkerDied: a worker's process ended.
            Exception: an exception of a worker's code.
        """

    @abc.abstractmethod
    def ready(self, counts: FrameCounts, feed: bool, timeout: float | None) -> bool:
        """Tell whether `batch` would return or raise now; begin rollouts only with ``feed``.

        Receives available replies, without waiting for more.
        """

    @property
    @abc.abstractmethod
    def idle(self) -> bool:
        """Whether no rollout is under way."""

    @abc.abstractmethod
    def waiting(self) -> list[m.Report]:
        """Return the reports of rollouts that wait to be delivered; safe in any thread."""

    @abc.abstractmethod
    def discard(self, since: Mapping[int, int], counts: FrameCounts) -> int:
        """Drop rollouts of each worker that arrived before its given arrival; return frames."""

    @abc.abstractmethod
    def undelivered(self, since: Mapping[int, int]) -> Sequence[Undelivered]:
        """Return copies of rollouts of each worker that arrived before its given arrival."""

    def take_back(self, rollouts: Sequence[Undelivered], counts: FrameCounts) -> None:
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


def reports_of(tickets: Iterable[Ticket]) -> list[m.Report]:
    """Return the reports of rollouts that have arrived."""
    return [ticket.reply.report for ticket in tickets if isinstance(ticket.reply, m.Rolled)]
