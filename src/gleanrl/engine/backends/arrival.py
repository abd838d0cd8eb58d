"""Rollouts on their way from a node, and whether they are here."""

from __future__ import annotations

from collections.abc import Sequence

from gleanrl.memory.landing import Landing
from gleanrl.rollout.pair import Transfer


class Arrival:
    """A rollout that is due.

    The end of a transfer can only be waited for, without regard to deadlines and interrupts, and
    for long if the other side is gone in the middle of it. So nobody does before the mark is there,
    which comes last.
    """

    def __init__(
        self,
        ticket: int,
        landing: Landing | None = None,
        transfers: Sequence[Transfer] = (),
        error: RuntimeError | None = None,
    ) -> None:
        """Expect a rollout.

        Args:
            ticket: What it is the answer to, and its mark.
            landing: Where it arrives; it travels with its reply if there is none.
            transfers: By which it arrives there.
            error: Why it cannot come, raised if its reply does.
        """
        self._ticket, self._landing, self._transfers = ticket, landing, transfers
        self._error = error

    @property
    def here(self) -> bool:
        """Whether `finish` would not have to wait."""
        if self._landing is None or self._landing.mark == self._ticket:
            return True
        return all(transfer.over for transfer in self._transfers)

    def finish(self) -> None:
        """See to it that it is in its window.

        Raises:
            RuntimeError: it cannot come any more.
        """
        if self._error is not None:
            raise self._error
        if self._landing is None:
            return
        for transfer in self._transfers:
            transfer.finish()
        if self._landing.mark != self._ticket:
            raise RuntimeError("it did not come whole")
        self._landing.settle()
