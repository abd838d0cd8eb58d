"""A session whose workers' rollouts become batches, in memory of its own."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import ClosedError
from gleanrl.core.options import FrameLimits
from gleanrl.core.window import Window
from gleanrl.engine.async_gather import AsyncGather
from gleanrl.engine.batch_delivery import BatchOptions, BatchPlan
from gleanrl.engine.gather import FrameCounts, Gather, Rollouts, Undelivered
from gleanrl.engine.session import Session
from gleanrl.engine.sync_gather import SyncGather

_STAYING = frozenset({"_turns", "closed", "discards", "failure", "set_aside"})
"""Attributes of an engine that are not about its workers, and differ while none is collecting."""


class Engine(Session):
    """Runs sources behind a backend and turns their rollouts into batches, once it has a `plan`."""

    set_aside: Engine | None = None
    """The engine with the workers from before `exchange`, which closes with this one."""

    def plan(
        self,
        limits: FrameLimits,
        frames: Sequence[int],
        options: BatchOptions,
        enough: int | None = None,
        stopped: Callable[[], bool] = bool,
        blanks: bool = False,
    ) -> FrameCounts:
        """Decide the layout of batches and reserve their memory; call once, first.

        Args:
            limits: Frames per batch and in all, as the user gave them.
            frames: Per worker, the frames of its rollouts; rounded up to whole steps.
            options: How batches are handed out.
            enough: Workers that have to finish; then the others are stopped. ``None``: all.
            stopped: Whether the user's `Interruptor` stops rollouts.
            blanks: Whether batches of all workers may lack the rollouts of lost ones.

        Returns:
            The frame counts, for batches of the size that they will have.

        Raises:
            ConfigError: rollouts that cannot be put together so, or more memory than there is.
        """
        layouts = self.layouts
        rows = [
            (options.rollout_envs or own) if layout is None else layout.num_envs
            for layout, own in zip(layouts, self.envs, strict=True)
        ]
        self.steps = [
            -(-requested // count) if layout is None or layout.steps is None else layout.steps
            for requested, layout, count in zip(frames, layouts, rows, strict=True)
        ]
        """Per worker, the steps of its rollouts."""
        self.sizes = [each * count for each, count in zip(self.steps, rows, strict=True)]
        """Per worker, the frames of its rollouts."""
        whole, envs = sum(self.sizes), self.num_envs
        if options.single:
            whole, envs = max(self.sizes) * options.joined, max(rows)
        limits = limits.rounded(whole, envs)
        self.discards: Counter[str] = Counter()
        """Frames that were stepped but not delivered, by the reason."""
        self.batches = plan = BatchPlan(self.backend.memory, self.layouts, self.steps, options)
        if options.single:
            own = [plan.worker_slots(worker) for worker in range(self.workers)]
            self.gather: Gather = AsyncGather(self, own, self.sizes)
        else:
            slots = plan.common_slots()
            self.gather = SyncGather(self, slots, self.sizes, enough, stopped, blanks)
        return FrameCounts(limits)

    def _open_window(self, reference: m.WindowRef) -> Window:
        return self.batches.arenas[reference.arena].window(reference)

    def exchange(self, other: Engine) -> None:
        """Exchange workers with ``other``, which was planned for the same batches.

        Turns and counters stay with each engine. Neither may be collecting.
        """
        for name in (vars(self).keys() | vars(other).keys()) - _STAYING:
            ours, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, ours)
        self.gather.attach(self)
        other.gather.attach(other)
        self.set_aside = None if self.set_aside is other else other

    # -- batches ---------------------------------------------------------------------------------

    def collect(
        self, counts: FrameCounts, timeout: float | None = None, feed: bool = True
    ) -> tuple[TensorDictBase | None, Rollouts]:
        """Collect a batch as `Gather.batch`; its memory is the caller's until no tensor is left."""
        with self._alone():
            self._check_usable("; make a new one to collect more")
            self.awaited = True
            try:
                batch, rollouts = self.gather.batch(counts, timeout, feed)
            except Exception as err:
                if self.closed:  # by a signal's handler, meanwhile
                    raise ClosedError("the collector was shut down while it collected") from err
                raise
            finally:
                self.awaited = False
            for report in rollouts.values():
                self.discards["ahead"] += report.discarded
            return batch, rollouts

    def ready(self, counts: FrameCounts, feed: bool, timeout: float | None) -> bool:
        """Tell whether `collect` would give a batch now; see `Gather.ready`."""
        with self._alone():
            self._check_usable()
            return self.gather.ready(counts, feed, timeout)

    def states(self, command: m.GetState) -> tuple[list[Any], Sequence[Undelivered]]:
        """Return the state of each worker, and the rollouts that it had made before.

        Those are copies; the rollouts are still delivered.
        """
        with self._alone(60.0):
            commands = dict.fromkeys(range(self.workers), command)
            values = self._values(tickets := self._carry_out(commands, 60.0))
            if not values and self.await_any(Deadline(60.0)):  # all were lost, and are replaced
                values = self._values(tickets := self._carry_out(commands, 60.0))
            since = {worker: tickets[worker].arrived for worker in values}
            made = self.gather.undelivered(since)
            return [values.get(worker) for worker in range(self.workers)], made

    def restart(
        self, commands: dict[int, m.Command], counts: FrameCounts, timeout: float | None = 60.0
    ) -> dict[int, Any]:
        """Carry out commands like `request_each`; throw away rollouts that were made before them.

        These count as not delivered, in ``counts`` and here.
        """
        with self._alone(timeout):
            tickets = self._carry_out(commands, timeout)
            since = {w: sys.maxsize if t.lost else t.arrived for w, t in tickets.items()}
            self.discards["reset"] += self.gather.discard(since, counts)
            return self._values(tickets)

    # -- the end ---------------------------------------------------------------------------------

    def _close(self, timeout: float, close_env: bool, raise_on_error: bool) -> None:
        """End all workers; ``close_env`` is about the environments that are set aside, if any."""
        before = self.set_aside
        try:
            super()._close(timeout, close_env or before is not None, raise_on_error)
        finally:
            if before is not None:
                before.close(timeout, close_env, raise_on_error)
