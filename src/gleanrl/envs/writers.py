"""Write what environments return into rows, after checking it against what they declared."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, EnvError
from gleanrl.core.keys import format_key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.options import InfoKeys
from gleanrl.core.protocols import Array, Window
from gleanrl.envs.returned import NUMBERS
from gleanrl.envs.spaces import RESERVED, Leaf, torch_dtype

_DIRECT_NBYTES = 4096
"""Above this a row is copied straight from each environment's array; below, gathered first."""


class Writer(Protocol):
    """Writes one field of ``P`` environments."""

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``."""
        ...

    def write(self, t: int, values: Sequence[Any], infos: Sequence[Any]) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        ...

    def write_root(self, t: int, env: int, value: Any, info: Any) -> None:
        """Replace root row ``t + 1`` of one environment (its reset observation)."""
        ...

    def write_carry(self, carry: Window, env: int, value: Any, info: Any) -> None:
        """Write one environment's reset observation into ``carry``."""
        ...

    def check(self, env: int, value: Any, info: Any) -> None:
        """Check what one environment returned, without writing it."""
        ...


class LeafWriter:
    """Writes one array of the observation; small rows, gathered into one array first.

    What a reset returns, and the first step (see `check`), is held to the declared dtype exactly.
    Later steps of several environments are gathered before their dtype is looked at, so a narrower
    one that numpy promotes to the declared one (an integer among float64) passes there; looking at
    each would cost every step. Byte order never matters.
    """

    def __init__(self, leaf: Leaf, field: Field) -> None:
        """Bind to a leaf of the observation space and the field it fills."""
        self._leaf = leaf
        self._field = field
        self._shape = field.shape
        self._source_dtype = np.dtype(leaf.space.dtype)
        self._target = field.numpy_dtype
        self._casts = torch_dtype(leaf.space.dtype) != field.dtype
        self._get: Callable[[Any], Any] | None = _getter(leaf)
        self._next: list[Array] = []
        self._root: list[Array] = []

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``."""
        key = self._field.key
        self._root = window.rows(key)[1:] + carry.rows(key)
        after = next_key(key)
        self._next = window.rows(after) if after in window.keys() else self._root

    def write(self, t: int, values: Sequence[Any], infos: Sequence[Any]) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        get = self._get
        if get is not None:
            try:
                values = [get(value) for value in values]
            except (LookupError, TypeError):
                values = [self._part(env, value) for env, value in enumerate(values)]
        rows = self._gather(values)
        self._next[t][...] = rows
        self._root[t][...] = rows

    def write_root(self, t: int, env: int, value: Any, info: Any) -> None:
        """Replace root row ``t + 1`` of one environment."""
        self._root[t][env] = self._one(env, value)

    def write_carry(self, carry: Window, env: int, value: Any, info: Any) -> None:
        """Write one environment's reset observation into ``carry``."""
        carry.rows(self._field.key)[0][env] = self._one(env, value)

    def check(self, env: int, value: Any, info: Any) -> None:
        """Check what one environment returned, without writing it."""
        self._one(env, value)

    def _part(self, env: int, value: Any) -> Any:
        try:
            return value if self._get is None else self._get(value)
        except (LookupError, TypeError) as err:
            raise EnvError(f"environment {env} returned {no_entry(self._leaf, value)}") from err

    def _gather(self, values: Sequence[Any]) -> Array:
        try:
            rows: Array | None = np.array(values)
        except ValueError:
            rows = None
        if rows is None or rows.shape[1:] != self._shape or rows.dtype != self._source_dtype:
            rows = np.stack([self._check(env, value) for env, value in enumerate(values)])
        return self._cast(rows) if self._casts else rows

    def _one(self, env: int, value: Any) -> Array:
        row = self._check(env, self._part(env, value))
        return self._cast(row) if self._casts else row

    def _check(self, env: int, value: Any) -> Array:
        row: Array = value if type(value) is np.ndarray else self._array(env, value)
        if row.dtype == self._source_dtype and row.shape == self._shape:
            return row
        same = row.dtype.newbyteorder("=") == self._source_dtype
        if row.shape == self._shape and (same or (self._casts and row.dtype.kind == "f")):
            return row
        raise EnvError(
            f"environment {env} returned {format_key(self._field.key)} with shape {row.shape} and "
            f"dtype {row.dtype}, but its observation space declares shape {self._shape} and dtype "
            f"{self._source_dtype}; correct the space or the observation"
            + _dtype_hint(row.dtype, self._source_dtype)
        )

    def _array(self, env: int, value: Any) -> Array:
        try:
            return np.asarray(value)
        except ValueError as err:
            raise EnvError(
                f"environment {env} returned {format_key(self._field.key)} that is no array of "
                f"shape {self._shape}, as its observation space declares: {value!r:.100}; correct "
                "the space or the observation"
            ) from err

    def _cast(self, rows: Array) -> Array:
        try:
            with np.errstate(over="raise"):
                return rows.astype(self._target)
        except FloatingPointError as err:
            raise EnvError(
                f"{format_key(self._field.key)} holds {np.abs(rows).max():g}, which does not fit "
                f"{self._target}"
            ) from err


