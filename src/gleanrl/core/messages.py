"""All that crosses between the engine and a worker: commands out, replies back.

Messages are small and typed. Every command is sent under a ticket, a number that its reply carries
back. Rollouts never travel in messages: they lie in a window of the arena (`Collect.window`) or
travel with the reply where they fit none (`Report.payload`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from gleanrl.core.episode_returns import NONE_ENDED, Ended
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
    """A window as plain numbers, from which a worker maps it."""

    slot: int
    worker: int
    envs: int
    steps: int
    blocks: tuple[Block, ...]
    arena: int = 0
    """The index of the learner's arena; a worker writes into one arena."""
    alone: bool = False
    """Whether the slab is this worker's alone, so that the space between its blocks is free."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The weights of one or more models at one version."""

    version: int
    """The label of rollouts made with them."""
    models: Mapping[str, Mapping[str, Any]]
    """Per model id: dotted name to tensor (or extra state)."""
    serial: int = 0
    """Its place among all snapshots of one learner: of two, the larger is the newer."""

    @property
    def of_environments(self) -> bool:
        """Whether a model may be a part of an environment, whose observations depend on it."""
        return any(name != "policy" for name in self.models)


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """The place of published weights, and the contents of one buffer of them."""

    offset: int
    nbytes: int
    """Bytes of one buffer."""
    entries: tuple[tuple[str, tuple[int, ...], torch.dtype, int], ...]
    """Name, shape, dtype and offset in the buffer of every tensor."""


# -- commands --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collect:
    """Collect ``window.steps`` steps into ``window``.

    Any other command overtakes those of this kind that a worker has not begun yet.
    """

    window: WindowRef
    random: bool = False
    """Act at random instead of calling the policy."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load a weight snapshot before the next rollout."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Bind:
    """Take the weights of ``model_id`` as they are published from now on."""

    model_id: str
    ref: WeightsRef


@dataclass(frozen=True, slots=True)
class Seed:
    """Seed environments, action spaces and random streams; resets all environments."""

    seed: int
    static: bool = False
    stream: int | None = None
    """The seed of the random streams; ``seed`` by default."""


@dataclass(frozen=True, slots=True)
class Place:
    """Number the worker's environments among those of all workers; before its first rollout.

    Trajectory ids are ``episode * stride + base + environment``.
    """

    base: int
    stride: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset environments: all, or those with the given indices."""

    envs: tuple[int, ...] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class GetState:
    """Return the source's state."""

    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class Verify:
    """Return how a copy of the source that loads its state differs after ``steps``, if it does."""

    place: Place
    """That of the worker."""
    steps: int
    allow_pickle: bool = False
    group: int | None = None
    """The part of a source that serves several groups of environments."""


@dataclass(frozen=True, slots=True)
class SetState:
    """Restore a state returned by `GetState`."""

    state: Mapping[str, Any]
    strict: bool = True
    allow_pickle: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """Resolve ``path`` on the source and call it, or return it if it is not callable."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Get:
    """Return the object at ``path`` on the source."""

    path: str


@dataclass(frozen=True, slots=True)
class Close:
    """Close environments and end."""


NoWeights: TypeAlias = Bind | Close
"""Commands before which a worker does not look for newer weights."""
Reading: TypeAlias = GetState | Get
"""Commands that change nothing."""
Command: TypeAlias = (
    Collect | Load | Bind | Place | Seed | Reset | GetState | Verify | SetState | Call | Get | Close
)

# -- replies ---------------------------------------------------------------------------------------


Mishap: TypeAlias = tuple[str, str]
"""A failure that collection has survived: the counter of `stats` that counts it, and the text."""


@dataclass(slots=True)  # one is made for every rollout: frozen ones take four times as long
class Report:
    """A source's report about one rollout."""

    steps: int
    """Valid steps per environment; fewer than requested only if stopped."""
    frames: int
    """Valid frames over all environments."""
    policy_version: int
    """The version of the weights that the oldest frame was made with."""
    discarded: int = 0
    """Frames stepped that could not be delivered (0 but for bounded spill overflow)."""
    drift: int = field(default=0, compare=False, kw_only=True)
    """The most steps so far that an environment was ahead of the slowest one, at the end of a
    rollout; only of environments that go on at their own pace."""
    payload: Any = None
    """The rollout, if it is not in the window; ``None`` if it is."""
    ended: Ended = field(default=NONE_ENDED, compare=False)
    """The data about ended episodes. The reward of a frame with several is their mean."""
    times: tuple[float, float, float] = field(default=(0.0, 0.0, 0.0), compare=False)
    """When the worker turned to the rollout, its source began and had collected, on the monotonic
    clock of the worker's machine."""
    seconds: tuple[float, float, float, float, float] = field(default=(0.0,) * 5, compare=False)
    """Since the last rollout: in environments and policy (measured in some rollouts, estimated from
    these in others), in all else (bookkeeping, hooks, loading weights, sending), and without a
    command; last, the part of the first that resets took."""
    mishaps: tuple[Mishap, ...] = field(default=(), compare=False)
    """Failures since the last rollout that collection has survived."""
    weights_s: float = field(default=0.0, compare=False)
    """Seconds of all else that were spent on loading weights."""
    measured: Sequence[float] | None = field(default=None, compare=False)
    """Seconds in environments, policy and resets if the source measured them; the worker then knows
    their shares, and sets all times."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is ready; this is the layout of its steps."""

    worker: int
    layout: Layout | None
    """``None`` if steps have no fixed layout (ragged or non-tensor data)."""
    ticket: int = 0
    process: tuple[int, str] = (0, "")
    """The worker's process id, and the name of its host."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The worker turns to a command other than `Collect`; the reply proper follows.

    Until then it may be in the middle of a rollout, which may take any time.
    """

    worker: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Rolled:
    """A `Collect` was carried out."""

    worker: int
    ticket: int
    report: Report


@dataclass(frozen=True, slots=True)
class Done:
    """Any other command was carried out."""

    worker: int
    ticket: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A command raised; ticket 0 if building the source did."""

    worker: int
    ticket: int
    error: BaseException


Reply: TypeAlias = Ready | Begun | Rolled | Done | Failed
