"""Entries, and frames of stacks, of which equal ones are stored once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, NestedKey, as_key, format_key, next_key
from gleanrl.core.layout import Field
from gleanrl.memory.replay.row_visibility import STEP, TABLES, RingIndex, Words

_AT_ONCE = 1 << 20
"""Bytes of frames that are looked for together: they stay in a cache."""
_REMEMBERED = 1 << 15
"""Frames among which equal ones are looked for, the newest."""
TakeRoom: TypeAlias = Callable[[Sequence[torch.Tensor]], None]
"""Reserves the memory of tensors before they are written."""
_CHUNK = 1024
"""Places that are checked together."""
_SHARE = 64
"""When no place is free, this fraction (a divisor) of all places is added."""


@dataclass(frozen=True)
class Stack:
    """Entries of a row that are stacks of frames: one at the root, and the same one under next.

    A stack of one frame is an entry that is stored once itself.
    """

    fields: tuple[Field, ...]
    size: int
    """Frames in a stack."""
    last: bool
    """Whether the last dimension is that of the frames: ``[84, 84, 4]``."""

    @classmethod
    def of(cls, fields: Mapping[Key, Field], key: Key, size: int) -> Stack:
        """Find the entries, and their dimension of frames."""
        field = fields.get(key)
        if field is None:
            raise ConfigError(
                f"stacks names {format_key(key)}, and the data have "
                f"{', '.join(map(format_key, fields))}"
            )
        shape = field.shape
        if isinstance(size, int) and size > 1 and field.nbytes and shape:
            last = shape[0] != size and shape[-1] == size
            after = fields.get(next_key(key), field)
            both = after is not field and (after.shape, after.dtype) == (shape, field.dtype)
            if last or shape[0] % size == 0:
                return cls((field, after) if both else (field,), size, last)
        raise ConfigError(
            f"stacks names {format_key(key)} as a stack of {size!r} frames, and it is "
            f"{list(shape)} per row. The first or the last dimension is that of two or more "
            "frames, or the first dimension is a multiple of their number"
        )

    @property
    def key(self) -> Key:
        """The key of the entry at the root."""
        return self.fields[0].key

    @property
    def pointers(self) -> tuple[Field, ...]:
        """What a row has in place of the entries: the places of their frames."""
        return tuple(Field(field.key, (self.size,), torch.int64) for field in self.fields)

    @property
    def frame(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a stored frame."""
        return (math.prod(self.fields[0].shape) // self.size,), self.fields[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one place of a frame: the frame, and the number of its owner."""
        return self.fields[0].nbytes // self.size + torch.int64.itemsize

    def shapes(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return what ``rows`` rows need at most: frames, if no two are equal, and their owners."""
        most, (shape, dtype) = rows * self.size * len(self.fields), self.frame
        return [((most, *shape), dtype), ((most,), torch.int64)]

    def split(self, values: torch.Tensor) -> Any:
        """Return the frames of stacks ``[..., *shape]`` as words, ``[n, size, words]``."""
        values = values.detach().cpu().resolve_conj().resolve_neg()
        if self.last:
            values = torch.stack(values.unbind(-1), values.ndim - len(self.fields[0].shape))
        return words(values.reshape(-1, self.size, *self.frame[0]))

    def join(self, frames: torch.Tensor, pointers: torch.Tensor) -> torch.Tensor:
        """Return stacks ``[..., *shape]`` of the frames at ``pointers``, ``[..., size]``."""
        lead, shape = pointers.shape[:-1], self.fields[0].shape
        values = frames.index_select(0, pointers.reshape(-1))
        if not self.last:
            return values.view(*lead, *shape)
        # A view: interleaving the elements of frames takes longer than gathering them.
        return values.view(*lead, self.size, *shape[:-1]).movedim(len(lead), -1)


def stacks_of(
    fields: Sequence[Field], stacks: Mapping[NestedKey, int], once: Sequence[Key] = ()
) -> tuple[Stack, ...]:
    """Return the entries that ``stacks`` names, with the number of their frames.

    Those of ``once``, which have the same entries under next, are one frame each.
    """
    if (number := len(stacks) + len(once)) > TABLES:
        raise ConfigError(
            f"stacks and compact name {number} entries, at most {TABLES} are possible"
        )
    by_key = {field.key: field for field in fields}
    return (
        *(Stack.of(by_key, as_key(key), size) for key, size in stacks.items()),
        *(Stack((by_key[key], by_key[next_key(key)]), 1, False) for key in once),
    )


def words(values: torch.Tensor) -> Any:
    """Return the bits of ``values`` as a numpy array of words, which compare fast."""
    flat = values.contiguous().view(torch.uint8)
    if flat.shape[-1] % 8 == 0:
        flat = (flat.clone() if flat.storage_offset() % 8 else flat).view(torch.int64)
    return flat.numpy()


class Places:
    """Gives out places of one table, each to a row, its owner.

    A place is free when its owner was overwritten. All methods are for use inside `section`. A few
    places are there from the beginning; more are taken into use when none is free.
    """

    def __init__(
        self,
        table: int,
        ring: RingIndex,
        owners: Words,
        first: int,
        tensors: Sequence[torch.Tensor],
        take_room: TakeRoom,
    ) -> None:
        """Describe table number ``table`` of ``ring``.

        ``owners`` has for each place that there can ever be the position of its owner plus 1, or 0.
        The ``first`` places are there from the beginning. ``take_room`` reserves memory of
        ``tensors``, the contents of places.
        """
        self.owners = owners
        self._ring = ring
        self._words = ring.table(table)
        self._first = first
        self._tensors = tensors
        self._take_room = take_room

    @property
    def size(self) -> int:
        """Places that were ever in use, and those that were there from the beginning."""
        return self._first + int(self._words[0])

    def grow(self, size: int) -> None:
        """Have at least ``size`` places, taken or not."""
        if size > self.size:
            self._take_room([tensor[self.size : size] for tensor in self._tensors])
            self.owners[self.size : size] = 0
            self._words[0] = size - self._first

    def claim(self, need: int) -> Words:
        """Return ``need`` free places; the caller writes their owners."""
        found = self._free(need)
        if len(found) < need:
            first, missing = self.size, need - len(found)
            self.grow(min(len(self.owners), first + max(missing, first // _SHARE)))
            found = np.concatenate([found, np.arange(first, first + missing)])
        if need:
            self._words[1] = int(found[-1]) + 1
        return found

    def taken(self, places: Words) -> Any:
        """Tell which places have an owner that is complete, or being written."""
        owners = self.owners[places]
        numbers = np.abs(self._ring.sequence[(owners - 1) % self._ring.slots])
        return (owners > 0) & (numbers // STEP == owners)

    def _free(self, need: int) -> Words:
        """Look for free places from where the last ones were given out, oldest first."""
        size, first = self.size, int(self._words[1])
        parts, have = [np.empty(0, np.int64)], 0
        for begin, end in ((first, size), (0, min(first, size))):
            for start in range(begin, end, max(_CHUNK, need)):
                if have >= need:
                    break
                stop = min(end, start + max(_CHUNK, need))
                parts.append(np.flatnonzero(~self.taken(np.arange(start, stop))) + start)
                have += len(parts[-1])
        return np.concatenate(parts)[:need]


class FrameStore:
    """Stores the frames of stacks, and points to them from rows.

    A frame with the same bits as one of the last stored frames is not stored again. A frame's owner
    is the newest row that points to it. A word has the newest row that owners know of; if that row
    was not completed, owners are found anew. docs/decisions.md ("Replay") has the reasons.
    """

    def __init__(
        self,
        stack: Stack,
        pointers: Mapping[int, torch.Tensor],
        tensors: tuple[torch.Tensor, torch.Tensor],
        ring: RingIndex,
        table: int,
        take_room: TakeRoom,
    ) -> None:
        """Describe the frames of a stack.

        ``pointers`` has the places of the frames of all rows, by the number of an entry;
        ``tensors`` are all frames, and their owners; for the other arguments see `Places`.
        """
        frames, owners = tensors
        self._stack = stack
        self._ring = ring
        self._pointers: dict[int, Words] = {n: part.numpy() for n, part in pointers.items()}
        self._rows = min(map(len, self._pointers.values()))
        self.places = Places(table, ring, owners.numpy(), self._rows, tensors, take_room)
        self._newest = ring.table(table)[2:]
        self._words = words(frames)
        random = np.random.default_rng(0)
        self._factors = random.integers(1 << 62, size=self._words.shape[1]) | 1
        self._known: dict[int, int] = {}
        """Places of frames by their hash; some hold another frame by now."""

    def store(self, first: int, count: int, values: Sequence[torch.Tensor], offset: int) -> None:
        """Store the stacks of ``count`` rows from position ``first`` on.

        In ``values`` they begin at ``offset``. Inside `RingIndex.append`.
        """
        slots, size = self._ring.slots, self._stack.size
        envs = self._rows // slots
        known = int(self._newest[0])
        if known and self._ring.sequence[(known - 1) % slots] // STEP != known:
            self.rebuild()
        self._newest[0] = first + count
        stacks = {n: self._stack.split(values[n][offset : offset + count]) for n in self._pointers}
        at_once = max(1, _AT_ONCE // self._stack.fields[0].nbytes)
        for start in range(0, count * envs, at_once):
            stop = min(start + at_once, count * envs)
            rows = np.arange(first * envs + start, first * envs + stop)
            numbers = rows // envs + 1
            for n, pointers in self._pointers.items():
                frames = stacks[n][start:stop].reshape(-1, self._words.shape[1])
                places = self._keep(frames, int(numbers[0])).reshape(-1, size)
                np.maximum.at(self.places.owners, places, numbers[:, None])
                for frame in range(size):
                    # In one dimension, numpy stores whole words: others may read meanwhile.
                    pointers[:, frame][rows % self._rows] = places[:, frame]
        for old in [*islice(self._known, max(0, len(self._known) - _REMEMBERED))]:
            del self._known[old]

    def rebuild(self) -> None:
        """Find the owners of all frames, after rows were put back; inside `section`."""
        owners, sequence = self.places.owners, self._ring.sequence[: self._ring.slots]
        owners[: self.places.size] = 0
        for pointers in self._pointers.values():
            numbers = sequence.repeat(self._rows // len(sequence))
            rows = np.flatnonzero(numbers > 0)
            np.maximum.at(owners, pointers[rows], numbers[rows, None] // STEP)

    def _keep(self, frames: Any, owner: int) -> Words:
        """Return the places of frames ``[n, words]``, which ``owner`` owns if they are new."""
        hashes, first, which = np.unique(
            frames @ self._factors, return_index=True, return_inverse=True
        )
        names = hashes.tolist()
        found = np.array([self._known.get(name, -1) for name in names], np.int64)
        new = (found < 0) | ~self.places.taken(found)
        found[new] = self._write(frames[first[new]], owner)
        places = found[which]
        # What has this hash may be another frame.
        other = (self._words[places] != frames).any(-1)
        if other.any():
            places[other] = self._write(frames[other], owner)
            found[which] = places
        self._known.update(zip(names, found.tolist(), strict=True))
        return places

    def _write(self, frames: Any, owner: int) -> Words:
        places = self.places.claim(len(frames))
        self._words[places] = frames
        self.places.owners[places] = owner
        return places
