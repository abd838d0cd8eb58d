"""Write environments' results into rows, after a check against their spaces.

There is one writer per field: of an array of the observation, or of an entry of ``info``. Single
environments return one of each, which writers gather; a vectorised environment returns arrays of
all of its environments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, EnvError
from gleanrl.core.keys import format_key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.options import InfoKeys, warn
from gleanrl.core.window import Array, Window
from gleanrl.envs.result_checks import NUMBERS
from gleanrl.envs.spaces import RESERVED, Leaf

StepWriter: TypeAlias = Callable[[int, Any, Any], None]
"""Takes the step, and the observations and infos that it returned."""
_DIRECT_NBYTES = 4096
"""Above this a row is copied straight from each environment's array; below, gathered first."""


class VectorReset(NamedTuple):
    """The results of ``reset`` of a vectorised environment."""

    observation: Any
    infos: Mapping[str, Any]
    size: int
    """Environments it holds."""
    rows: Array | slice
    """The environments that were reset."""


class FieldWriter:
    """Writes one field of ``P`` environments; a subclass reads it from their results."""

    def __init__(self, field: Field) -> None:
        self._field = field
        self._shape = field.shape
        self._root: list[Array] = []
        self._next: list[Array] | None = None
        self._rows_shape: tuple[int, ...] = ()

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to ``window``; a field it lacks under ``"next"`` is not written there."""
        self._root = window.rows(self._field.key)[1:] + carry.rows(self._field.key)
        self._rows_shape = self._rows_shape or (window.envs, *self._shape)
        after = next_key(self._field.key)
        self._next = window.rows(after) if after in window.keys() else None

    def write(self, t: int, observations: Any, infos: Any) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        rows = self._rows(observations, infos, self._rows_shape)
        if self._next is not None:
            self._next[t][...] = rows
        self._root[t][...] = rows

    def step_writer(self) -> StepWriter:
        """Return the method with the effect of `write` that takes the least time for this field.

        It is the environment's to keep: a writer that refers to its own method would keep itself,
        and the memory of rollouts, until Python collects garbage.
        """
        return self.write

    def write_root(self, t: int, where: Any, returned: Any) -> None:
        """Replace root row ``t + 1`` of ``where`` by the values that a reset ``returned``."""
        self._root[t][where] = self.read(where, returned)

    def write_carry(self, carry: Window, where: Any, returned: Any) -> None:
        """Write the values that a reset of ``where`` ``returned`` into ``carry``."""
        carry.rows(self._field.key)[0][where] = self.read(where, returned)

    def write_final(self, t: int, envs: Array, infos: Mapping[str, Any]) -> None:
        """Replace row ``t`` under ``"next"`` of ``envs`` by the final values in ``infos``.

        For vectorised environments that reset themselves in the same step.
        """
        if self._next is not None:
            self._next[t][envs] = self._finals(envs, infos)

    def read(self, where: Any, returned: Any) -> Array:
        """Return this field from the ``(observation, info)`` of environment ``where``, checked.

        Of a vectorised environment: from a `VectorReset` of several.
        """
        shape = (returned.size, *self._shape)
        rows: Array = self._rows(returned.observation, returned.infos, shape)[returned.rows]
        return rows

    def _rows(self, observations: Any, infos: Any, shape: tuple[int, ...]) -> Any:
        """Return this field of all environments, of ``shape``, perhaps in their own memory."""
        raise NotImplementedError

    def _finals(self, envs: Array, infos: Mapping[str, Any]) -> Array:
        raise NotImplementedError


# -- observations ----------------------------------------------------------------------------------


class LeafWriter(FieldWriter):
    """One array of each single environment's observation; small rows, gathered into one first.

    What a reset returns, and the first step (see `read`), is held to the declared dtype exactly.
    Later steps of several environments are gathered before their dtype is looked at, so a narrower
    one that numpy promotes to the declared one (an integer among float64) passes there; looking at
    each would cost every step. Byte order never matters.
    """

    def __init__(self, leaf: Leaf, field: Field, casts: str) -> None:
        """Write ``leaf`` to ``field``; kinds of dtypes in ``casts`` are cast, floats to floats."""
        super().__init__(field)
        self._leaf = leaf
        self._declared = np.dtype(leaf.space.dtype)
        self._target = field.numpy_dtype
        self._casts = casts if casts != "f" or self._declared.kind == "f" else ""
        self._changes = self._declared != self._target
        self._get: Callable[[Any], Any] | None = leaf.of if leaf.path else None
        if len(leaf.path) == 1:
            self._get = operator.itemgetter(leaf.path[0])

    def step_writer(self) -> StepWriter:
        if self._field.nbytes >= _DIRECT_NBYTES:
            return self._write_each
        return self.write if self._get is not None or self._changes else self._write_plain

    def _write_plain(self, t: int, observations: Sequence[Any], infos: Sequence[Any]) -> None:
        """Write observations that are the array itself and keep their dtype."""
        try:
            rows = np.array(observations)
        except ValueError:  # arrays of different shapes
            rows = self._gather(observations)
        if rows.shape != self._rows_shape or rows.dtype != self._declared:
            rows = self._gather(observations)
        if self._next is not None:
            self._next[t][...] = rows
        self._root[t][...] = rows

    def _write_each(self, t: int, observations: Sequence[Any], infos: Sequence[Any]) -> None:
        """Copy each environment's array once per stored observation."""
        after, root = None if self._next is None else self._next[t], self._root[t]
        for env, value in enumerate(observations):
            row = self._array(env, self._part(env, value))
            if after is not None:
                after[env] = row
            root[env] = row

    def read(self, where: Any, returned: Any) -> Array:
        return self._array(where, self._part(where, returned[0]))

    def _rows(self, observations: Sequence[Any], infos: Any, shape: tuple[int, ...]) -> Array:
        values, get = observations, self._get
        if get is not None:
            try:
                values = [get(value) for value in values]
            except (LookupError, TypeError):
                values = [self._part(env, value) for env, value in enumerate(values)]
        return self._gather(values)

    def _gather(self, values: Sequence[Any]) -> Array:
        try:
            rows: Array | None = np.array(values)
        except ValueError:  # arrays of different shapes
            rows = None
        if rows is None or rows.shape[1:] != self._shape or rows.dtype != self._declared:
            return np.stack([self._array(env, value) for env, value in enumerate(values)])
        return self._cast(rows) if self._changes else rows

    def _array(self, where: int | str, value: Any) -> Array:
        try:
            row: Array = value if type(value) is np.ndarray else np.asarray(value)
        except ValueError as err:
            raise EnvError(
                f"{_name(where)} returned {format_key(self._field.key)} that is no array of "
                f"shape {self._shape}, as its observation space declares: {value!r:.100}; correct "
                "the space or the observation"
            ) from err
        if row.dtype == self._declared and row.shape == self._shape:
            return self._cast(row) if self._changes else row
        return self._fit(row, self._shape, _name(where))

    def _part(self, where: int | str, value: Any) -> Any:
        """Return this array of an observation of environment ``where``, or of a named place."""
        try:
            return value if self._get is None else self._get(value)
        except (LookupError, TypeError) as err:
            raise part_missing(_name(where), self._leaf, value) from err

    def _fit(self, values: Array, shape: tuple[int, ...], who: str, widens: bool = False) -> Array:
        """Return ``values`` in the field's dtype, or raise an error about them.

        If it ``widens``, narrower whole numbers are taken than the space declares.
        """
        got, declared = values.dtype.newbyteorder("="), self._declared
        if values.shape == shape:
            if got.kind in self._casts:
                return self._cast(values)
            both_whole = got.kind in "iub" and declared.kind in "iub"
            if got == declared or (widens and both_whole and np.can_cast(got, declared)):
                return values.astype(self._target)
        hint = ""
        if got.kind == declared.kind == "f" and got != declared and not self._casts:
            hint = ", or pass observation_dtype=torch.float32 to cast floats on the way in"
        raise EnvError(
            f"{who} returned {format_key(self._field.key)} with shape {values.shape} and dtype "
            f"{got}, but its observation space declares shape {shape} and dtype {declared}; "
            f"correct the space or the observation{hint}"
        )

    def _cast(self, values: Array) -> Array:
        try:
            with np.errstate(over="raise"):
                return values.astype(self._target)
        except FloatingPointError as err:
            raise EnvError(
                f"{format_key(self._field.key)} holds {np.abs(values).max():g}, which does not fit "
                f"{self._target}"
            ) from err


