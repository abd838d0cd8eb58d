"""Collection in the background: a thread, and the steps that fill a replay buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from gleanrl.core.errors import ClosedError, CollectorTimeout
from gleanrl.engine.engine import Engine
from gleanrl.engine.gather import FrameCounts
from gleanrl.memory.replay.buffer import ReplayBuffer
from gleanrl.memory.replay.limiter import poll_interval

Step = Callable[[bool], bool]
"""Collects a little, and begins nothing new if called with ``False``; returns whether there is
anything more to do."""
Active = Callable[[bool], object]


class Background:
    """Takes step after step in a thread, can be paused, and keeps the error that ended it."""

    thread: threading.Thread | None = None
    error_raised = False
    """Whether `pause` has raised the error."""

    def __init__(self) -> None:
        """Prepare; nothing runs before `begin`."""
        self._state = threading.Condition()
        self._paused = 0
        self._resting = self._stopping = False
        self._error: BaseException | None = None

    def begin(self, step: Step, active: Active = bool) -> None:
        """Start the thread, which alone refers to ``step``.

        ``active`` is called with ``True`` when collection begins or continues, with ``False`` when
        it ends or rests.
        """
        self._resting = self._stopping = False
        self.thread = threading.Thread(
            target=self._run, args=(step, active), name="gleanrl-collect", daemon=True
        )
        active(True)
        self.thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread collects, or will after a pause."""
        return self.thread is not None and self.thread.is_alive() and not self._stopping

    @property
    def busy(self) -> bool:
        """Whether another thread may still store what was counted."""
        alive = self.thread is not None and self.thread.is_alive()  # not in a forked child
        return alive and not self._resting and not self.inside

    @property
    def paused(self) -> bool:
        """Whether a block that suspends the thread is running."""
        return self._paused > 0

    def _run(self, step: Step, active: Active) -> None:
        try:
            while not self._stopping:
                feed = not self._paused
                more = step(feed)
                if not more and feed:
                    return
                if not more:
                    active(False)
                    with self._state:
                        self._rests()
                        self._state.wait_for(lambda: not self._paused or self._stopping)
                        self._resting = False
                    active(True)
            while step(False):  # what is under way is stored, and counted
                pass
        except BaseException as err:
            self._error = err
        finally:
            active(False)
            with self._state:
                self._rests()

    def _rests(self) -> None:
        self._resting = True
        self._state.notify_all()

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread unless it calls this itself; return whether it ended."""
        if self.thread is None or self.inside:
            return True
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Let the thread wait; a pause or the end wakes it."""
        with self._state:
            self._state.wait_for(lambda: self._paused or self._stopping, seconds)

    @property
    def inside(self) -> bool:
        """Whether the calling thread is the one that collects."""
        return threading.current_thread() is self.thread

    @contextmanager
    def suspended(self, timeout: float) -> Iterator[None]:
        """Suspend collection during a block; collection continues even if the body raises.

        What was under way when the block is entered has been collected and stored.

        Raises:
            CollectorTimeout: the step under way took longer than ``timeout`` seconds.
        """
        with self._state:
            self._paused += 1
            self._state.notify_all()
        try:
            with self._state:
                if not self._state.wait_for(lambda: self._resting, timeout):
                    raise CollectorTimeout(
                        f"what was being collected did not come to an end within {timeout:.4g} s"
                    )
            if self._error is not None:
                self.error_raised = True
                raise self._error
            yield
        finally:
            with self._state:
                self._paused -= 1
                self._state.notify_all()

    def halt(self, timeout: float) -> None:
        """End the thread after its step; `CollectorTimeout` if that takes too long. Idempotent."""
        # Also in a forked child, which finds the lock as it was.
        if self.thread is None or not self.thread.is_alive():
            return
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if not self.join(timeout):
            raise CollectorTimeout(f"background collection did not end within {timeout:.4g} s")


