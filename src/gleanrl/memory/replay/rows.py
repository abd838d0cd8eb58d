"""The layout of a stored row, and the tensors of all rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import END_FLAGS, Key, NestedKey, as_key, format_key, next_key
from gleanrl.core.layout import Field, Group
from gleanrl.memory.replay.row_visibility import RingIndex
from gleanrl.memory.replay.stacks import FrameStore, Stack, TakeRoom, stacks_of
from gleanrl.memory.tensor_files import checked_field, dtype_name, dtype_named
from gleanrl.memory.tensordicts import build, groups_of, nest

Shapes: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]
_PLAIN: Key = ()
"""The key under which rows that are one tensor, and no TensorDict, are kept."""
_POINTER_NBYTES = 3 * torch.int64.itemsize
"""Two pointers to an entry that is stored once, and its owner."""


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, decided by the first data that is stored."""

    fields: tuple[Field, ...]
    element: tuple[int, ...]
    """Batch dimensions inside a row: ``()`` for a frame, ``(4,)`` if a row is four frames."""
    envs: int | None
    """Size of the environment dimension of an ``[env, time]`` storage, ``None`` for 1-D ones."""

    groups: tuple[Group, ...] = ()
    """Nested parts with a batch size of their own."""

    stacks: tuple[Stack, ...] = ()
    """Entries in whose place rows point to frames."""

    @property
    def stored(self) -> tuple[Field, ...]:
        """What every row has: entries, then pointers to frames."""
        pointers = {field.key: field for stack in self.stacks for field in stack.pointers}
        plain = (field for field in self.fields if field.key not in pointers)
        return (*plain, *pointers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of the ring, and of one frame of each stack for each of its rows."""
        frames = sum(stack.nbytes for stack in self.stacks)
        return (sum(field.nbytes for field in self.stored) + frames) * (self.envs or 1)

    @property
    def sharing(self) -> str:
        """Say which arguments of a storage made this layout."""
        once = f"[{_shown(self.once)}]" if self.once else False
        stacks = (f"{format_key(one.key)}: {one.size}" for one in self.stacks if one.size > 1)
        return f"compact={once} and stacks={{{', '.join(stacks)}}}"

    @property
    def once(self) -> list[Key]:
        """Root entries that are stored once together with those under ``"next"``."""
        return [stack.key for stack in self.stacks if stack.size == 1]

    def shapes(self, slots: int) -> Shapes:
        """Return the tensors to allocate for ``slots`` slots.

        The frames of each stack and their owners follow those of all rows.
        """
        envs = () if self.envs is None else (self.envs,)
        shapes = [((slots, *envs, *f.shape), f.dtype) for f in self.stored]
        rows = slots * (self.envs or 1)
        return [*shapes, *(shape for stack in self.stacks for shape in stack.shapes(rows))]

    def to_json(self) -> bytes:
        """Describe the layout."""
        layout = {
            "fields": [(f.key, f.shape, dtype_name(f.dtype)) for f in self.fields],
            "element": self.element,
            "envs": self.envs,
            "once": self.once,
            "groups": [(g.key, g.shape, g.names) for g in self.groups],
            "stacks": [(s.key, s.size) for s in self.stacks if s.size > 1],
        }
        return json.dumps(layout).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RowLayout:
        """Read the description that `to_json` wrote."""
        try:
            layout = json.loads(text)
            groups = tuple(
                Group(tuple(key), tuple(int(size) for size in shape), tuple(names))
                for key, shape, names in layout.get("groups", ())
            )
            fields = tuple(checked_field("a layout", *entry) for entry in layout["fields"])
            return cls(
                fields,
                tuple(int(n) for n in layout["element"]),
                layout["envs"],
                groups,
                stacks_of(
                    fields,
                    {tuple(key): size for key, size in layout.get("stacks", ())},
                    [tuple(key) for key in layout.get("once", ())],
                ),
            )
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(f"no layout of a replay buffer: {text[:80]!r} ({err})") from err


def flatten(data: Any) -> dict[Key, torch.Tensor]:
    """Return the leaves of a TensorDict, mapping or tensor by key."""
    if isinstance(data, torch.Tensor):
        return {_PLAIN: data}
    return dict(_leaves(data, ()))


def _leaves(data: Any, prefix: Key) -> Iterator[tuple[Key, torch.Tensor]]:
    if data.__class__ is not TensorDict:
        _check_kind(data, prefix)
    for name, value in data.items():
        key = (*prefix, name) if isinstance(name, str) else (*prefix, *name)
        if isinstance(value, torch.Tensor):
            yield key, value
        else:
            yield from _leaves(value, key)


def _check_kind(data: Any, prefix: Key) -> None:
    """Refuse data that are not nested tensors, or have entries in some rows only."""
    if not isinstance(data, (TensorDictBase, Mapping)) or is_non_tensor(data):
        raise ConfigError(
            f"a tensor storage stores tensors and TensorDicts of them, {_name(prefix)} is "
            f"{type(data).__name__}: use ListStorage, or leave it out"
        )
    if isinstance(data, LazyStackedTensorDict):
        found = [set(part.keys()) for part in data.tensordicts]
        if odd := sorted(set().union(*found).difference(set(found[0]).intersection(*found))):
            raise ConfigError(
                f"only some rows of {_name(prefix)} have {', '.join(map(repr, odd))}, and a tensor "
                "storage has all entries in every row: use ListStorage, or leave them out"
            )


def _name(key: Key) -> str:
    return format_key(key) if key else "the data"


def batch_shape(data: Any, ndim: int) -> tuple[int, ...]:
    """Return the batch shape of ``data``, of a tensor or mapping its first ``ndim`` dimensions."""
    if isinstance(data, TensorDictBase):
        shape = tuple(data.batch_size)
    else:
        sizes = {key: tuple(value.shape[:ndim]) for key, value in flatten(data).items()}
        if len(set(sizes.values())) > 1:
            raise ConfigError(f"entries of different numbers of rows: {sizes}")
        shape = next(iter(sizes.values()), ())
    if len(shape) < ndim:
        raise ConfigError(
            f"data of batch size {list(shape)} for a storage of {ndim} dimension(s): "
            f"extend() takes [{'env, time' if ndim == 2 else 'rows'}, ...], add() one of them"
        )
    return shape


def describe(data: Any, ndim: int, time: int) -> RowLayout:
    """Return the layout of rows as in ``data``, whose first ``ndim`` dimensions are slots and envs.

    Dimension ``time`` is that of the slots.
    """
    flat = flatten(data)
    if not flat:
        raise ConfigError("data without a single tensor cannot be stored")
    for key, value in flat.items():
        plain = value.layout == torch.strided and not (value.is_nested or value.is_meta)
        if not plain or dtype_named(dtype_name(value.dtype)) is None:
            raise ConfigError(
                f"{_name(key)} is a {value.layout} tensor of {value.dtype} on {value.device}"
                f"{', nested' * value.is_nested}: a tensor storage stores dense ones, with values"
            )
    shape = batch_shape(data, ndim)
    return RowLayout(
        tuple(Field(key, tuple(v.shape[ndim:]), v.dtype) for key, v in sorted(flat.items())),
        shape[ndim:],
        None if ndim == 1 else shape[1 - time],
        groups=tuple(groups_of(data)) if isinstance(data, TensorDictBase) else (),
    )


class Rows:
    """One tensor per field over all slots, ``[slots, ...]`` or ``[slots, envs, ...]``.

    The order of the fields, their nesting and the way of gathering each are decided once, here.
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
        self.tensors = allocated[: len(stored)]
        """In the order of the layout's stored fields."""
        stacked = {field.key: n for n, stack in enumerate(layout.stacks) for field in stack.fields}
        self.by_key = {
            field.key: tensor
            for field, tensor in zip(stored, self.tensors, strict=True)
            if field.key not in stacked
        }
        """The entries that are stored as they are."""
        beyond = allocated[len(stored) :]
        self.frames_of = [*zip(beyond[::2], beyond[1::2], strict=True)]
        """The frames of each stack, and their owners."""
        self.kept = tuple(n for n, key in enumerate(self.keys) if key in self.by_key)
        """Which of the layout's fields are stored."""
        self.places = {
            # Gathering single numbers by a one-dimensional index takes half the time.
            field.key: tensor.view(
                len(tensor) * (layout.envs or 1),
                *(field.shape if math.prod(field.shape) != 1 else ()),
            )
            for tensor, field in zip(self.tensors, stored, strict=True)
        }
        """The frames of stored fields."""
        self._sources = [self.places[key] for key in self.keys]
        self._stacked = [
            (index, layout.stacks[stacked[key]], self.frames_of[stacked[key]][0])
            for index, key in enumerate(self.keys)
            if key in stacked
        ]
        self._single = [
            (index, field.shape)
            for index, field in enumerate(layout.fields)
            if field.shape and math.prod(field.shape) == 1
        ]
        self._groups = {group.key: group for group in layout.groups}
        self._tree = nest({key: index for index, key in enumerate(self.keys) if key})
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
        values = [source.index_select(0, index) for source in self._sources]
        count = index.shape[0]
        for place, stack, frames in self._stacked:
            values[place] = stack.join(frames, values[place].view(count, stack.size))
        for place, shape in self._single:
            values[place] = values[place].view(count, *shape)
        if self._plain:
            return values[0]
        shape = torch.Size((count, *self.layout.element))
        if self.layout.element:  # rows that are batches themselves: each frame has the row's
            ones = [1] * len(self.layout.element)
            extra = {
                name: value.view(count, *ones, *value.shape[1:]).expand(*shape, *value.shape[1:])
                for name, value in extra.items()
            }
        tree = self._tree
        if extra:
            places = range(len(values), len(values) + len(extra))
            tree = {**tree, **dict(zip(extra, places, strict=True))}
            values += extra.values()
        # Shapes and devices are known to agree: the checking constructor takes 15 us more.
        return build(tree, values, shape, None, self._groups, self.device)

    def beyond(self, ring: RingIndex | None = None) -> list[torch.Tensor]:
        """Return the frames of each stack.

        As many as the rows of ``ring`` ever needed; by default, as many as there can be.
        """
        return [
            frames[: ring and self.frames + int(ring.table(n)[0])]
            for n, (frames, _) in enumerate(self.frames_of)
        ]

    def nbytes(self, ring: RingIndex) -> int:
        """Return the bytes in use, with all bookkeeping."""
        stacks = enumerate(self.layout.stacks)
        more = sum(stack.nbytes * int(ring.table(n)[0]) for n, stack in stacks)
        return self.layout.nbytes * self.slots + more

    def parts(self, ring: RingIndex, take_room: TakeRoom) -> list[FrameStore]:
        """Return the stores of the entries that are not stored as they are."""
        parts = []
        for table, (stack, tensors) in enumerate(
            zip(self.layout.stacks, self.frames_of, strict=True)
        ):
            pointers = {
                self.keys.index(f.key): self.places[f.key].view(self.frames, stack.size)
                for f in stack.fields
            }
            parts.append(FrameStore(stack, pointers, tensors, ring, table, take_room))
        return parts


def deduplicate(
    layout: RowLayout, compact: bool | Sequence[NestedKey], stacks: Mapping[NestedKey, int]
) -> RowLayout:
    """Return ``layout`` with the entries of which equal ones, or equal frames, are stored once.

    The arguments ``compact`` and ``stacks`` are those of `LazyTensorStorage`.
    """
    chosen = stacks_of(layout.fields, stacks)
    if chosen and layout.element:
        raise ConfigError(f"stacks is for rows that are one frame each, not {layout.element}")
    pointed = {field.key for stack in chosen for field in stack.fields}
    once = () if compact is False else _chosen(layout, compact, pointed)
    return replace(layout, stacks=stacks_of(layout.fields, stacks, once))


def _chosen(
    layout: RowLayout, compact: bool | Sequence[NestedKey], pointed: set[Key]
) -> tuple[Key, ...]:
    fields = {field.key: field for field in layout.fields if field.key not in pointed}
    twins = [
        key
        for key, field in fields.items()
        if (after := fields.get(next_key(key))) is not None
        and (after.shape, after.dtype) == (field.shape, field.dtype)
    ]
    if isinstance(compact, bool):
        # A single number, such as a step count, is no observation.
        chosen = tuple(k for k in twins if fields[k].nbytes > 8 and k[-1] not in END_FLAGS)
    else:
        chosen = tuple(key for key in map(as_key, compact) if key not in pointed)
        for key in chosen:
            if key not in twins:
                raise ConfigError(
                    f"compact names {format_key(key)}, but the data have no "
                    f"{format_key(next_key(key))} of the same shape and dtype; they have "
                    f"{_shown(fields)}"
                )
    if not chosen and not pointed:
        raise ConfigError(
            "a compact storage needs observations together with their successors under 'next'; the "
            f"data have {_shown(fields)}. Collect with compact_obs=False (the storage keeps each "
            "observation once by itself), or store with compact=False"
        )
    least = _POINTER_NBYTES if compact is True else 0
    return tuple(key for key in chosen if fields[key].nbytes > least)


def _shown(keys: Any) -> str:
    return ", ".join(map(format_key, keys))
