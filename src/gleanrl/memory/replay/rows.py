"""What one stored row looks like, and the tensors that hold all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, format_key, next_key
from gleanrl.core.layout import Field, Group
from gleanrl.memory.tensor_files import dtype_name, dtype_named
from gleanrl.memory.trees import groups_of

Flat: TypeAlias = dict[Key, torch.Tensor]
Allocate: TypeAlias = Callable[[Sequence[tuple[tuple[int, ...], torch.dtype]]], list[torch.Tensor]]
"""Makes one tensor per shape and dtype."""
_NOTHING: Mapping[str, torch.Tensor] = {}
_PLAIN: Key = ()
"""The key under which rows that are one tensor, and no TensorDict, are kept."""
_LINK = Field(("\0link",), (), torch.int64)
"""Where the successor of a frame is: a place of what is stored once. No entry has that key."""


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, decided by the first data that is stored."""

    fields: tuple[Field, ...]
    element: tuple[int, ...]
    """Batch dimensions inside a row: ``()`` for a frame, ``(4,)`` where a row is four of them."""
    envs: int | None
    """Size of the environment dimension of an ``[env, time]`` storage, ``None`` for 1-D ones."""

    once: tuple[Key, ...] = ()
    """Root entries whose successors under ``"next"`` are found by a link and not stored beside."""

    groups: tuple[Group, ...] = ()
    """Nested parts with a batch size of their own."""

    @property
    def stored(self) -> tuple[Field, ...]:
        """The fields that have memory of their own; the link, if there is one, comes last."""
        if not self.once:
            return self.fields
        found = {next_key(key) for key in self.once}
        return (*(field for field in self.fields if field.key not in found), _LINK)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of the ring."""
        return sum(field.nbytes for field in self.stored) * (self.envs or 1)

    @property
    def spare_nbytes(self) -> int:
        """Bytes of one spare place: the successors of a frame, and who it belongs to."""
        sizes = [field.nbytes for field in self.fields if field.key in self.once]
        return sum(sizes) + _LINK.nbytes if sizes else 0

    def shapes(self, slots: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return what is to be allocated for ``slots`` slots.

        What is stored once has as many spare places behind the ring's, and their owners come last.
        """
        envs = () if self.envs is None else (self.envs,)
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((slots * (2 if f.key in self.once else 1), *envs, *f.shape), f.dtype)
            for f in self.stored
        ]
        return [*shapes, ((slots * (self.envs or 1),), _LINK.dtype)] if self.once else shapes

    def extents(self, slots: int, spare: range | None = None) -> list[tuple[int, int, int]]:
        """Return parts of the memory that `shapes` describes.

        Args:
            slots: Slots of the ring.
            spare: Which spare places; by default what is needed besides all of them.

        Returns:
            Number of the tensor, first byte in it, and bytes.
        """
        found, frames = [], slots * (self.envs or 1)
        for number, field in enumerate(self.stored):
            if spare is None:
                found.append((number, 0, frames * field.nbytes))
            elif field.key in self.once:
                begin = (frames + spare.start) * field.nbytes
                found.append((number, begin, len(spare) * field.nbytes))
        if self.once and spare is None:
            found.append((len(self.stored), 0, frames * _LINK.nbytes))
        return found

    def to_json(self) -> bytes:
        """Describe the layout."""
        fields = [[list(f.key), list(f.shape), dtype_name(f.dtype)] for f in self.fields]
        found = {"fields": fields, "element": list(self.element), "envs": self.envs}
        if self.once:
            found["once"] = [list(key) for key in self.once]
        if self.groups:
            found["groups"] = [[list(g.key), list(g.shape), list(g.names)] for g in self.groups]
        return json.dumps(found).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RowLayout:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            found = json.loads(text)
            fields = tuple(_field(*entry) for entry in found["fields"])
            once = tuple(tuple(key) for key in found.get("once", ()))
            groups = tuple(
                Group(tuple(key), tuple(int(size) for size in shape), tuple(names))
                for key, shape, names in found.get("groups", ())
            )
            element = tuple(int(n) for n in found["element"])
            return cls(fields, element, found["envs"], once, groups)
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(f"no layout of a replay buffer: {text[:80]!r} ({err})") from err


def _field(key: Any, shape: Any, dtype: Any) -> Field:
    known = dtype_named(dtype)
    if known is None:
        raise ConfigError(f"torch has no dtype {dtype!r}")
    return Field(tuple(key), tuple(int(size) for size in shape), known)


