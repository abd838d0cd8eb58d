"""The layout of a stored row, the tensors of all rows, and links to successors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import END_FLAGS, Key, NestedKey, as_key, format_key, next_key
from gleanrl.core.layout import Field, Group
from gleanrl.memory.replay.place_allocation import Places, TakeRoom
from gleanrl.memory.replay.row_visibility import STEP, RingIndex, Words
from gleanrl.memory.replay.stacks import FrameStore, Stack, stacks_of, words
from gleanrl.memory.tensor_files import checked_field, dtype_name, dtype_named
from gleanrl.memory.tensordicts import build, groups_of, indexable, nest

Shapes: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]
_PLAIN: Key = ()
"""The key under which rows that are one tensor, and no TensorDict, are kept."""
_LINK = Field(("\0link",), (), torch.int64)
"""Place of the successor of a frame in the deduplicated fields. No entry has that key."""


@dataclass(frozen=True)
class RowLayout:
    """The fields of a row, decided by the first data that is stored."""

    fields: tuple[Field, ...]
    element: tuple[int, ...]
    """Batch dimensions inside a row: ``()`` for a frame, ``(4,)`` if a row is four frames."""
    envs: int | None
    """Size of the environment dimension of an ``[env, time]`` storage, ``None`` for 1-D ones."""

    dedup: tuple[Key, ...] = ()
    """Root entries whose successors under ``"next"`` are found by a link instead of a copy."""

    groups: tuple[Group, ...] = ()
    """Nested parts with a batch size of their own."""

    stacks: tuple[Stack, ...] = ()
    """Entries in whose place rows point to frames."""

    @property
    def stored(self) -> tuple[Field, ...]:
        """What every row has: entries, then pointers to frames, then the link, if there is one."""
        pointers = {field.key: field for stack in self.stacks for field in stack.pointers}
        others = {next_key(key) for key in self.dedup} | set(pointers)
        plain = (field for field in self.fields if field.key not in others)
        return (*plain, *pointers.values(), *([_LINK] if self.dedup else []))

    @property
    def nbytes(self) -> int:
        """Bytes of one slot of the ring, and of one frame of each stack for each of its rows."""
        frames = sum(stack.nbytes for stack in self.stacks)
        return (sum(field.nbytes for field in self.stored) + frames) * (self.envs or 1)

    @property
    def sharing(self) -> str:
        """Say which arguments of a storage made this layout."""
        compact = f"[{_shown(self.dedup)}]" if self.dedup else False
        stacks = ", ".join(f"{format_key(one.fields[0].key)}: {one.size}" for one in self.stacks)
        return f"compact={compact} and stacks={{{stacks}}}"

    @property
    def overflow_nbytes(self) -> int:
        """Bytes of one overflow place: the successors of a frame, and the number of its row."""
        sizes = [field.nbytes for field in self.fields if field.key in self.dedup]
        return sum(sizes) + _LINK.nbytes if sizes else 0

    def shapes(self, slots: int) -> Shapes:
        """Return the tensors to allocate for ``slots`` slots.

        Deduplicated fields have as many overflow places behind the ring's; their owners follow,
        then the frames of each stack and their owners.
        """
        envs = () if self.envs is None else (self.envs,)
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((slots * (2 if f.key in self.dedup else 1), *envs, *f.shape), f.dtype)
            for f in self.stored
        ]
        rows = slots * (self.envs or 1)
        shapes += [((rows,), _LINK.dtype)] if self.dedup else []
        return shapes + [shape for stack in self.stacks for shape in stack.shapes(rows)]

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
        if self.stacks:
            layout["stacks"] = [[list(s.fields[0].key), s.size] for s in self.stacks]
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
                tuple(tuple(key) for key in layout.get("once", ())),
                groups,
                stacks_of(fields, {tuple(key): size for key, size in layout.get("stacks", ())}),
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
        self.tensors = [tensor[:slots] for tensor in allocated[: len(stored)]]
        """In the order of the layout's stored fields."""
        stacked = {field.key: n for n, stack in enumerate(layout.stacks) for field in stack.fields}
        self.by_key = {
            field.key: tensor
            for field, tensor in zip(stored, self.tensors, strict=True)
            if field.key not in stacked
        }
        """The entries that are stored as they are."""
        beyond = allocated[len(stored) :]
        self.owners = beyond.pop(0) if layout.dedup else None
        """Of deduplicated rows: number of the row that has an overflow place."""
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
            for tensor, field in zip(allocated, stored, strict=False)
        }
        """The frames of stored fields; of deduplicated ones, the overflow places behind them."""
        self._linked = [key not in self.places for key in self.keys]
        self._sources = [
            self.places[key[1:] if linked else key]
            for key, linked in zip(self.keys, self._linked, strict=True)
        ]
        self._links = self.places[_LINK.key] if layout.dedup else None
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
        if self._links is None:
            values = [source.index_select(0, index) for source in self._sources]
        else:
            after = self._links.index_select(0, index)
            values = [
                source.index_select(0, after if linked else index)
                for source, linked in zip(self._sources, self._linked, strict=True)
            ]
        for place, stack, frames in self._stacked:
            values[place] = stack.join(frames, values[place])
        count = index.shape[0]
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
        """Return the overflow places of each deduplicated field, then the frames of each stack.

        As many as the rows of ``ring`` ever needed; by default, as many as there can be.
        """
        begins = [0, *[self.frames] * len(self.frames_of)]
        ends = [ring and begin + int(ring.table(n)[0]) for n, begin in enumerate(begins)]
        fields = [field for field in self.layout.stored if field.key in self.layout.dedup]
        parts = [self.places[field.key][self.frames :][: ends[0]] for field in fields]
        return [
            *(part.view(-1, *f.shape) for part, f in zip(parts, fields, strict=True)),
            *(frames[:end] for (frames, _), end in zip(self.frames_of, ends[1:], strict=True)),
        ]

    def nbytes(self, ring: RingIndex) -> int:
        """Return the bytes in use, with all bookkeeping."""
        more = [self.layout.overflow_nbytes, *(stack.nbytes for stack in self.layout.stacks)]
        used = sum(size * int(ring.table(n)[0]) for n, size in enumerate(more))
        return self.layout.nbytes * self.slots + used

    def parts(self, ring: RingIndex, take_room: TakeRoom) -> list[SuccessorLinks | FrameStore]:
        """Return the stores of the entries that are not stored as they are."""
        parts: list[SuccessorLinks | FrameStore] = []
        if self.owners is not None:
            parts.append(SuccessorLinks(self, self.owners, ring, take_room))
        stacks = zip(self.layout.stacks, self.frames_of, strict=True)
        for table, (stack, tensors) in enumerate(stacks, 1):
            pointers = {self.keys.index(f.key): self.places[f.key] for f in stack.fields}
            parts.append(FrameStore(stack, pointers, tensors, ring, table, take_room))
        return parts


