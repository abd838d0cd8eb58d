"""The time that several waits have together."""

from __future__ import annotations

import math
from time import monotonic


class Deadline:
    """A moment some seconds from now, or never."""

    __slots__ = ("end", "seconds")

    def __init__(self, seconds: float | None, since: float | None = None) -> None:
        """Be ``seconds`` after ``since`` (of `time.monotonic`), which is now by default."""
        self.seconds = seconds
        start = monotonic() if since is None else since
        self.end = math.inf if seconds is None else start + seconds

    @property
    def left(self) -> float:
        """The seconds until then, at least 0; infinite for never."""
        return max(0.0, self.end - monotonic())

    @property
    def timeout(self) -> float | None:
        """The seconds until then, at least 0; ``None`` for never."""
        return None if self.seconds is None else self.left

    @property
    def expired(self) -> bool:
        """Whether the moment has come."""
        return monotonic() >= self.end
