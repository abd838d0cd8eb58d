"""Collecting in the background into a replay buffer."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.flow import Flow
from gleanrl.core.errors import ClosedError, CollectorTimeout
from gleanrl.engine.background import Background
from gleanrl.engine.budget import Budget
from gleanrl.engine.engine import Engine

_NAP = 0.002
"""Seconds after which a collector that waits for the learner looks again."""


class BackgroundCollector(BaseCollector):
    """A collector that can be started: it goes on by itself in a thread of its own."""

    _hooks_here = True
    """Whether hooks run in this process, not in workers."""

    _engine: Engine
    _budget: Budget
    _timeout: float | None
    _background: Background | None = None
    _ending = False
    _announced = False
    _flow: Flow = Flow(None)
    replay_buffer: Any

    def _collect(self, feed: bool = True) -> deque[Any]:
        """Collect a batch; return what is to be delivered for it."""
        raise NotImplementedError

    def _announce(self) -> None:
        """Call the hook that runs before a batch is collected, once for each."""
        if self._hooks_here and self.pre_collect_hook is not None and not self._announced:
            self.pre_collect_hook()
        self._announced = True

    def start(self) -> None:
        """Collect into the replay buffer in the background, until told to stop.

        Weights can be updated and everything can be asked meanwhile. What goes wrong is raised by
        the next call of anything, and shows in ``stats()["failed"]``.

        Raises:
            RuntimeError: there is no replay buffer.
            ClosedError: after `shutdown`.
        """
        if self.replay_buffer is None:
            raise RuntimeError("start() collects into a replay buffer: give replay_buffer=")
        with self._engine.turn(None):
            self._engine.check()
            if not self.is_running():
                self._prepare_background()
                flow = Flow.of(self.replay_buffer)
                flow.begin()
                self._flow = flow
                # The thread must not keep the collector alive.
                step = partial(_background_step, weakref.ref(self))
                self._background = Background(step, flow.running)

    def is_running(self) -> bool:
        """Tell whether the collector collects in the background (also while paused)."""
        return self._background is not None and self._background.running

    def pause(self) -> AbstractContextManager[None]:
        """Suspend background collection for the length of a ``with`` block.

        Inside, everything that was collected is in the buffer and nothing is under way. Collection
        goes on afterwards, also if the body raises. Where ``total_frames`` were reached there is
        nothing to suspend, and nothing happens.

        Raises:
            RuntimeError: the collector was not started, or a hook or an environment of its own
                asks for this.
        """
        if self._engine.failure is not None:
            raise self._engine.failure
        if self._background is None or self._engine.closed:
            raise RuntimeError("pause() suspends what start() began; it is not running")
        if self._background.inside:
            raise RuntimeError("pause() was called from inside the collection it would wait for")
        return self._background.pause(60.0 if self._timeout is None else 2 * self._timeout)

    def _settle(self) -> None:
        """Take in what workers have in hand: it is in the buffer, or will be."""
        while not self._engine.idle:
            self._collect(feed=False)

    def _prepare_background(self) -> None:
        """Take care that the learner's policy is not the one that acts in the background."""

    def _check_not_started(self) -> None:
        if self.is_running():
            raise RuntimeError(
                "this collector collects in the background (start()): there is nothing to iterate "
                "over; sample from its replay buffer"
            )

    def _step_in_background(self, feed: bool) -> bool:
        """Collect what has come; return whether there is anything more to do."""
        held = False
        try:
            with self._engine.turn(None):
                held = feed and not self._budget.exhausted and self._flow.holds(self._budget)
                feed = feed and not held
                if feed and self._budget.wants_more:
                    self._announce()
                ready = self._engine.ready(self._budget, feed, self._timeout)
                if self._ending:  # gathering may have allowed workers to go on
                    self._engine.backend.stop_byte[0] = 1
                if ready:
                    self._collect(feed)
                    return True
                more = feed and self._budget.wants_more  # all who were asked may have been lost
                if self._engine.idle and not (held or more):
                    return False
        except BaseException as err:
            if self._ending and isinstance(err, ClosedError):  # a rollout was cut short by that
                return not self._engine.closed
            self._engine.failure = err
            raise
        if not held:
            self._engine.backend.wait(0.1 if self._ending else 1.0)
        elif self._background is not None:
            self._background.nap(_NAP)
        return True

    def _flow_stats(self) -> dict[str, float | bool]:
        return self._flow.stats(self.is_running())

    def _stop_background(self, timeout: float) -> BaseException | None:
        """End the thread; return what went wrong in it."""
        if self._background is not None and not self._engine.closed:
            self._ending = True
            self._engine.backend.stop_byte[0] = 1  # a rollout under way ends after its step
            try:
                self._background.stop(timeout)
            except CollectorTimeout as err:
                self._engine.failure = self._engine.failure or err
        return None if self._engine.closed else self._engine.failure


def _background_step(collector: weakref.ref[BackgroundCollector], feed: bool) -> bool:
    found = collector()
    return False if found is None else found._step_in_background(feed)
