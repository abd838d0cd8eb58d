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

Shapes: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]
_NOTHING: Mapping[str, torch.Tensor] = {}
_PLAIN: Key = ()
"""The key under which rows that are one tensor, and no TensorDict, are kept."""
_LINK = Field(("\0link",), (), torch.int64)
"""Place of the successor of a frame in the deduplicated fields. No entry has that key."""


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, decided by the first data that is stored."""

    fields: tuple[Field, ...]
    element: tuple[int, ...]
    """Batch dimensions inside a row: ``()`` for a frame, ``(4,)`` where a row is four of them."""
    envs: int | None
    """Size of the environment dimension of an ``[env, time]`` storage, ``None`` for 1-D ones."""

    dedup: tuple[Key, ...] = ()
    """Root entries whose successors under ``"next"`` are found by a link and not stored beside."""

    groups: tuple[Group, ...] = ()
    """Nested parts with a batch size of their own."""

    @property
    def stored(self) -> tuple[Field, ...]:
        """The fields that have memory of their own; the link, if there is one, comes last."""
        if not self.dedup:
            return self.fields
        linked = {next_key(key) for key in self.dedup}
        return (*(field for field in self.fields if field.key not in linked), _LINK)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of the ring."""
        return sum(field.nbytes for field in self.stored) * (self.envs or 1)

    @property
    def overflow_nbytes(self) -> int:
        """Bytes of one overflow place: the successors of a frame, and whose they are."""
        sizes = [field.nbytes for field in self.fields if field.key in self.dedup]
        return sum(sizes) + _LINK.nbytes if sizes else 0

    def shapes(self, slots: int) -> Shapes:
        """Return the tensors to allocate for ``slots`` slots.

        Deduplicated fields have as many overflow places behind the ring's; their owners come last.
        """
        envs = () if self.envs is None else (self.envs,)
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((slots * (2 if f.key in self.dedup else 1), *envs, *f.shape), f.dtype)
            for f in self.stored
        ]
        return [*shapes, ((slots * (self.envs or 1),), _LINK.dtype)] if self.dedup else shapes

    def extents(self, slots: int, overflow: range | None) -> list[tuple[int, int, int]]:
        """Return parts of the memory that `shapes` describes.

        Args:
            slots: Slots of the ring.
            overflow: Which overflow places; ``None`` is all memory but those.

        Returns:
            Number of the tensor, first byte in it, and bytes.
        """
        frames = slots * (self.envs or 1)
        if overflow is not None:
            return [
                (number, (frames + overflow.start) * f.nbytes, len(overflow) * f.nbytes)
                for number, f in enumerate(self.stored)
                if f.key in self.dedup
            ]
        parts = [(number, 0, frames * field.nbytes) for number, field in enumerate(self.stored)]
        return [*parts, (len(parts), 0, frames * _LINK.nbytes)] if self.dedup else parts

    def to_json(self) -> bytes:
        """Describe the layout."""
        fields = [[list(f.key), list(f.shape), dtype_name(f.dtype)] for f in self.fields]
        layout: dict[str, Any] = {
            "fields": fields,
            "element": list(self.element),
            "envs": self.envs,
        }
        if self.dedup:
            layout["once"] = [list(key) for key in self.dedup]
        if self.groups:
            layout["groups"] = [[list(g.key), list(g.shape), list(g.names)] for g in self.groups]
        return json.dumps(layout).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RowLayout:
        """Read what `to_json` wrote."""
        try:
            layout = json.loads(text)
            groups = tuple(
                Group(tuple(key), tuple(int(size) for size in shape), tuple(names))
                for key, shape, names in layout.get("groups", ())
            )
            return cls(
                tuple(_field(*entry) for entry in layout["fields"]),
                tuple(int(n) for n in layout["element"]),
                layout["envs"],
                tuple(tuple(key) for key in layout.get("once", ())),
                groups,
            )
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(f"no layout of a replay buffer: {text[:80]!r} ({err})") from err


def _field(key: Any, shape: Any, dtype: Any) -> Field:
    known = dtype_named(dtype)
    if known is None:
        raise ConfigError(f"torch has no dtype {dtype!r}")
    return Field(tuple(key), tuple(int(size) for size in shape), known)


def flatten(data: Any) -> dict[Key, torch.Tensor]:
    """Return the leaves of a TensorDict, mapping or tensor by key."""
    if isinstance(data, torch.Tensor):
        return {_PLAIN: data}
    return dict(_leaves(data, ()))


