"""Gymnasium spaces as fields and specs.

A space becomes one leaf per array in it: ``Dict`` and ``Tuple`` spaces become nested keys.
Observation leaves of a ``Dict`` space stand at the root of the batch; everything else under
``"observation"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import ACTION, OBSERVATION, Key
from gleanrl.core.layout import Field
from gleanrl.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    OneHot,
    TensorSpec,
)

Path: TypeAlias = tuple[str | int, ...]
RESERVED = frozenset({"action", "reward", "done", "terminated", "truncated", "next", "collector"})
"""First parts of keys that a batch needs for itself."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space."""

    key: Key
    path: Path
    """How to find it in a value of the space: dictionary keys and tuple indices."""
    space: gym.Space[Any]

    def of(self, value: Any) -> Any:
        """Return this leaf's part of ``value``."""
        for part in self.path:
            value = value[part]
        return value


@singledispatch
def _walk(space: gym.Space[Any], key: Key, path: Path) -> list[Leaf]:
    raise ConfigError(
        f"space {space} at {'.'.join(key)!r} has no fixed shape, so it cannot be preallocated; "
        "wrap the environment to return arrays, or give it as a TensorDict environment"
    )


@_walk.register
def _(space: spaces.Dict, key: Key, path: Path) -> list[Leaf]:
    found: list[Leaf] = []
    for name, inner in space.spaces.items():
        found += _walk(inner, (*key, str(name)), (*path, name))
    return found


@_walk.register(spaces.Tuple)
def _(space: spaces.Tuple[Any], key: Key, path: Path) -> list[Leaf]:
    found: list[Leaf] = []
    for index, inner in enumerate(space.spaces):
        found += _walk(inner, (*key, str(index)), (*path, index))
    return found


@_walk.register(spaces.Box)
@_walk.register(spaces.Discrete)
@_walk.register(spaces.MultiDiscrete)
@_walk.register(spaces.MultiBinary)
def _(space: gym.Space[Any], key: Key, path: Path) -> list[Leaf]:
    return [Leaf(key, path, space)]


def observation_leaves(space: gym.Space[Any]) -> tuple[Leaf, ...]:
    """Return the leaves of an observation space.

    Raises:
        ConfigError: a space without fixed shape, or a ``Dict`` entry with a reserved name.
    """
    root: Key = () if isinstance(space, spaces.Dict) else OBSERVATION
    found = tuple(_walk(space, root, ()))
    taken = sorted({leaf.key[0] for leaf in found} & RESERVED)
    if taken:
        raise ConfigError(
            f"the observation space has entries named {taken}, which a batch needs for itself; "
            "rename them with a wrapper (gymnasium.wrappers.TransformObservation)"
        )
    return found


def action_leaves(space: gym.Space[Any]) -> tuple[Leaf, ...]:
    """Return the leaves of an action space, under ``"action"``.

    Raises:
        ConfigError: a space without fixed shape, or with nothing in it.
    """
    found = tuple(_walk(space, ACTION, ()))
    if not found:
        raise ConfigError(
            f"the action space {space} has nothing to choose; "
            "give the environment an action, such as Discrete(1)"
        )
    return found


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a numpy dtype.

    Raises:
        ConfigError: torch has no such dtype.
    """
    try:
        return torch.from_numpy(np.zeros(1, dtype)).dtype
    except TypeError as err:
        raise ConfigError(f"torch has no dtype for {np.dtype(dtype)}") from err


def leaf_field(leaf: Leaf, dtype: torch.dtype | None = None) -> Field:
    """Return the field an observation leaf fills; floats are cast to ``dtype`` if given."""
    own = torch_dtype(leaf.space.dtype)
    if dtype is not None and own.is_floating_point:
        own = dtype
    return Field(leaf.key, tuple(leaf.space.shape or ()), own)


@singledispatch
def space_spec(space: gym.Space[Any], categorical: bool = True) -> TensorSpec:
    """Return the spec of one array space; ``categorical=False`` makes `Discrete` one-hot."""
    raise ConfigError(f"no tensor spec for space {space}")


@space_spec.register
def _(space: spaces.Box, categorical: bool = True) -> TensorSpec:
    low, high = torch.from_numpy(space.low.copy()), torch.from_numpy(space.high.copy())
    return Bounded(low, high, space.shape, dtype=low.dtype)


@space_spec.register
def _(space: spaces.Discrete, categorical: bool = True) -> TensorSpec:
    return Categorical(int(space.n)) if categorical else OneHot(int(space.n), dtype=torch.int64)


@space_spec.register
def _(space: spaces.MultiDiscrete, categorical: bool = True) -> TensorSpec:
    return MultiCategorical(space.nvec.tolist())


@space_spec.register
def _(space: spaces.MultiBinary, categorical: bool = True) -> TensorSpec:
    return Binary(shape=space.shape, dtype=torch.int8)


Decoder: TypeAlias = Callable[[np.ndarray[Any, Any]], Sequence[Any]]


def action_decoder(space: gym.Space[Any], categorical: bool = True) -> Decoder:
    """Return what turns one row of stored actions ``[P, ...]`` into ``P`` values of ``space``.

    What environments receive is theirs: arrays are copies, never views of the batch.
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return _discrete_decoder(start, categorical)
    dtype = space.dtype
    if isinstance(space, spaces.MultiDiscrete) and np.any(space.start):
        offset = space.start
        return lambda row: list(row.astype(dtype) + offset)
    if space.shape == ():
        return lambda row: _scalars(row.astype(dtype))
    return lambda row: list(row.astype(dtype))


def _scalars(values: np.ndarray[Any, Any]) -> Sequence[Any]:
    """Return arrays without dimensions: iterating would give numpy scalars, no values of a Box."""
    return [values[env, ...] for env in range(len(values))]


def _discrete_decoder(start: int, categorical: bool) -> Decoder:
    if categorical and start == 0:
        return lambda row: row.tolist()
    if categorical:
        return lambda row: (row + start).tolist()
    return lambda row: (row.argmax(-1) + start).tolist()


def assemble(leaves: Sequence[Leaf], parts: Sequence[Any], space: gym.Space[Any]) -> Any:
    """Put one environment's leaf values together as a value of a nested ``space``."""
    values: Mapping[Path, Any] = {leaf.path: part for leaf, part in zip(leaves, parts, strict=True)}
    return _rebuild(space, (), values)


def _rebuild(space: gym.Space[Any], path: Path, values: Mapping[Path, Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {k: _rebuild(s, (*path, k), values) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_rebuild(s, (*path, i), values) for i, s in enumerate(space.spaces))
    return values[path]
