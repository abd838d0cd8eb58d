"""Replacements of lost workers: their number, and the commands that they receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError
from gleanrl.core.retry_limits import RetryLimit
from gleanrl.core.streams import renewed
from gleanrl.engine.session import Session

_SEEDS = 1 << 31
"""Seeds that every kind of environment takes."""
_BACK_OFF_S = 0.1, 10.0
"""The shortest and the longest delay of a replacement that follows others soon."""
_SOON_S = 10.0
"""Replacements of one worker within this time are delayed, each twice as long as the last."""


class Replacements:
    """Replaces lost workers.

    A replacement is a new worker, without any state of the lost one.
    """

    def __init__(
        self,
        session: Session,
        allowed: tuple[int, float | None],
        commands: Callable[[int], list[m.Command]],
    ) -> None:
        """Replace workers of ``session`` from now on, including workers lost before.

        Each may be replaced so often, in so many seconds, as is ``allowed``. ``commands`` returns
        those for the replacement of a worker in its new life; it must not keep the session alive.
        """
        self._session, self._commands = session, commands
        self._backend: Any = session.backend
        self._allowed = [RetryLimit(*allowed) for _ in range(session.workers)]
        session.replacing = self
        for worker in set(range(session.workers)) - set(session.alive):
            self.replace(worker)

    def replace(self, worker: int) -> str:
        """Start a replacement unless the limit is reached; return the end of the warning.

        Never waits. The worker is `Session.joining` from then on.
        """
        allowed, (least, most) = self._allowed[worker], _BACK_OFF_S
        soon = allowed.since(_SOON_S)
        delay = min(least * 2 ** (soon - 1), most) if soon else 0.0
        number = allowed.take(delay)
        if not number:
            return f", for good (max_relaunches={allowed})"
        # First: an interrupt meanwhile must not have it come unexpected.
        self._session.joining.add(worker)
        self._backend.replace(worker, self._session.lives[worker] + 1, delay)
        return f" until replacement {number} of {allowed.most} has joined"

    def welcome(self, reply: m.Ready) -> list[m.Command]:
        """Return the commands that bring a replacement up to date, before any other command.

        Raises:
            GleanError: its steps do not look like those of the one that was lost.
        """
        session, worker = self._session, reply.worker
        if reply.layout != (before := session.layouts[worker]):
            raise GleanError(f"its steps are {reply.layout}, those of the lost one were {before}")
        session.lives[worker] += 1
        return self._commands(worker)


def reseeded(seed: m.Seed, life: int) -> m.Seed:
    """Return the seed of a worker that was lost ``life`` times since it would have got ``seed``."""
    stream = renewed(seed.seed if seed.stream is None else seed.stream, life)
    return m.Seed(stream % _SEEDS, seed.static, stream)