def part_missing(who: str, leaf: Leaf, observation: Any) -> EnvError:
    """Return the error for an ``observation`` of ``who`` that lacks ``leaf``."""
    kind = f"a {type(observation).__name__}"
    held = f"a mapping of {list(observation)}" if isinstance(observation, Mapping) else kind
    path = "".join(f"[{part!r}]" for part in leaf.path)
    return EnvError(
        f"{who} returned an observation without {path}, which its observation space declares: it "
        f"is {held}; correct the space or the observation"
    )


def _name(where: int | str) -> str:
    return where if isinstance(where, str) else f"environment {where}"


class VectorLeafWriter(LeafWriter):
    """One array of a vectorised environment's observation.

    Indices are delivered as the space declares them; EnvPools like to count in 32 bits.
    """

    read = FieldWriter.read
    _who = "the vector environment"

    def step_writer(self) -> StepWriter:
        return self.write if self._get is not None else self._write_plain

    def _write_plain(self, t: int, observations: Any, infos: Any) -> None:
        rows, shape = observations, self._rows_shape
        if type(rows) is not np.ndarray or rows.shape != shape or rows.dtype != self._target:
            rows = self._rows(observations, infos, shape)
        if self._next is not None:
            self._next[t][...] = rows
        self._root[t][...] = rows

    def _rows(self, observations: Any, infos: Any, shape: tuple[int, ...]) -> Array:
        values = np.asarray(self._part(self._who, observations))
        if values.shape != shape or values.dtype != self._target:
            return self._fit(values, shape, self._who, widens=True)
        return values

    def _finals(self, envs: Array, infos: Mapping[str, Any]) -> Array:
        finals = entry_of(infos, "final_obs")
        if finals is None:
            raise finals_missing(envs, f" (it has {sorted(infos)})")
        if isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object):
            return np.stack([self._one_final(finals[env], int(env)) for env in envs])
        values = np.asarray(self._part(self._who, finals))[envs]
        return self._fit(values, (len(envs), *self._shape), "final_obs", widens=True)

    def _one_final(self, final: Any, env: int) -> Array:
        if final is None:
            raise EnvError(f"environment {env} ended, but infos['final_obs'][{env}] is None")
        who = f"environment {env} (final_obs)"
        return self._fit(np.asarray(self._part(who, final)), self._shape, who, widens=True)