class PlainLeafWriter(LeafWriter):
    """The same where the observation is the array itself and keeps its dtype: the usual case."""

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``."""
        super().begin(window, carry)
        self._rows_shape = (window.envs, *self._shape)

    def write(self, t: int, values: Sequence[Any], infos: Sequence[Any]) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        try:
            rows = np.array(values)
        except ValueError:  # arrays of different shapes
            rows = self._gather(values)
        if rows.shape != self._rows_shape or rows.dtype != self._source_dtype:
            rows = self._gather(values)
        self._next[t][...] = rows
        self._root[t][...] = rows


class DirectLeafWriter(LeafWriter):
    """The same for big rows: each environment's array is copied once per stored observation."""

    def write(self, t: int, values: Sequence[Any], infos: Sequence[Any]) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        after, root = self._next[t], self._root[t]
        for env, value in enumerate(values):
            row = self._one(env, value)
            if after is not root:
                after[env] = row
            root[env] = row


class InfoWatch:
    """Looks out for one entry of ``info`` until it is seen: a misspelt name never is."""

    def __init__(self, name: str) -> None:
        """Look out for ``name``."""
        self._name = name
        self._others: set[str] = set()
        self.looking = True
        """Whether nobody has seen it yet, in the first rollout."""

    def look(self, info: Mapping[str, Any]) -> bool:
        """Look at one ``info``; return whether there is no more need to."""
        if self.looking and self._name not in info:
            self._others.update(info)
            return False
        self.looking = False
        return True

    def settle(self) -> None:
        """Stop looking, after the first rollout; warn if the entry never came."""
        if self.looking:
            self.looking = False
            others = sorted(name for name in self._others if not name.startswith("_"))
            warnings.warn(
                f"info_keys: no info of the first rollout has {self._name!r}, so it is delivered "
                f"as zeros; there were {others}",
                UserWarning,
                stacklevel=2,
            )
        self._others.clear()


class InfoWriter:
    """Writes one numeric entry of ``info``; zero where an environment did not give it."""

    def __init__(self, name: str, field: Field) -> None:
        """Bind to the ``info`` entry ``name`` and the field it fills."""
        self._name = name
        self._field = field
        self._zero = np.zeros(field.shape)
        self.watch = InfoWatch(name)
        """Looks out for the entry in the first rollout."""
        self._read = self._first_read
        self._next: list[Array] = []
        self._root: list[Array] = []

    def begin(self, window: Window, carry: Window) -> None:
        """Bind to the rows of ``window``."""
        self._root = window.rows(self._field.key)[1:] + carry.rows(self._field.key)
        after = next_key(self._field.key)
        self._next = window.rows(after) if after in window.keys() else self._root

    def write(self, t: int, values: Sequence[Any], infos: Sequence[Any]) -> None:
        """Write row ``t`` under ``"next"`` and root row ``t + 1``."""
        rows = [self._read(env, info) for env, info in enumerate(infos)]
        self._next[t][...] = rows
        self._root[t][...] = rows

    def write_root(self, t: int, env: int, value: Any, info: Any) -> None:
        """Replace root row ``t + 1`` of one environment."""
        self._root[t][env] = self._read(env, info)

    def write_carry(self, carry: Window, env: int, value: Any, info: Any) -> None:
        """Write one environment's entry into ``carry``."""
        carry.rows(self._field.key)[0][env] = self._read(env, info)

    def check(self, env: int, value: Any, info: Any) -> None:
        """Check one environment's entry, without writing it."""
        self._read(env, info)

    def _first_read(self, env: int, info: Mapping[str, Any]) -> Array:
        if self.watch.look(info):
            self._read = self._plain_read
        return self._plain_read(env, info)

    def _plain_read(self, env: int, info: Mapping[str, Any]) -> Array:
        value = np.asarray(info.get(self._name, self._zero))
        if value.shape != self._field.shape or value.dtype.kind not in NUMBERS:
            raise EnvError(
                f"environment {env} gave info[{self._name!r}] = {value!r}; a number of shape "
                f"{self._field.shape} was declared"
            )
        return value


def make_writer(leaf: Leaf, field: Field) -> LeafWriter:
    """Return the writer for one observation leaf."""
    if field.nbytes >= _DIRECT_NBYTES:
        return DirectLeafWriter(leaf, field)
    plain = not leaf.path and torch_dtype(leaf.space.dtype) == field.dtype
    return PlainLeafWriter(leaf, field) if plain else LeafWriter(leaf, field)


def info_fields(info_keys: InfoKeys, observed: Iterable[Field]) -> dict[str, Field]:
    """Return the field of every requested ``info`` entry: float32 scalars unless declared.

    Whether a name is one that ``info`` will ever hold cannot be told from a reset, whose ``info``
    often holds less: `InfoWatch` says so after the first rollout.

    Args:
        info_keys: What the user asked for.
        observed: Fields of the observation, beside which the entries will stand.

    Raises:
        ConfigError: names that are no names, are taken, or come twice.
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


def no_entry(leaf: Leaf, value: Any) -> str:
    """Say that ``value`` of a nested observation space has nothing where ``leaf`` should be."""
    held = (
        f"a mapping of {list(value)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    )
    path = "".join(f"[{part!r}]" for part in leaf.path)
    return (
        f"an observation without {path}, which its observation space declares: it is "
        f"{held}; correct the space or the observation"
    )


def _getter(leaf: Leaf) -> Callable[[Any], Any] | None:
    if not leaf.path:
        return None
    if len(leaf.path) == 1:
        return operator.itemgetter(leaf.path[0])
    return leaf.of


def _dtype_hint(got: np.dtype[Any], declared: np.dtype[Any]) -> str:
    if got.kind == "f" and declared.kind == "f":
        return ", or pass observation_dtype=torch.float32 to cast floats on the way in"
    return ""
