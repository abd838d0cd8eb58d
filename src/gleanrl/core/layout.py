"""The layout of one step: keys, shapes and dtypes, known before the first step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, format_key


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return the numpy dtype of a torch dtype, ``None`` if numpy has none (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


@dataclass(frozen=True, slots=True)
class Field:
    """One entry of a step."""

    key: Key
    """Its key in the delivered batch, ``("next", "reward")`` for example."""
    shape: tuple[int, ...]
    """Shape of one frame, without environment and time dimensions."""
    dtype: torch.dtype
    device: torch.device | None = field(default=None, kw_only=True)
    """Where it is stored; ``None`` for memory of the host, which workers can share."""

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}" + (f" on {self.device}" if self.device else "")

    @property
    def nbytes(self) -> int:
        """Bytes of one frame."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The same dtype of numpy."""
        dtype = numpy_dtype(self.dtype)
        if dtype is None:
            raise ConfigError(
                f"{format_key(self.key)} is {self.dtype}, which numpy does not have; entries of "
                "info, and all that vectorised environments in NEXT_STEP mode and EnvPools are "
                "collected with, pass through numpy: make it torch.float32, say"
            )
        return dtype


@dataclass(frozen=True, slots=True)
class DoneGroup:
    """The end-of-episode flags that stand side by side under one prefix.

    Each flag has ``shape`` with a trailing 1 per frame, as TensorDict environments use it.
    """

    prefix: Key
    """``()`` for ``"done"``, ``("agents",)`` for ``("agents", "done")``."""
    shape: tuple[int, ...] = (1,)
    truncated: bool = True
    """Whether the environment tells truncation from termination."""

    def keys(self) -> tuple[Key, ...]:
        """Return the keys of the group's flags, ``done`` first."""
        names = ("done", "terminated", "truncated") if self.truncated else ("done", "terminated")
        return tuple((*self.prefix, name) for name in names)


@dataclass(frozen=True, slots=True)
class Group:
    """A nested part of a step whose batch has further dimensions (such as one for agents)."""

    key: Key
    """Its key in the delivered batch."""
    shape: tuple[int, ...]
    """The dimensions of its batch after those of environments and time."""
    names: tuple[str | None, ...]
    """Their names."""


@dataclass(frozen=True, slots=True)
class EnvLayout:
    """The fields that environments read and write; keys are root keys, without ``"next"``."""

    batch_shape: tuple[int, ...]
    """Shape of the environment batch; ``()`` for a single environment."""
    observations: tuple[Field, ...]
    """Written at the root and under ``"next"``: observations, state, requested info entries."""
    actions: tuple[Field, ...]
    """Read by the environment."""
    rewards: tuple[Field, ...]
    """Written under ``"next"`` only."""
    dones: tuple[DoneGroup, ...] = field(default=(DoneGroup(()),))
    infos: Collection[Key] = ()
    """Those of ``observations`` that a policy gets only if it names them: ``info`` entries."""
    groups: tuple[Group, ...] = ()
    """Nested parts with a batch size of their own, at the root and under ``"next"``."""
    passed: Collection[Key] = ()
    """Those of ``observations`` that pass on what a policy writes under ``"next"``."""

    @property
    def device(self) -> torch.device | None:
        """Where results of steps are stored; ``None`` for memory of the host."""
        return self.rewards[0].device if self.rewards else None

    @property
    def num_envs(self) -> int:
        """Environments stepped at once (1 for a single one)."""
        return math.prod(self.batch_shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Every field of one delivered step."""

    batch_shape: tuple[int, ...]
    fields: tuple[Field, ...]
    steps: int | None = None
    """Steps of every rollout, if only the source decides that (a collector in a worker)."""
    environments: int | None = None
    """How many there are, where that is not `num_envs`: the rollouts of a collector's own workers
    may be delivered in turn, or one after another in time."""
    groups: tuple[Group, ...] = ()
    """Nested parts with a batch size of their own; all others have that of the batch."""

    @property
    def num_envs(self) -> int:
        """Rows of a rollout: environments stepped at once (1 for a single one)."""
        return math.prod(self.batch_shape)

    @property
    def all_envs(self) -> int:
        """The number of environments, for seeds and trajectory ids."""
        return self.num_envs if self.environments is None else self.environments


def first_difference(one: Iterable[Field], other: Iterable[Field]) -> str | None:
    """Say for an error which entry differs, and how; ``None`` if all entries are alike."""
    ones, others = ({field.key: field for field in fields} for fields in (one, other))
    for key in [*ones, *others]:
        if ones.get(key) != others.get(key):
            found, expected = (each.get(key, "missing") for each in (ones, others))
            return f"{format_key(key)} is {found} instead of {expected}"
    return None
