"""All that crosses between the engine and a worker: commands out, replies back.

Messages are small and typed. Tensors never travel in them: rollouts lie in a window of the arena
(`Collect.window`) or behind a `Payload` that the engine opens when it accepts the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gleanrl.core.layout import Field, Layout


@dataclass(frozen=True, slots=True)
class Block:
    """Where one field of a window lies in the arena (all numbers in bytes)."""

    field: Field
    offset: int
    env_stride: int
    time_stride: int


@dataclass(frozen=True, slots=True)
class WindowRef:
    """A window as plain numbers: what a worker needs to map it."""

    slot: int
    worker: int
    envs: int
    steps: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one or more models at one version."""

    version: int
    models: Mapping[str, Mapping[str, Any]]
    """Per model id: dotted name to tensor (or extra state)."""


# -- commands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collect:
    """Collect ``window.steps`` steps into ``window``."""

    sequence: int
    window: WindowRef
    random: bool = False
    """Act at random instead of calling the policy."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load a weight snapshot before the next rollout."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Seed:
    """Seed environments, action spaces and random streams; resets all environments."""

    seed: int
    static: bool = False


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset environments: all, or those whose index is given."""

    envs: tuple[int, ...] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GetState:
    """Return the source's state."""


@dataclass(frozen=True, slots=True)
class SetState:
    """Restore a state returned by `GetState`."""

    state: Mapping[str, Any]
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    """Resolve ``path`` on the source and call it, or return it if it is not callable."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Get:
    """Return what ``path`` names on the source."""

    path: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close environments and end."""


Command: TypeAlias = Collect | Load | Seed | Reset | GetState | SetState | Call | Get | Close

# -- replies ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Payload:
    """A handle on rollout data that is not in the window; `Backend.open` returns the data."""

    handle: Any


@dataclass(frozen=True, slots=True)
class Report:
    """What a source says of one rollout."""

    steps: int
    """Valid steps per environment; less than asked for only if stopped."""
    frames: int
    """Valid frames over all environments."""
    policy_version: int
    discarded: int = 0
    """Frames stepped that could not be delivered (0 but for bounded spill overflow)."""
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is up; this is what its steps look like."""

    worker: int
    layout: Layout | None
    """``None`` if steps have no fixed layout (ragged or non-tensor data)."""


@dataclass(frozen=True, slots=True)
class Rolled:
    """A `Collect` was carried out."""

    worker: int
    sequence: int
    report: Report


@dataclass(frozen=True, slots=True)
class Done:
    """Any other command was carried out."""

    worker: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A command raised."""

    worker: int
    error: BaseException


Reply: TypeAlias = Ready | Rolled | Done | Failed

__all__ = [
    "Block",
    "Call",
    "Close",
    "Collect",
    "Command",
    "Done",
    "Failed",
    "Get",
    "GetState",
    "Load",
    "Payload",
    "Ready",
    "Reply",
    "Report",
    "Reset",
    "Rolled",
    "Seed",
    "SetState",
    "Snapshot",
    "WindowRef",
]