def entry_of(infos: Mapping[str, Any], name: str) -> Any:
    """Return an entry of a vector environment's ``infos``, ``None`` if there is none."""
    try:
        return infos.get(name)
    except AttributeError as err:
        raise EnvError(
            f"the vector environment returned infos of type {type(infos).__name__}, and {name!r} "
            "is looked for in a dict; drop the wrapper that changes it (DictInfoToList)"
        ) from err


def finals_missing(envs: Array, more: str) -> EnvError:
    """Return the error for ``envs`` that ended without final observations."""
    return EnvError(
        f"environments {envs.tolist()[:5]} ended, but infos has no 'final_obs'{more}; an "
        "environment in SAME_STEP mode must return final observations"
    )


# -- entries of `info` -----------------------------------------------------------------------------


class InfoWriter(FieldWriter):
    """One numeric entry of each single environment's ``info``; zero if it is missing.

    In the first rollout it looks out for the entry: a misspelt name never comes.
    """

    def __init__(self, name: str, field: Field) -> None:
        """Write the ``info`` entry ``name`` to ``field``."""
        super().__init__(field)
        self._name = name
        self._zero = np.zeros(field.shape, field.numpy_dtype)
        self._others: set[str] = set()
        self._looking = True

    def _look(self, info: Mapping[str, Any]) -> None:
        if self._name in info:
            self._looking = False
        else:
            self._others.update(info)

    def settle(self) -> None:
        """Stop checking, after the first rollout; warn if the entry never appeared."""
        if self._looking:
            self._looking = False
            others = sorted(name for name in self._others if not name.startswith("_"))
            warn(
                f"info_keys: no info of the first rollout has {self._name!r}, so it is delivered "
                f"as zeros; there were {others}"
            )
        self._others.clear()

    def read(self, where: Any, returned: Any) -> Array:
        return self._one(where, returned[1])

    def _rows(self, observations: Any, infos: Any, shape: tuple[int, ...]) -> Any:
        return [self._one(env, info) for env, info in enumerate(infos)]

    def _one(self, env: int, info: Mapping[str, Any]) -> Array:
        try:
            given = info.get(self._name, self._zero)
        except AttributeError as err:
            raise EnvError(f"environment {env} returned info {info!r:.100}, not a dict") from err
        if self._looking:
            self._look(info)
        value = np.asarray(given)
        if value.shape != self._shape or value.dtype.kind not in NUMBERS:
            raise EnvError(
                f"environment {env} gave info[{self._name!r}] = {given!r:.100}; a number of shape "
                f"{self._shape} was declared"
            )
        return self._held(value)

    def _held(self, values: Array) -> Array:
        """Return ``values`` in the dtype of the entry, which must hold them; floats are rounded."""
        dtype = self._zero.dtype
        if values.dtype == dtype:
            return values
        try:
            with np.errstate(over="raise", invalid="ignore"):
                cast = values.astype(dtype)
        except FloatingPointError:
            fits = False
        else:
            fits = dtype.kind == "f" or bool((cast == values).all())
        if not fits:
            raise EnvError(
                f"info[{self._name!r}] is {values!r:.100}, which {dtype} of info_keys does not "
                "hold: declare another dtype"
            )
        return cast