def deduplicate(
    layout: RowLayout, compact: bool | Sequence[NestedKey], stacks: Mapping[NestedKey, int]
) -> RowLayout:
    """Return ``layout`` with the entries whose successors are linked, and those of frames.

    Args:
        layout: The fields of a row.
        compact: ``False``, ``True`` for every entry that is larger than the link that replaces it,
            or root keys.
        stacks: Entries that are stacks of frames, with the number of frames.
    """
    chosen = stacks_of(layout.fields, stacks)
    if chosen and layout.element:
        raise ConfigError(f"stacks is for rows that are one frame each, not {layout.element}")
    pointed = {field.key for stack in chosen for field in stack.fields}
    dedup = () if compact is False else _chosen(layout, compact, pointed)
    return replace(layout, dedup=dedup, stacks=chosen)


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
        large = [key for key in twins if fields[key].nbytes > _LINK.nbytes]
        chosen = tuple(key for key in large if key[-1] not in END_FLAGS)
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
            "a compact storage needs observations together with their successors under 'next', of "
            f"more than {_LINK.nbytes} bytes; the data have {_shown(fields)}. Collect "
            "with compact_obs=False (the storage keeps each observation once by itself), or store "
            "with compact=False"
        )
    return chosen


def _shown(keys: Any) -> str:
    return ", ".join(map(format_key, keys))


