"""Whose turn it is: a lock that several threads get in the order in which they asked."""

from __future__ import annotations

import threading
from collections import deque

from gleanrl.core.errors import CollectorTimeout
from gleanrl.engine.interrupts import interruptible


class Turns:
    """A reentrant lock, first come, first served.

    With an ordinary lock, a thread that collects in the background and takes it again at once would
    keep everybody else out.
    """

    def __init__(self) -> None:
        """Start with nobody holding it."""
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._held = False
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, timeout: float | None) -> bool:
        """Wait for one's turn; return ``False`` if it did not come within ``timeout`` seconds."""
        me = threading.get_ident()
        with self._mutex:
            if self._owner == me:
                self._depth += 1
                return True
            if not self._held:
                self._held, self._owner, self._depth = True, me, 1
                return True
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        given = False
        try:
            given = interruptible(gate.acquire, True, -1 if timeout is None else timeout)
        finally:
            with self._mutex:
                if not given and gate in self._waiting:
                    self._waiting.remove(gate)
                else:  # handed over, perhaps in the very moment of giving up
                    self._owner, self._depth = me, 1
                    if not given:
                        self._pass_on()
        return given

    def release(self) -> None:
        """Give the turn to whoever asked next."""
        with self._mutex:
            self._depth -= 1
            if self._depth == 0:
                self._pass_on()

    def _pass_on(self) -> None:
        self._owner = None
        if self._waiting:
            self._waiting.popleft().release()
        else:
            self._held = False


class Turn:
    """One turn: from the beginning of a ``with`` block to its end."""

    __slots__ = ("_timeout", "_turns")

    def __init__(self, turns: Turns, timeout: float | None) -> None:
        """Wait ``timeout`` seconds for it, as long as it takes with ``None``."""
        self._turns, self._timeout = turns, timeout

    def __enter__(self) -> None:
        """Wait for it.

        Raises:
            CollectorTimeout: another thread did not finish in time.
        """
        if not self._turns.acquire(self._timeout):
            raise CollectorTimeout(
                f"another thread has been using the collector for {self._timeout} s"
            )

    def __exit__(self, *error: object) -> None:
        self._turns.release()