class VectorInfoWriter(InfoWriter):
    """One numeric entry of ``infos``; zero for environments without it."""

    read = FieldWriter.read

    def _rows(self, observations: Any, infos: Mapping[str, Any], shape: tuple[int, ...]) -> Array:
        given = entry_of(infos, self._name)
        if self._looking:
            self._look(infos)
        if given is None:
            return np.zeros(shape)
        values = np.asarray(given)
        if values.shape != shape or values.dtype.kind not in NUMBERS:
            raise EnvError(
                f"the vector environment gave infos[{self._name!r}] with shape {values.shape} and "
                f"dtype {values.dtype}; numbers of shape {shape} were declared (info_keys)"
            )
        present = infos.get(f"_{self._name}")
        if present is not None and not np.all(present):
            values = values.copy()
            values[~np.asarray(present, bool)] = 0
        return self._held(values)

    def _finals(self, envs: Array, infos: Mapping[str, Any]) -> Array:
        finals = entry_of(infos, "final_info")
        if isinstance(finals, Mapping):
            self._look(finals)
            given = finals.get(self._name)
            if given is not None:
                return self._rows(None, finals, (len(given), *self._shape))[envs]
        return np.zeros((len(envs), *self._shape))


# -- what the user asks for ------------------------------------------------------------------------


def info_fields(info_keys: InfoKeys, observed: Iterable[Field]) -> dict[str, Field]:
    """Return the field of every requested ``info`` entry: float32 scalars unless declared.

    Whether a name is one that ``info`` will ever hold cannot be told from a reset, whose ``info``
    often holds less: a warning says so after the first rollout. ``observed`` takes names.
    """
    if isinstance(info_keys, str):
        raise ConfigError(
            f"info_keys ({info_keys!r}) is a string; pass a list of names: [{info_keys!r}]"
        )
    names = list(info_keys)
    taken = RESERVED | {field.key[0] for field in observed}
    for name in names:
        if not isinstance(name, str) or not name or name.startswith("_"):
            raise ConfigError(
                f"info_keys: {name!r} must be a string that does not start with an underscore"
            )
        if name in taken:
            raise ConfigError(
                f"info_keys: {name!r} is the name of something else in a batch; rename the info "
                "entry with a wrapper"
            )
        if names.count(name) > 1:
            raise ConfigError(f"info_keys ({names}) names {name!r} more than once")
    if isinstance(info_keys, Mapping):
        return {name: _declared_field(name, given) for name, given in info_keys.items()}
    return {name: Field((name,), (), torch.float32) for name in names}


def _declared_field(name: str, given: Any) -> Field:
    try:
        shape, dtype = given
        sizes = tuple(map(operator.index, shape))
    except (TypeError, ValueError):
        sizes, dtype = (), None
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"info_keys: {name!r} is declared as {given!r}; declare a shape and a dtype, such as "
            "((), torch.float32)"
        )
    return Field((name,), sizes, dtype)