def _leaves(data: Any, prefix: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    if not isinstance(data, (TensorDictBase, Mapping)):
        raise ConfigError(
            f"a tensor storage stores tensors and TensorDicts of them, {_name(prefix)} is "
            f"{type(data).__name__}: use ListStorage, or leave it out"
        )
    for name, value in data.items():
        key = (*prefix, name) if isinstance(name, str) else (*prefix, *name)
        if isinstance(value, torch.Tensor):
            yield key, value
        else:
            yield from _leaves(value, key)


def _name(key: Key) -> str:
    return format_key(key) if key else "the data"


def batch_shape(data: Any, ndim: int) -> tuple[int, ...]:
    """Return the batch shape of ``data``, of a tensor or mapping its first ``ndim`` dimensions."""
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


def describe(data: Any, ndim: int, element: tuple[int, ...] | None = None) -> RowLayout:
    """Return the layout of rows as in ``data``, ``[slots, ...]`` or ``[slots, envs, ...]``."""
    flat = flatten(data)
    if not flat:
        raise ConfigError("data without a single tensor cannot be stored")
    shape = batch_shape(data, ndim)
    return RowLayout(
        tuple(Field(key, tuple(v.shape[ndim:]), v.dtype) for key, v in sorted(flat.items())),
        shape[ndim:] if element is None else element,
        None if ndim == 1 else shape[1],
        groups=tuple(groups_of(data)) if isinstance(data, TensorDictBase) else (),
    )


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

    def __init__(
        self, layout: RowLayout, slots: int, allocate: Callable[[Shapes], list[torch.Tensor]]
    ) -> None:
        """Allocate ``slots`` slots; contents are undefined until written."""
        self.layout = layout
        self.slots = slots
        self.frames = slots * (layout.envs or 1)
        self.keys = tuple(field.key for field in layout.fields)
        stored = layout.stored
        allocated = allocate(layout.shapes(slots))
        self.tensors = [tensor[:slots] for tensor in allocated[: len(stored)]]
        """In the order of the layout's stored fields."""
        self.by_key = {f.key: tensor for f, tensor in zip(stored, self.tensors, strict=True)}
        self.owners = allocated[-1]
        """Of deduplicated rows: number of the row that has an overflow place."""
        self.kept = tuple(n for n, key in enumerate(self.keys) if key in self.by_key)
        """Which of the layout's fields are stored."""
        self.places = {
            # Gathering single numbers by a one-dimensional index takes half the time.
            field.key: tensor.view(
                len(tensor) * (layout.envs or 1),
                *(field.shape if math.prod(field.shape) != 1 else ()),
            )
            for tensor, field in zip(allocated, stored, strict=False)
        }
        """The frames of stored fields; of deduplicated ones, the overflow places behind them."""
        self._linked = [key not in self.places for key in self.keys]
        self._sources = [
            self.places[key[1:] if linked else key]
            for key, linked in zip(self.keys, self._linked, strict=True)
        ]
        self._links = self.places[_LINK.key] if layout.dedup else None
        self._single = [
            (index, field.shape)
            for index, field in enumerate(layout.fields)
            if field.shape and math.prod(field.shape) == 1
        ]
        groups = {group.key: group for group in layout.groups}
        self._root = _tree([(key, index) for index, key in enumerate(self.keys)], groups)
        self.device = self.tensors[0].device
        self._plain = self.keys == (_PLAIN,)

    def take(self, data: Any, lead: int) -> list[torch.Tensor]:
        """Return the checked leaves of ``data``; ``lead`` dimensions precede those of a field."""
        flat = flatten(data)
        if len(flat) != len(self.keys) or any(key not in flat for key in self.keys):
            missing = [_name(key) for key in self.keys if key not in flat]
            extra = [_name(key) for key in flat if key not in self.keys]
            raise ConfigError(
                "data with other entries than the first that was stored: "
                f"missing {', '.join(missing) or 'none'}; new {', '.join(extra) or 'none'}"
            )
        values = [flat[key] for key in self.keys]
        for field, value in zip(self.layout.fields, values, strict=True):
            if value.shape[lead:] != field.shape or value.dtype != field.dtype:
                raise ConfigError(
                    f"{_name(field.key)} is {value.dtype} {list(value.shape[lead:])} per row; "
                    f"this storage holds {field.dtype} {list(field.shape)}, as the first data had"
                )
        return values

    def gather(self, index: torch.Tensor, extra: Mapping[str, torch.Tensor]) -> Any:
        """Return copies of frames (int64 ``[n]``, over slots and envs) with ``extra`` entries."""
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
        if self._plain:
            return values[0]
        return self._build(self._root, values, torch.Size((count, *self.layout.element)), extra)

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

    def overflow(self, number: int) -> list[torch.Tensor]:
        """Return the first ``number`` overflow places of each deduplicated field."""
        shapes = {field.key: field.shape for field in self.layout.fields}
        places = [self.places[key][self.frames :][:number] for key in self.layout.dedup]
        return [
            part.view(len(part), *shapes[key])
            for key, part in zip(self.layout.dedup, places, strict=True)
        ]
