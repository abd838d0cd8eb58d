"""The numbers of requested and of delivered frames."""

from __future__ import annotations

from dataclasses import dataclass

from gleanrl.core.options import FrameLimits


@dataclass(eq=False, slots=True)
class FrameCounts:
    """Counts frames from dispatch to delivery, over all workers."""

    limits: FrameLimits
    delivered: int = 0
    under_way: int = 0
    """Frames that were requested and have not arrived."""
    whole: int = 0
    """Frames of whole trajectories that the user got, if these are counted."""
    most_whole: int | None = None
    """The number of ``whole`` that ends the collection, if that is what ends it."""

    @property
    def all_whole(self) -> bool:
        """Whether the user got all whole trajectories."""
        return self.most_whole is not None and self.whole >= self.most_whole

    @property
    def exhausted(self) -> bool:
        """Whether all frames were delivered."""
        total = self.limits.total_frames
        return self.all_whole or (total is not None and self.delivered >= total)

    @property
    def wants_more(self) -> bool:
        """Whether delivered frames and frames under way are fewer than the total."""
        total = self.limits.total_frames
        return not self.all_whole and (total is None or self.delivered + self.under_way < total)

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
