"""Collecting in a thread of its own, until told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gleanrl.core.errors import CollectorTimeout

Step = Callable[[bool], bool]
"""Collects a little, without beginning anything new if told ``False``; returns whether there is
anything more to do."""


class Background:
    """Takes step after step in a thread, can be paused, and keeps what went wrong."""

    def __init__(self, step: Step, active: Callable[[bool], object] = bool) -> None:
        """Start the thread.

        Args:
            step: Collects a little.
            active: Is told ``True`` when collection begins or goes on, ``False`` when it ends or
                rests.
        """
        self._step = step
        self._active = active
        self._state = threading.Condition()
        self._paused = 0
        self._resting = False
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gleanrl-collect", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it still collects, or will when no longer paused."""
        return self._thread.is_alive() and not self._stopping

    @property
    def error(self) -> BaseException | None:
        """What ended it, if something did."""
        return self._error

    def raise_error(self) -> None:
        """Raise what ended it, if something did."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._active(True)
            while self._may_go_on():
                feed = not self._paused
                more = self._step(feed)
                if not more and feed:
                    return
                if not more:
                    self._rest()
            while self._step(False):  # what is under way is stored, and counted
                pass
        except BaseException as err:
            self._error = err
        finally:
            self._active(False)
            with self._state:
                self._resting = True
                self._state.notify_all()

    def _may_go_on(self) -> bool:
        with self._state:
            return not self._stopping

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread, unless this is it; tell whether that came."""
        if self.inside:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def nap(self, seconds: float) -> None:
        """Let the thread wait; a pause or the end wakes it."""
        with self._state:
            self._state.wait_for(lambda: self._paused or self._stopping, seconds)

    @property
    def inside(self) -> bool:
        """Whether the calling thread is the one that collects."""
        return threading.current_thread() is self._thread

    def _rest(self) -> None:
        self._active(False)
        with self._state:
            self._resting = True
            self._state.notify_all()
            self._state.wait_for(lambda: not self._paused or self._stopping)
            self._resting = False
        self._active(True)

    @contextmanager
    def pause(self, timeout: float) -> Iterator[None]:
        """Suspend collection for the length of a block; it goes on even if the body raises.

        What was under way when the block is entered has been collected and stored.

        Raises:
            CollectorTimeout: what was under way took longer than ``timeout`` seconds.
        """
        with self._state:
            self._paused += 1
            self._state.notify_all()
        try:
            with self._state:
                if not self._state.wait_for(lambda: self._resting, timeout):
                    raise CollectorTimeout(
                        f"what was being collected did not come to an end within {timeout} s"
                    )
            self.raise_error()
            yield
        finally:
            with self._state:
                self._paused -= 1
                self._state.notify_all()

    def stop(self, timeout: float) -> None:
        """End the thread after the step it is in. Idempotent.

        Raises:
            CollectorTimeout: it takes longer than ``timeout`` seconds.
        """
        with self._state:
            self._stopping = True
            self._state.notify_all()
        if not self.join(timeout):
            raise CollectorTimeout(f"background collection did not end within {timeout} s")
