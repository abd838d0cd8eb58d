"""Write what environments return into rows, after checking it against what they declared."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import next_key, show
from gleanrl.core.layout import Field
from gleanrl.core.protocols import Array, Window
from gleanrl.envs.spaces import Leaf, numpy_dtype, torch_dtype

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


class LeafWriter:
    """Writes one array of the observation; small rows, gathered into one array first."""

    def __init__(self, leaf: Leaf, field: Field) -> None:
        """Bind to a leaf of the observation space and the field it fills."""
        self._field = field
        self._shape = field.shape
        self._source_dtype = np.dtype(leaf.space.dtype)
        self._target = numpy_dtype(field.dtype)
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
        rows = self._gather(values if get is None else [get(value) for value in values])
        self._next[t][...] = rows
        self._root[t][...] = rows

    def write_root(self, t: int, env: int, value: Any, info: Any) -> None:
        """Replace root row ``t + 1`` of one environment."""
        self._root[t][env] = self._one(env, value)

    def write_carry(self, carry: Window, env: int, value: Any, info: Any) -> None:
        """Write one environment's reset observation into ``carry``."""
        carry.rows(self._field.key)[0][env] = self._one(env, value)

    def _gather(self, values: Sequence[Any]) -> Array:
        try:
            rows = np.array(values)
        except ValueError:
            rows = None
        if rows is None or rows.shape[1:] != self._shape or rows.dtype != self._source_dtype:
            rows = np.stack([self._check(env, value) for env, value in enumerate(values)])
        return self._cast(rows) if self._casts else rows

    def _one(self, env: int, value: Any) -> Array:
        row = self._check(env, value if self._get is None else self._get(value))
        return self._cast(row) if self._casts else row

    def _check(self, env: int, value: Any) -> Array:
        row: Array = value if type(value) is np.ndarray else np.asarray(value)
        if row.dtype == self._source_dtype and row.shape == self._shape:
            return row
        if row.shape != self._shape or not (self._casts and row.dtype.kind == "f"):
            raise EnvError(
                f"environment {env} returned {show(self._field.key)} with shape {row.shape} and "
                f"dtype "
                f"{row.dtype}, but its observation space declares shape {self._shape} and dtype "
                f"{self._source_dtype}; correct the space or the observation"
                + _dtype_hint(row.dtype, self._source_dtype)
            )
        return row

    def _cast(self, rows: Array) -> Array:
        try:
            with np.errstate(over="raise"):
                return rows.astype(self._target)
        except FloatingPointError as err:
            raise EnvError(
                f"{show(self._field.key)} holds {np.abs(rows).max():g}, which does not fit "
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


class InfoWriter:
    """Writes one numeric entry of ``info``; zero where an environment did not give it."""

    def __init__(self, name: str, field: Field) -> None:
        """Bind to the ``info`` entry ``name`` and the field it fills."""
        self._name = name
        self._field = field
        self._zero = np.zeros(field.shape)
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

    def _read(self, env: int, info: Mapping[str, Any]) -> Array:
        value = np.asarray(info.get(self._name, self._zero))
        if value.shape != self._field.shape or value.dtype.kind not in "biuf":
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


def info_fields(
    info_keys: Sequence[str] | Mapping[str, tuple[Sequence[int], torch.dtype]],
) -> dict[str, Field]:
    """Return the field of every requested ``info`` entry: float32 scalars unless declared."""
    if isinstance(info_keys, Mapping):
        return {
            name: Field((name,), tuple(shape), dtype) for name, (shape, dtype) in info_keys.items()
        }
    return {name: Field((name,), (), torch.float32) for name in info_keys}


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
