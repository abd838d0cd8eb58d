"""What every launcher offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gleanrl.rollout.handshake import Invitation


class Launcher(Protocol):
    """Starts the processes of nodes, and knows what became of them."""

    def address(self) -> str:
        """Return the address of this machine that its nodes can reach."""
        ...

    def launch(self, invitations: Sequence[Invitation]) -> None:
        """Have one node started per invitation; does not wait for them.

        Called once for all of them; and with ``on_failure="relaunch"`` again for each that takes
        the place of a lost one, in a thread of its own.
        """
        ...

    def fate(self, node: int, timeout: float) -> str | None:
        """Return how node ``node`` ended, ``None`` if it runs or nobody knows.

        Args:
            node: Its index.
            timeout: Seconds to wait for the news of an end that is certain.
        """
        ...

    def stop(self, timeout: float) -> None:
        """End what still runs within ``timeout`` seconds. Idempotent, never raises."""
        ...
