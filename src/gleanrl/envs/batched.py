"""What adapters over an already-vectorised environment share: whole arrays in, rows out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from gymnasium import Space, spaces

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key, format_key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.protocols import Array, Spec, Window
from gleanrl.envs.returned import NUMBERS, check_reset, write_rewards
from gleanrl.envs.spaces import Leaf, action_leaves, assemble, space_spec
from gleanrl.envs.writers import InfoWatch, no_entry

_FLAGS = (TERMINATED, TRUNCATED, DONE)

Rows: TypeAlias = "Array | slice"
"""Which rows of what a reset returned belong to the environments that were reset."""


class Reader(Protocol):
    """Reads one field of all environments out of what they returned."""

    field: Field

    def read(self, observation: Any, infos: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
        """Return an array of ``shape``: a view of the environment's memory unless it was cast."""
        ...

    def read_final(self, infos: Mapping[str, Any], envs: Array) -> Array:
        """Return ``[len(envs), ...]``: what ``envs`` ended with, in same-step mode."""
        ...


class LeafReader:
    """One array of the observation, checked against its space."""

    def __init__(self, leaf: Leaf, field: Field, casts: bool) -> None:
        """Bind to a leaf of the single observation space; ``casts`` takes any float dtype."""
        self.field = field
        self._leaf = leaf
        self._declared = np.dtype(leaf.space.dtype)
        self._casts = casts and self._declared.kind == "f"
        self._target = field.numpy_dtype
        self._get: Callable[[Any], Any] | None = leaf.of if leaf.path else None
        if len(leaf.path) == 1:
            self._get = operator.itemgetter(leaf.path[0])

    def _part(self, whole: Any) -> Array:
        try:
            return np.asarray(whole if self._get is None else self._get(whole))
        except (LookupError, TypeError) as err:
            raise EnvError(
                f"the vector environment returned {no_entry(self._leaf, whole)}"
            ) from err

    def read(self, observation: Any, infos: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
        """Return this leaf's part of a batched ``observation``."""
        values = self._part(observation)
        if values.shape != shape or values.dtype != self._target:
            return self._fit(values, shape, "the vector environment")
        return values

    def read_final(self, infos: Mapping[str, Any], envs: Array) -> Array:
        """Return this leaf of the final observations of ``envs``."""
        finals = infos.get("final_obs")
        if finals is None:
            raise EnvError(
                f"environments {envs.tolist()[:5]} ended, but infos has no 'final_obs' (it has "
                f"{sorted(infos)}); an environment in SAME_STEP mode must return final observations"
            )
        if isinstance(finals, np.ndarray) and finals.dtype == object:
            return np.stack([self._one_final(finals[env], int(env)) for env in envs])
        values = self._part(finals)[envs]
        return self._fit(values, (len(envs), *self.field.shape), "final_obs")

    def _one_final(self, final: Any, env: int) -> Array:
        if final is None:
            raise EnvError(f"environment {env} ended, but infos['final_obs'][{env}] is None")
        return self._fit(self._part(final), self.field.shape, f"environment {env} (final_obs)")

    def _fit(self, values: Array, shape: tuple[int, ...], who: str) -> Array:
        """Return ``values`` in the field's dtype, or say what is wrong with them."""
        got, declared = values.dtype.newbyteorder("="), self._declared
        if values.shape == shape:
            if self._casts and got.kind == "f":
                return _narrow(values, self._target, self.field.key)
            # Indices are delivered as the space declares them; pools like to count in 32 bits.
            whole = got.kind in "iub" and declared.kind in "iub" and np.can_cast(got, declared)
            if got == declared or whole:
                return values.astype(self._target)
        hint = ""
        if got.kind == "f" and declared.kind == "f" and got != declared:
            hint = ", or pass observation_dtype=torch.float32 to cast floats on the way in"
        expected = f"shape {shape} and dtype {declared}"
        raise EnvError(
            f"{who} returned {format_key(self.field.key)} with shape {values.shape} and dtype "
            f"{got}, but its observation space declares {expected}; correct the space or the "
            f"observation{hint}"
        )


class InfoReader:
    """One numeric entry of ``infos``; zero where an environment did not give it."""

    def __init__(self, name: str, field: Field) -> None:
        """Bind to the entry ``name`` and the field it fills."""
        self.field = field
        self.watch = InfoWatch(name)
        """Looks out for the entry in the first rollout."""
        self._name = name
        self._dtype = field.numpy_dtype

    def read(self, observation: Any, infos: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
        """Return the entry, zeros if it is not there."""
        if self.watch.looking:
            self.watch.look(infos)
        given = infos.get(self._name)
        if given is None:
            return np.zeros(shape, self._dtype)
        values = np.asarray(given)
        if values.shape != shape or values.dtype.kind not in NUMBERS:
            raise EnvError(
                f"the vector environment gave infos[{self._name!r}] with shape {values.shape} and "
                f"dtype {values.dtype}; numbers of shape {shape} were declared (info_keys)"
            )
        present = infos.get(f"_{self._name}")
        if present is None or np.all(present):
            return values
        values = values.astype(self._dtype)
        values[~np.asarray(present, bool)] = 0
        return values

    def read_final(self, infos: Mapping[str, Any], envs: Array) -> Array:
        """Return the entry that came with the final observations of ``envs``."""
        finals = infos.get("final_info")
        if not isinstance(finals, Mapping):
            return np.zeros((len(envs), *self.field.shape), self._dtype)
        self.watch.look(finals)
        given = finals.get(self._name)
        if given is None:
            return np.zeros((len(envs), *self.field.shape), self._dtype)
        return self.read(None, finals, (len(given), *self.field.shape))[envs]


class FieldRows:
    """The rows of one field that a `Reader` fills."""

    def __init__(self, reader: Reader, envs: int) -> None:
        """Read with ``reader`` for ``envs`` environments."""
        self._read = reader.read
        self._reader = reader
        self._key = reader.field.key
        self._shape = (envs, *reader.field.shape)
        self._root: list[Array] = []
        self._next: list[Array] | None = None

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``; what it lacks under ``"next"`` is not written there."""
        self._root = window.rows(self._key)[1:] + carry.rows(self._key)
        after = next_key(self._key)
        self._next = window.rows(after) if after in window.keys() else None

    def write(self, t: int, observation: Any, infos: Mapping[str, Any]) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        values = self._read(observation, infos, self._shape)
        if self._next is not None:
            self._next[t][...] = values
        self._root[t][...] = values

    def write_final(self, t: int, envs: Array, infos: Mapping[str, Any]) -> None:
        """Replace row ``t`` under ``"next"`` of ``envs`` by what they ended with."""
        if self._next is not None:
            self._next[t][envs] = self._reader.read_final(infos, envs)

    def write_reset(self, t: int, envs: Array, rows: Rows, back: ResetResult) -> None:
        """Replace root row ``t + 1`` of ``envs`` by what a reset returned."""
        self._root[t][envs] = self._of_reset(back)[rows]

    def write_carry(self, carry: Window, envs: Rows, rows: Rows, back: ResetResult) -> None:
        """Write what a reset of ``envs`` returned into ``carry``."""
        carry.rows(self._key)[0][envs] = self._of_reset(back)[rows]

    def _of_reset(self, back: ResetResult) -> Array:
        return self._read(back.observation, back.infos, (back.count, *self._shape[1:]))


class ResetResult:
    """What ``reset`` returned."""

    def __init__(self, result: Any, count: int) -> None:
        """Take ``result`` apart; it holds ``count`` environments.

        Raises:
            EnvError: it is not ``(observation, infos)``.
        """
        self.observation, self.infos = check_reset(
            result, "the vector environment's reset", "(observation, infos)"
        )
        self.count = count


class Outcomes:
    """Rewards and flags of a rollout: kept as rows per step, written in bulk at its end."""

    def __init__(self, envs: int, in_place: bool) -> None:
        """Allocate nothing yet: the number of steps is not known.

        Args:
            envs: Environments, ``P``.
            in_place: Write flags into the window at once: its rows are contiguous, or somebody has
                to see them before the end of the rollout.
        """
        self._envs = envs
        self._in_place = in_place
        self._checked: np.dtype[Any] | None = None
        """The dtype of rewards that were found to be numbers."""
        self._rewards = np.zeros((0, envs))
        self._flags = np.zeros((3, 0, envs), bool)
        self._dead = self._late = self._done = self._flags[0]

    def begin(self, window: Window) -> None:
        """Make room for the steps of ``window``."""
        steps = window.steps
        if len(self._rewards) < steps:
            self._rewards = np.zeros((steps, self._envs))
            if not self._in_place:
                self._flags = np.zeros((3, steps, self._envs), bool)
        self._dead, self._late, self._done = (
            [window.array(next_key(key))[:, :, 0].T for key in _FLAGS]
            if self._in_place
            else self._flags
        )

    def keep(self, t: int, reward: Any, terminated: Any, truncated: Any) -> None:
        """Keep what step ``t`` returned."""
        if t == 0 or getattr(reward, "dtype", None) is not self._checked:
            self._check(reward, terminated, truncated, t)
        self._rewards[t] = reward
        self._dead[t] = terminated
        self._late[t] = truncated
        np.logical_or(terminated, truncated, out=self._done[t])

    def _check(self, reward: Any, terminated: Any, truncated: Any, t: int) -> None:
        """Once per rollout, and where the dtype of rewards changes."""
        shapes = [np.shape(value) for value in (reward, terminated, truncated)]
        if any(shape != (self._envs,) for shape in shapes):
            raise EnvError(
                "the vector environment returned rewards, terminated and truncated of shapes "
                f"{shapes}; each must be ({self._envs},)"
            )
        self._checked = np.asarray(reward).dtype
        if self._checked.kind not in NUMBERS:
            raise EnvError(
                f"the vector environment returned rewards of dtype {self._checked} at step {t}: "
                f"{list(reward)[:4]}; they must be numbers"
            )

    def ended(self, t: int) -> Array:
        """Return the indices of the environments that ended at step ``t``."""
        return np.flatnonzero(self._done[t])

    def truncate(self, t: int, envs: Array) -> None:
        """Mark ``envs`` as truncated at step ``t`` unless they terminated there."""
        self._late[t, envs] |= ~self._dead[t, envs]
        self._done[t, envs] = True

    def finish(self, window: Window, steps: int) -> None:
        """Write the rewards and flags of ``steps`` steps into ``window``.

        Raises:
            EnvError: a finite reward that does not fit float32.
        """
        target = window.array(next_key(REWARD))[:, :steps, 0]
        write_rewards(target, self._rewards[:steps], wrapper="vector.TransformReward")
        if not self._in_place:
            for key, values in zip(_FLAGS, self._flags, strict=True):
                window.array(next_key(key))[:, :steps, 0] = values[:steps].T


class BatchedActions:
    """Turns stored actions ``[P, ...]`` into one batched action of a vector environment."""

    def __init__(self, space: Space[Any], envs: int, categorical: bool) -> None:
        """Read the single action ``space``."""
        self._space = space
        self._leaves = action_leaves(space)
        self._envs = envs
        found = [space_spec(leaf.space, categorical) for leaf in self._leaves]
        keys = [leaf.key for leaf in self._leaves]
        self.specs: Mapping[Key, Spec] = dict(zip(keys, found, strict=True))
        self.fields = tuple(
            Field(key, tuple(spec.shape), spec.dtype) for key, spec in zip(keys, found, strict=True)
        )
        self._stepwise = len(found) == 1 and found[0].stepwise
        self._decoders = [_batch_decoder(leaf.space, categorical) for leaf in self._leaves]
        self._plain = len(self._leaves) == 1 and not self._leaves[0].path
        self._rows: list[list[Array]] = []
        self._window: Window

    def begin(self, window: Window) -> None:
        """Bind to the rows of ``window``."""
        self._window = window
        self._rows = [window.rows(leaf.key) for leaf in self._leaves]

    def read(self, t: int) -> Any:
        """Return the batched action in row ``t``; its arrays are copies."""
        if self._plain:
            return self._decoders[0](self._rows[0][t])
        parts = [decode(rows[t]) for decode, rows in zip(self._decoders, self._rows, strict=True)]
        return assemble(self._leaves, parts, self._space)

    def random(self, t: int, ahead: int) -> None:
        """Write random actions into row ``t``; draw at most ``ahead`` rows at once."""
        if self._stepwise:
            # One call for many rows draws the same numbers in the same order.
            if t % ahead == 0:
                ((key, spec),) = self.specs.items()
                field = self._window.tensor(key)[:, t : t + ahead]
                field.copy_(spec.rand((field.shape[1], self._envs)).transpose(0, 1))
            return
        for key, spec in self.specs.items():
            self._window.tensor_rows(key)[t].copy_(spec.rand((self._envs,)))


def _batch_decoder(space: Space[Any], categorical: bool) -> Callable[[Array], Array]:
    dtype = space.dtype
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        if not categorical:
            return lambda row: (row.argmax(-1) + start).astype(dtype)
        if start:
            return lambda row: (row + start).astype(dtype)
    if isinstance(space, spaces.MultiDiscrete) and np.any(space.start):
        offset = space.start
        return lambda row: row.astype(dtype, order="C") + offset
    return lambda row: row.astype(dtype, order="C")


def _narrow(values: Array, target: np.dtype[Any], key: Key) -> Array:
    with np.errstate(over="raise"):
        try:
            return values.astype(target)
        except FloatingPointError as err:
            raise EnvError(
                f"{format_key(key)} holds {np.abs(values).max():g}, which does not fit {target}"
            ) from err
