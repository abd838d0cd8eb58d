"""Gymnasium spaces as fields, specs and actions.

A space becomes one leaf per array in it: ``Dict`` and ``Tuple`` spaces become nested keys.
Observation leaves of a ``Dict`` space are at the root of the batch; everything else is under
``"observation"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from gleanrl.core.errors import ConfigError, PolicyError
from gleanrl.core.keys import ACTION, OBSERVATION, Key, format_key
from gleanrl.core.layout import Field
from gleanrl.core.protocols import Spec
from gleanrl.core.window import Array, Window
from gleanrl.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)

Path: TypeAlias = tuple[str | int, ...]
RESERVED = frozenset({"action", "reward", "done", "terminated", "truncated", "next", "collector"})
"""First parts of keys that a batch needs for itself."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space."""

    key: Key
    path: Path
    """Its path in a value of the space: dictionary keys and tuple indices."""
    space: gym.Space[Any]

    def of(self, value: Any) -> Any:
        """Return this leaf's part of ``value``."""
        for part in self.path:
            value = value[part]
        return value


def space_leaves(space: gym.Space[Any], key: Key, path: Path = ()) -> list[Leaf]:
    """Return the leaves of a space that is under ``key``."""
    parts: Iterable[tuple[str | int, gym.Space[Any]]]
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
        names = [str(name) for name in space.spaces]
        wrong = [n for n in names if n.startswith("_") or names.count(n) > 1]
        if wrong:
            raise ConfigError(
                f"space {space} has entries called {wrong}: names must differ as strings, and must "
                "not begin with an underscore; rename them with a wrapper"
            )
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        torch_dtype(space)
        return [Leaf(key, path, space)]
    else:
        raise ConfigError(
            f"space {space} at {'.'.join(key)!r} has no fixed shape, so it cannot be preallocated; "
            "wrap the environment to return arrays, or give it as a TensorDict environment"
        )
    return [
        leaf
        for name, inner in parts
        for leaf in space_leaves(inner, (*key, str(name)), (*path, name))
    ]


def observation_leaves(space: gym.Space[Any]) -> tuple[Leaf, ...]:
    """Return the leaves of an observation space."""
    root: Key = () if isinstance(space, spaces.Dict) else OBSERVATION
    leaves = tuple(space_leaves(space, root))
    taken = sorted({leaf.key[0] for leaf in leaves} & RESERVED)
    if taken:
        raise ConfigError(
            f"the observation space has entries named {taken}, which a batch needs for itself; "
            "rename them with a wrapper (gymnasium.wrappers.TransformObservation)"
        )
    return leaves


def torch_dtype(space: gym.Space[Any]) -> torch.dtype:
    """Return the torch dtype of an array space."""
    try:
        return torch.from_numpy(np.zeros(1, space.dtype)).dtype
    except (TypeError, ValueError) as err:
        dtype = np.dtype(space.dtype)
        cure = "a dtype that torch has, such as float32"
        if not dtype.isnative:
            cure = f"the machine's own byte order: {dtype.newbyteorder('=')}"
        raise ConfigError(
            f"space {space} has dtype {dtype.str}, which torch does not have; declare {cure}"
        ) from err


def leaf_field(leaf: Leaf, dtype: torch.dtype | None = None) -> Field:
    """Return the field an observation leaf fills; floats are cast to ``dtype`` if given."""
    own = torch_dtype(leaf.space)
    if dtype is not None and own.is_floating_point:
        own = dtype
    return Field(leaf.key, tuple(leaf.space.shape or ()), own)


