"""Ways to have nodes started: what every launcher offers, and launchers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gleanrl.core.errors import ConfigError
from gleanrl.transport.handshake import Invitation
from gleanrl.transport.launchers.external import ManualLauncher, TorchrunLauncher, serve_as_rank
from gleanrl.transport.launchers.local import LocalLauncher
from gleanrl.transport.launchers.submitit import (
    DelayedLauncher,
    SubmititLauncher,
    submitit_delayed_launcher,
)


class Launcher(Protocol):
    """Starts the processes of nodes, and tells how they ended."""

    def address(self) -> str:
        """Return the address of this machine that its nodes can reach."""

    def launch(self, invitations: Sequence[Invitation]) -> None:
        """Have one node started per invitation; does not wait for them.

        Called once for all of them; and with ``on_failure="relaunch"`` again for each that takes
        the place of a lost one, in a thread of its own.
        """

    def exit_reason(self, node: int, timeout: float) -> str | None:
        """Return how node ``node`` ended, ``None`` if it runs or its end is not known.

        Args:
            node: Its index.
            timeout: Seconds to wait for the news of an end that is certain.
        """

    def stop(self, timeout: float) -> None:
        """End running nodes within ``timeout`` seconds. Idempotent, never raises."""


_LAUNCHERS: Mapping[str, Callable[[], Launcher]] = {
    "mp": LocalLauncher,
    "submitit": SubmititLauncher,
    "submitit_delayed": DelayedLauncher,
    "torchrun": TorchrunLauncher,
    "manual": ManualLauncher,
}
__all__ = ["make_launcher", "serve_as_rank", "submitit_delayed_launcher"]


def make_launcher(name: str | Launcher, slurm_kwargs: Mapping[str, Any] | None) -> Launcher:
    """Return the launcher called ``name``, or ``name`` if it is one."""
    if not isinstance(name, str):
        return name
    if name not in _LAUNCHERS:
        raise ConfigError(
            f"launcher ({name!r}) must be {', '.join(map(repr, _LAUNCHERS))} or a Launcher"
        )
    if name == "submitit":
        return SubmititLauncher(slurm_kwargs)
    return _LAUNCHERS[name]()


def check_replaces(launcher: str | Launcher) -> None:
    """Check that ``launcher`` can start nodes one by one later on."""
    for name, kind, why in (
        ("torchrun", TorchrunLauncher, "torchrun starts all ranks at once and ends with any"),
        ("submitit_delayed", DelayedLauncher, "its jobs were all submitted beforehand"),
    ):
        if launcher == name or isinstance(launcher, kind):
            raise ConfigError(
                f"on_failure='relaunch' with launcher={name!r}: it cannot start a node again, "
                f"{why}; use 'continue', or another launcher"
            )