class BackgroundFilling(Background):
    """Fills a collector's replay buffer in a thread, between `start` and `shutdown`.

    Only the thread refers to the collection, so that this object can be part of a finalizer.
    """

    _buffer: ReplayBuffer | None = None
    """The replay buffer; buffers of other libraries have no rate limit."""
    _held_since: float | None = None
    """The time at which the collector began to wait for the learner, by the rate limit."""
    _ending = False

    def __init__(self, engine: Engine, counts: FrameCounts, timeout: float | None) -> None:
        super().__init__()
        self._engine, self._counts, self._timeout = engine, counts, timeout

    def start(self, buffer: Any, collection: Any) -> None:
        """Fill ``buffer`` from now on, by a `Collection`."""
        self._buffer = buffer if isinstance(buffer, ReplayBuffer) else None
        active: Active = bool
        if self._buffer is not None:
            self._buffer.fill_error = None
            if (limiter := self._buffer.limiter) is not None:
                limiter.begin(self._buffer.storage)
                active = partial(limiter.running, self._buffer.storage)
        self.begin(partial(self._step, collection), active)

    def is_running(self) -> bool:
        """Tell whether the collector collects in the background (also while paused)."""
        # Asked for each batch: the common case is the first.
        return self.thread is not None and self.running and self._engine.failure is None

    def check_not_running(self) -> None:
        """Raise `RuntimeError` if the collector collects in the background."""
        if self.is_running():
            raise RuntimeError(
                "this collector collects in the background (start()): there is nothing to iterate "
                "over; sample from its replay buffer"
            )

    def pause(self) -> AbstractContextManager[None]:
        """Suspend background collection for the length of a ``with`` block.

        Inside the block all collected frames are in the buffer, and no rollout is under way.
        Collection continues after the block, also if its body raises. After ``total_frames`` the
        call has no effect.

        Raises:
            RuntimeError: the collector was not started, or a hook or an environment of its own
                asks for this.
        """
        self._engine.raise_failure()
        if self.thread is None or self._engine.closed:
            raise RuntimeError("pause() suspends what start() began; it is not running")
        if self.inside:
            raise RuntimeError("pause() was called from inside the collection it would wait for")
        return self.suspended(60.0 if self._timeout is None else 2 * self._timeout)

    def stats(self) -> dict[str, float | bool]:
        """Return the entries of ``stats()`` about the rate limit."""
        if self._buffer is None or self._buffer.limiter is None:
            return {}
        return {
            "samples_per_insert": self._buffer.limiter.ratio(self._buffer.storage),
            "waiting_for_learner": self._held_since is not None and self.running,
        }

    def stop(self, timeout: float) -> BaseException | None:
        """End the thread; return the error that it met."""
        engine = self._engine
        if engine.closed:
            return None
        if self.thread is not None:
            self._ending = True
            engine.backend.stop_byte[0] = 1  # a rollout under way ends after its step
            try:
                self.halt(timeout)
            except CollectorTimeout as err:
                engine.failure = engine.failure or err
        return engine.failure

    def end(self, timeout: float) -> None:
        """End the thread, then the workers, even if the thread waits for a worker that hangs."""
        self.stop(timeout)
        self._engine.close(timeout)
        self.join(1.0)

    def _step(self, collection: Any, feed: bool) -> bool:
        """Collect the rollouts that have arrived; return whether there is more to do."""
        held = False
        try:
            with self._engine.turn(None):
                held = feed and not self._counts.exhausted and self._holds()
                feed = feed and not held
                if feed and self._counts.wants_more:
                    collection.announce()
                ready = self._engine.ready(self._counts, feed, self._timeout)
                if self._ending:  # gathering may have allowed workers to continue
                    self._engine.backend.stop_byte[0] = 1
                if ready:
                    collection.collect(feed)
                    return True
                more = feed and self._counts.wants_more  # all who were asked may have been lost
                if self._engine.gather.idle and not (held or more):
                    return False
        except BaseException as err:
            if self._ending and isinstance(err, ClosedError):  # a rollout was cut short by that
                return not self._engine.closed
            self._engine.failure = err
            if self._buffer is not None:  # for those who find nothing to sample
                self._buffer.fill_error = err
            collection.failed()
            raise
        if not held:
            self._engine.wait(0.1 if self._ending else 1.0)
        elif self._held_since is not None:
            self.wait(poll_interval(time.monotonic() - self._held_since))
        return True

    def _holds(self) -> bool:
        if self._buffer is not None and self._buffer.limiter is not None:
            under_way = self._counts.under_way
            held = self._buffer.limiter.holds(self._buffer.storage, under_way)
            self._held_since = (self._held_since or time.monotonic()) if held else None
        return self._held_since is not None
