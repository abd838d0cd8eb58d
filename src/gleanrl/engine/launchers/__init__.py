"""Ways to have nodes started: a launcher gets invitations, and each ends as a node that joins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gleanrl.core.errors import ConfigError
from gleanrl.engine.launchers.launcher import Launcher
from gleanrl.engine.launchers.local import LocalLauncher


def make_launcher(name: str | Launcher, slurm_kwargs: Mapping[str, Any] | None) -> Launcher:
    """Return the launcher called ``name``, or ``name`` if it is one.

    Raises:
        ConfigError: an unknown name.
    """
    if not isinstance(name, str):
        return name
    if name == "mp":
        return LocalLauncher()
    raise ConfigError(
        f"launcher ({name!r}) must be 'mp', 'submitit', 'submitit_delayed' or 'torchrun'"
    )
