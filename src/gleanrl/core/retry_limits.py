"""Limits of repeated attempts."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int, is_number


class RetryLimit:
    """A number of tries, in all or within some seconds."""

    def __init__(self, most: int, within: float | None = None) -> None:
        """Allow ``most`` tries, within any ``within`` seconds if these are given."""
        self.most, self._within = most, within
        self._tries: deque[float] = deque(maxlen=max(most, 1))
        """When the last tries were made."""

    def take(self, delay: float = 0.0) -> int:
        """Count a try that begins in ``delay`` seconds; return its number, 0 if it is refused."""
        now = monotonic()
        recent = sum(self._within is None or now - at < self._within for at in self._tries)
        if recent >= self.most:
            return 0
        self._tries.append(now + delay)
        return recent + 1

    def since(self, seconds: float) -> int:
        """Return how many of the last tries were made within ``seconds``."""
        now = monotonic()
        return sum(now - at < seconds for at in self._tries)

    def __str__(self) -> str:
        """Return the argument's value as the user gave it."""
        return str(self.most if self._within is None else (self.most, self._within))


def read_retry_limit(name: str, value: Any) -> tuple[int, float | None]:
    """Return the number of tries, and the seconds within which they count (``None`` for all)."""
    most, within = value, None
    if isinstance(value, tuple) and len(value) == 2:
        most, within = value
        if not (is_number(within) and within > 0):
            raise ConfigError(f"{name} ({value!r}): the seconds must be a positive number")
        within = float(within)
    return check_int(name, most, least=0), within