def flatten(data: Any) -> Flat:
    """Return the leaves of a TensorDict, mapping or tensor by key.

    Raises:
        ConfigError: there is something else in it.
    """
    if isinstance(data, torch.Tensor):
        return {_PLAIN: data}
    return dict(_leaves(data, ()))


def _leaves(data: Any, prefix: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    if not isinstance(data, (TensorDictBase, Mapping)):
        raise ConfigError(
            f"a tensor storage stores tensors and TensorDicts of them, {_where(prefix)} is "
            f"{type(data).__name__}: use ListStorage, or leave it out"
        )
    for name, value in data.items():
        key = (*prefix, name) if isinstance(name, str) else (*prefix, *name)
        if isinstance(value, torch.Tensor):
            yield key, value
        else:
            yield from _leaves(value, key)


def _where(key: Key) -> str:
    return format_key(key) if key else "the data"


def batch_shape(data: Any, ndim: int) -> tuple[int, ...]:
    """Return the batch shape of ``data``, of a tensor or mapping its first ``ndim`` dimensions.

    Raises:
        ConfigError: it has fewer dimensions.
    """
    if isinstance(data, TensorDictBase):
        shape = tuple(data.batch_size)
    else:
        first = next(iter(flatten(data).values()), None)
        shape = () if first is None else tuple(first.shape[:ndim])
    if len(shape) < ndim:
        raise ConfigError(
            f"data of batch size {list(shape)} for a storage of {ndim} dimension(s): "
            f"extend() takes [{'env, time' if ndim == 2 else 'rows'}, ...], add() one of them"
        )
    return shape


@dataclass(frozen=True)
class _Node:
    leaves: tuple[tuple[str, int], ...]
    children: tuple[tuple[str, _Node], ...]
    group: Group | None


def _tree(fields: Sequence[tuple[Key, int]], groups: Mapping[Key, Group], at: Key = ()) -> _Node:
    leaves = tuple((key[0], index) for key, index in fields if len(key) == 1)
    inner: dict[str, list[tuple[Key, int]]] = {}
    for key, index in fields:
        if len(key) > 1:
            inner.setdefault(key[0], []).append((key[1:], index))
    children = ((name, _tree(below, groups, (*at, name))) for name, below in inner.items())
    return _Node(leaves, tuple(children), groups.get(at))


class Rows:
    """One tensor per field over all slots, ``[slots, ...]`` or ``[slots, envs, ...]``.

    What can be decided once is decided here: the order of the fields, the nesting, and how each is
    gathered.
    """

    def __init__(self, layout: RowLayout, slots: int, allocate: Allocate) -> None:
        """Allocate ``slots`` slots; contents are undefined until written."""
        self.layout = layout
        self.slots = slots
        self.frames = slots * (layout.envs or 1)
        self._keys = tuple(field.key for field in layout.fields)
        stored = layout.stored
        self._stored_keys = [field.key for field in stored]
        allocated = allocate(layout.shapes(slots))
        self.tensors = [tensor[:slots] for tensor in allocated[: len(stored)]]
        """In the order of the layout's stored fields."""
        self.owners = allocated[-1]
        """Of rows with successors stored once: number of the row that has a spare place."""
        self.kept = tuple(n for n, key in enumerate(self._keys) if key in self._stored_keys)
        """Which of the layout's fields are stored."""
        self._places = {
            # Gathering single numbers by a one-dimensional index takes half the time.
            field.key: tensor.view(
                len(tensor) * (layout.envs or 1),
                *(field.shape if math.prod(field.shape) != 1 else ()),
            )
            for tensor, field in zip(allocated, stored, strict=False)
        }
        self._linked = [key not in self._places for key in self._keys]
        self._sources = [
            self._places[key[1:] if linked else key]
            for key, linked in zip(self._keys, self._linked, strict=True)
        ]
        self._links = self._places[_LINK.key] if layout.once else None
        self._single = [
            (index, field.shape)
            for index, field in enumerate(layout.fields)
            if field.shape and math.prod(field.shape) == 1
        ]
        groups = {group.key: group for group in layout.groups}
        self._root = _tree([(key, index) for index, key in enumerate(self._keys)], groups)
        self.device = self.tensors[0].device
        self._plain = self._keys == (_PLAIN,)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.layout.nbytes * self.slots

    def take(self, data: Any, lead: int) -> list[torch.Tensor]:
        """Return the leaves of ``data`` in order, after checking them against the layout.

        Args:
            data: What is to be stored.
            lead: How many dimensions stand before those of a field.

        Raises:
            ConfigError: keys, shapes or dtypes are others than those of the first data.
        """
        flat = flatten(data)
        if len(flat) != len(self._keys) or any(key not in flat for key in self._keys):
            raise ConfigError(self._other_keys(flat))
        values = [flat[key] for key in self._keys]
        for field, value in zip(self.layout.fields, values, strict=True):
            if value.shape[lead:] != field.shape or value.dtype != field.dtype:
                raise ConfigError(
                    f"{_where(field.key)} is {value.dtype} {list(value.shape[lead:])} per row; "
                    f"this storage holds {field.dtype} {list(field.shape)}, as the first data had"
                )
        return values

    def _other_keys(self, flat: Flat) -> str:
        missing = [_where(key) for key in self._keys if key not in flat]
        extra = [_where(key) for key in flat if key not in self._keys]
        return (
            "data with other entries than the first that was stored: "
            f"missing {', '.join(missing) or 'none'}; new {', '.join(extra) or 'none'}"
        )

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> Any:
        """Return copies of the frames ``index`` (``[n]``, int64, flat over slots and envs).

        Args:
            index: Which frames.
            extra: More root entries, ``[n, ...]``; left out if rows are plain tensors.
        """
        if self._links is None:
            values = [source.index_select(0, index) for source in self._sources]
        else:
            after = self._links.index_select(0, index)
            values = [
                source.index_select(0, after if linked else index)
                for source, linked in zip(self._sources, self._linked, strict=True)
            ]
        count = index.shape[0]
        for place, shape in self._single:
            values[place] = values[place].view(count, *shape)
        return self.assemble(values, (count,), extra)

    def assemble(
        self,
        values: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        extra: Mapping[str, torch.Tensor],
    ) -> Any:
        """Nest ``values`` (in the order of the fields) as data of batch ``shape``."""
        if self._plain:
            return values[0]
        return self._build(self._root, values, torch.Size((*shape, *self.layout.element)), extra)

    def _build(
        self,
        node: _Node,
        values: Sequence[torch.Tensor],
        shape: torch.Size,
        extra: Mapping[str, torch.Tensor],
    ) -> TensorDict:
        source: dict[str, Any] = {name: values[index] for name, index in node.leaves}
        for name, child in node.children:
            source[name] = self._build(child, values, shape, _NOTHING)
        source.update(extra)
        # Shapes and devices are known to agree: the checking constructor takes 15 us more.
        group = node.group
        if group is not None:
            names = [*[None] * len(shape), *group.names]
            size = torch.Size((*shape, *group.shape))
            return TensorDict._new_unsafe(
                source=source, batch_size=size, device=self.device, names=names
            )
        return TensorDict._new_unsafe(source=source, batch_size=shape, device=self.device)

    def view(self, start: int, stop: int) -> dict[Key, torch.Tensor]:
        """Return views of slots, ``[stop - start, ...]``, by key: what is written lands there."""
        return {
            key: tensor[start:stop] for key, tensor in zip(self._keys, self.tensors, strict=True)
        }

    def field(self, key: Key) -> torch.Tensor | None:
        """Return all slots of a field, ``None`` if none is stored."""
        if key not in self._stored_keys:
            return None
        return self.tensors[self._stored_keys.index(key)]

    def spare(self) -> list[torch.Tensor]:
        """Return the spare places of what is stored once, ``[frames, ...]`` each."""
        shapes = {field.key: field.shape for field in self.layout.fields}
        return [
            self.places(key)[self.frames :].view(self.frames, *shapes[key])
            for key in self.layout.once
        ]

    def spare_up_to(self, number: int) -> list[torch.Tensor]:
        """Return the first spare places."""
        return [places[:number] for places in self.spare()]

    def places(self, key: Key) -> torch.Tensor:
        """Return the frames of what is stored once, and its spare places behind them."""
        return self._places[key]


def describe(data: Any, ndim: int, element: tuple[int, ...] | None = None) -> RowLayout:
    """Return the layout of rows as in ``data``, ``[slots, ...]`` or ``[slots, envs, ...]``.

    Args:
        data: A TensorDict, mapping or tensor.
        ndim: Dimensions of the storage.
        element: Batch dimensions inside a row; taken from the data's batch size by default.

    Raises:
        ConfigError: there is nothing in it, or something a tensor storage cannot hold.
    """
    flat = flatten(data)
    if not flat:
        raise ConfigError("data without a single tensor cannot be stored")
    shape = batch_shape(data, ndim)
    fields = tuple(
        Field(key, tuple(value.shape[ndim:]), value.dtype) for key, value in sorted(flat.items())
    )
    return RowLayout(
        fields,
        shape[ndim:] if element is None else element,
        None if ndim == 1 else shape[1],
        groups=tuple(groups_of(data)) if isinstance(data, TensorDictBase) else (),
    )