def space_spec(space: gym.Space[Any], categorical: bool = True) -> TensorSpec:
    """Return the spec of one array space; ``categorical=False`` makes choices one-hot."""
    if isinstance(space, spaces.Box):
        if np.isinf(space.low).all() and np.isinf(space.high).all():
            return Unbounded(space.shape, dtype=torch_dtype(space))
        low, high = torch.from_numpy(space.low.copy()), torch.from_numpy(space.high.copy())
        return Bounded(low, high, space.shape, dtype=low.dtype)
    if isinstance(space, spaces.Discrete):
        n = int(space.n)
        return Categorical(n) if categorical else OneHot(n, dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        nvec = space.nvec.tolist()
        one_hot = not categorical and space.nvec.ndim == 1
        return MultiOneHot(nvec, dtype=torch.int64) if one_hot else MultiCategorical(nvec)
    return Binary(shape=space.shape, dtype=torch.int8)


class Actions:
    """Actions of ``P`` environments: stored in a window, passed on as values of their space.

    What environments receive is theirs: arrays are copies, never views of the window.
    """

    def __init__(
        self, space: gym.Space[Any], envs: int, categorical: bool, batched: bool = False
    ) -> None:
        """Read the action space of one of ``envs`` environments.

        ``categorical``: Store discrete actions as indices, else as one-hot vectors. ``batched``:
        Hand out one value of the batched space, not a sequence of ``P`` values.
        """
        self._leaves = space_leaves(space, ACTION)
        if not self._leaves:
            raise ConfigError(
                f"the action space {space} has nothing to choose; "
                "give the environment an action, such as Discrete(1)"
            )
        self._space, self._envs, self._batched = space, envs, batched
        specs = {leaf.key: space_spec(leaf.space, categorical) for leaf in self._leaves}
        self.specs: Mapping[Key, Spec] = specs
        self.fields = tuple(
            Field(key, tuple(spec.shape), spec.dtype) for key, spec in specs.items()
        )
        self.limits = [
            (field, limits, int(limits.min()))
            for leaf, field in zip(self._leaves, self.fields, strict=True)
            if (limits := _limits(leaf.space, specs[field.key], field)) is not None and limits.size
        ]
        """The actions that `check` looks at, which are whole numbers."""
        self._decoders = [_decoder(leaf.space, categorical, batched) for leaf in self._leaves]
        self._decode = self._decoders[0]
        self._plain = not self._leaves[0].path
        self._rows: list[list[Array]] = []
        self._window: Window

    def begin(self, window: Window) -> None:
        self._window = window
        self._rows = [window.rows(field.key) for field in self.fields]

    def read(self, t: int) -> Any:
        """Return the actions in row ``t``."""
        if self._plain:
            return self._decode(self._rows[0][t])
        return self.decode([rows[t] for rows in self._rows])

    def decode(self, arrays: Sequence[Array]) -> Any:
        """Return the actions stored in ``arrays``, ``[P, ...]`` for each action key."""
        parts = [decode(values) for decode, values in zip(self._decoders, arrays, strict=True)]
        if self._plain:
            return parts[0]
        if self._batched:
            return self._assemble(parts)
        return [self._assemble(values) for values in zip(*parts, strict=True)]

    def _assemble(self, parts: Sequence[Any]) -> Any:
        values = {leaf.path: part for leaf, part in zip(self._leaves, parts, strict=True)}
        return rebuild(self._space, (), values)

    def check(self, start: int, stop: int, cause: BaseException | None = None) -> None:
        """Check the actions in rows ``[start, stop)``, after the environments received them.

        ``cause`` is an error of an environment about them. Floats are the environment's to judge.
        """
        for field, limits, lowest in self.limits:
            values = self._window.array(field.key)[:, start:stop]
            if (outside := _outside(values, limits, lowest)) is not None:
                env, t, *_ = outside
                most = (limits.astype(np.int64) - 1).tolist()
                raise PolicyError(
                    f"environment {env} was given {format_key(field.key)} "
                    f"{values[env, t].tolist()} at step {t + start} of the rollout; it takes 0 to "
                    f"{most}"
                ) from cause


def _limits(space: gym.Space[Any], spec: TensorSpec, field: Field) -> Array | None:
    """Return the first invalid index, for each entry of a discrete action.

    It has an unsigned dtype: seen with that, a negative index is beyond all limits.
    """
    if isinstance(spec, OneHot | MultiOneHot | Binary):
        limits: Any = 2
    elif isinstance(space, spaces.Discrete):
        limits = space.n
    elif isinstance(space, spaces.MultiDiscrete):
        limits = space.nvec
    else:
        return None
    return np.asarray(limits, f"u{field.numpy_dtype.itemsize}")


def _outside(values: Array, limits: Array, lowest: int) -> list[int] | None:
    """Return the place of the first of ``values`` that reaches its limit."""
    indices = values.view(limits.dtype)
    if indices.max(initial=0) < lowest:
        return None  # as it is nearly always
    found: list[list[int]] = np.argwhere(indices >= limits).tolist()
    return found[0] if found else None


def rebuild(space: gym.Space[Any], path: Path, values: Mapping[Path, Any]) -> Any:
    """Return a value of ``space`` from those of its leaves; ``path`` leads to ``space``."""
    if isinstance(space, spaces.Dict):
        return {k: rebuild(s, (*path, k), values) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(rebuild(s, (*path, i), values) for i, s in enumerate(space.spaces))
    return values[path]


def _decoder(space: gym.Space[Any], categorical: bool, batched: bool) -> Callable[[Array], Any]:
    """Return a function from stored actions to one array if ``batched``, else to ``P`` values."""
    discrete, plain = isinstance(space, spaces.Discrete), not np.any(getattr(space, "start", 0))
    read, dtype = _reader(space, space_spec(space, categorical)), space.dtype
    plain = plain and categorical
    if batched:
        return read
    if discrete:
        return (lambda row: row.tolist()) if plain else lambda row: read(row).tolist()
    if space.shape == ():  # iterating would give numpy scalars, which are no values of a Box
        return lambda row: _scalars(read(row))
    return (lambda row: list(row.astype(dtype))) if plain else lambda row: list(read(row))


def _reader(space: gym.Space[Any], spec: TensorSpec) -> Callable[[Array], Array]:
    """Return a function from stored actions to an array of values of ``space``."""
    dtype, start = space.dtype, getattr(space, "start", 0)
    if isinstance(spec, OneHot):
        return lambda row: (row.argmax(-1) + start).astype(dtype)
    if isinstance(spec, MultiOneHot):
        ends = np.cumsum(spec.nvec)[:-1]
        return lambda row: (
            np.stack([part.argmax(-1) for part in np.split(row, ends, -1)], -1) + start
        ).astype(dtype)
    if np.any(start):
        return lambda row: (row + start).astype(dtype, order="C")
    return lambda row: row.astype(dtype, order="C")


def _scalars(values: Array) -> Sequence[Any]:
    return [values[env, ...] for env in range(len(values))]
