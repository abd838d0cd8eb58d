"""The stop byte of workers that share no memory with the learner."""

from __future__ import annotations

import threading
from collections.abc import Callable


class ToldByte:
    """A byte that tells somebody when it is raised or taken back; any thread may set it."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        """Begin with zero; ``tell`` is called with 1 or 0 whenever that changes."""
        self._value = 0
        self._tell = tell
        self._lock = threading.Lock()

    def __getitem__(self, index: int, /) -> int:
        """Return the byte."""
        return self._value

    def __setitem__(self, index: int, value: int, /) -> None:
        """Set the byte: anything but zero raises it."""
        raised = int(bool(value))
        with self._lock:
            if raised != self._value:
                self._value = raised
                self._tell(raised)