class SuccessorLinks:
    """Links the rows of one storage to their successors, and gives out its overflow places.

    Every row has a *link*, the place of its successor's observation. Where the next row of the same
    `extend` begins with the very bits, that is the next row's place. The successors of all other
    rows (the last row of an `extend`, ends of episodes, rows of other trajectories side by side)
    are *unlinked*: they are kept in *overflow* places behind those of the ring. Bits are compared,
    not ids or flags, so no sample differs from the data that was stored.

    A row never outlives its successor: places are taken in order, so the next row of an
    `extend` is never overwritten before the row itself, and an overflow place is free only when the
    row that has it was overwritten. There are as many overflow places as rows, so there is always
    one; memory is touched only as far as they were ever needed.
    """

    def __init__(
        self, rows: Rows, owners: torch.Tensor, ring: RingIndex, take_room: TakeRoom
    ) -> None:
        """Link ``rows`` of ``ring``; overflow places have ``owners``."""
        self._rows = rows
        self._ring = ring
        self._envs = rows.layout.envs or 1
        self._lead = 1 if rows.layout.envs is None else 2
        self._links: Words = rows.tensors[-1].view(rows.frames).numpy()
        self._pairs = [
            (rows.keys.index(key), rows.keys.index(next_key(key)), rows.places[key])
            for key in rows.layout.dedup
        ]
        overflow = [places[rows.frames :] for *_, places in self._pairs]
        self.places = Places(0, ring, owners.numpy(), 0, 4, overflow, take_room)

    def store(self, first: int, count: int, values: Sequence[torch.Tensor], offset: int) -> None:
        """Store the successors of ``count`` rows from position ``first`` on.

        In ``values`` they begin at ``offset``. Inside `RingIndex.append`.
        """
        rows, envs = self._rows, self._envs
        slot = (first + 1 + np.arange(count, dtype=np.int64)) % rows.slots
        links = (slot[:, None] * envs + np.arange(envs)).reshape(-1)
        unlinked = np.flatnonzero(self._unlinked(values, offset, count))
        row = unlinked // envs
        claimed = self.places.claim(len(row))
        self.places.owners[claimed] = first + 1 + row
        overflow = rows.frames + claimed
        links[unlinked] = overflow
        for start, stop, ahead in self._ring.pieces(first, count):
            part = links[ahead * envs : (ahead + stop - start) * envs]
            # A ufunc stores whole words: others may read a link while it changes.
            np.add(part, 0, out=self._links[start * envs : stop * envs])
        where = torch.from_numpy(overflow)
        chosen: tuple[torch.Tensor, ...] = (torch.from_numpy(row + offset),)
        if self._lead == 2:
            chosen = (*chosen, torch.from_numpy(unlinked % envs))
        for _, after, places in self._pairs:
            successors = values[after].detach()[chosen]
            shape = (len(overflow), *places.shape[1:])
            successors = indexable(successors.to(places.device).reshape(shape))
            indexable(places).index_copy_(0, where, successors)

    def rebuild(self) -> None:
        """Note which row has which overflow place, after rows were put back; inside `section`."""
        frames = self._rows.frames
        numbers = self._ring.sequence[: self._rows.slots].repeat(self._envs)
        having = np.flatnonzero((numbers > 0) & (self._links >= frames))
        self.places.owners[: self.places.size] = 0
        self.places.owners[self._links[having] - frames] = numbers[having] // STEP

    def _unlinked(self, values: Sequence[torch.Tensor], offset: int, count: int) -> Any:
        """Tell which frames are not followed by the next row's, ``[count * envs]``."""
        unlinked = np.ones((count, self._envs), bool)
        unlinked[:-1] = False
        stop = offset + count
        for root, after, _ in self._pairs:
            other = _differ(
                values[after][offset : stop - 1], values[root][offset + 1 : stop], self._lead
            )
            unlinked[:-1] |= other.reshape(count - 1, self._envs)
        return unlinked.reshape(-1)


def fields_at(layout: RowLayout, state: Mapping[str, Any], slots: torch.Tensor) -> Any:
    """Return all fields of some slots of a storage's state, by key."""
    stored, number = state["tensors"], len(layout.stored)
    data = {f.key: t[slots] for f, t in zip(layout.stored, stored[:number], strict=True)}
    if layout.dedup:
        link = data.popitem()[1]
        size = state["slots"] * (layout.envs or 1)
        near, keys = link < size, [field.key for field in layout.stored]
        dedup = [key for key in keys if key in layout.dedup]
        for key, overflow in zip(dedup, stored[number:], strict=False):
            frames = stored[keys.index(key)].flatten(0, link.ndim - 1)
            after = frames.new_empty((*link.shape, *frames.shape[1:]))
            after[near], after[~near] = frames[link[near]], overflow[link[~near] - size]
            data[next_key(key)] = after
    for stack, frames in zip(layout.stacks, stored[number + len(layout.dedup) :], strict=True):
        for field in stack.fields:
            data[field.key] = stack.join(frames, data[field.key])
    return data


def _differ(one: torch.Tensor, other: torch.Tensor, lead: int) -> Any:
    """Tell which frames differ in any bit."""
    shape = one.shape[:lead]
    if not one.numel():
        return np.zeros(shape, bool)
    flat = [value.detach().reshape(*shape, -1) for value in (one, other)]
    if one.device.type == other.device.type == "cpu":
        # A quarter of torch's time.
        return (words(flat[0]) != words(flat[1])).any(-1)
    flat = [value.contiguous().view(torch.uint8).to(one.device) for value in flat]
    return (flat[0] != flat[1]).any(-1).cpu().numpy()
