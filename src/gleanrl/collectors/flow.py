"""A background collector's view of the rate limiter of its replay buffer."""

from __future__ import annotations

from typing import Any

from gleanrl.engine.budget import Budget
from gleanrl.memory.replay.buffer import ReplayBuffer


class Flow:
    """Asks the limiter of a buffer, if there is one."""

    def __init__(self, buffer: ReplayBuffer | None) -> None:
        """Speak for a collector that fills ``buffer``."""
        self._buffer = buffer
        self._limiter = None if buffer is None else buffer.limiter
        self._holding = False

    @staticmethod
    def of(buffer: Any) -> Flow:
        """Look for a limiter; buffers of other libraries have none."""
        return Flow(buffer if isinstance(buffer, ReplayBuffer) else None)

    def begin(self) -> None:
        """Note that collection was started."""
        if self._limiter is not None and self._buffer is not None:
            self._limiter.begin(self._buffer.storage)

    def running(self, now: bool) -> None:
        """Note that collection goes on, or that it ended or rests."""
        if self._limiter is not None and self._buffer is not None:
            self._limiter.running(self._buffer.storage, now)

    def holds(self, budget: Budget) -> bool:
        """Tell whether the collector has to wait for the learner."""
        if self._limiter is None or self._buffer is None:
            return False
        self._holding = self._limiter.holds(self._buffer.storage, budget.under_way)
        return self._holding

    def stats(self, running: bool) -> dict[str, float | bool]:
        """Return what ``stats()`` shows of it."""
        if self._limiter is None or self._buffer is None:
            return {}
        return {
            "samples_per_insert": self._limiter.ratio(self._buffer.storage),
            "waiting_for_learner": self._holding and running,
        }
