"""Stacks of frames, of which each frame is stored once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, NestedKey, as_key, format_key
from gleanrl.core.layout import Field
from gleanrl.memory.replay.places import Places, TakeRoom
from gleanrl.memory.replay.ring import STEP, TABLES, RingIndex, Words

_ENDS = 1024
"""Last successors of runs of rows that are remembered, as later rows may begin with them."""


@dataclass(frozen=True)
class Stack:
    """How an entry of a row is taken apart into frames, and put together again."""

    field: Field
    """The entry."""
    size: int
    """Frames in a stack."""
    last: bool
    """Whether the last dimension is that of the frames: ``[84, 84, 4]``."""

    @classmethod
    def of(cls, field: Field, size: int) -> Stack:
        """Find the dimension of the frames.

        Raises:
            ConfigError: the entry is no stack of so many frames.
        """
        shape = field.shape
        if isinstance(size, int) and size > 1 and field.nbytes:
            last = shape[0] != size and shape[-1] == size
            if last or shape[0] % size == 0:
                return cls(field, size, last)
        raise ConfigError(
            f"stacks names {format_key(field.key)} as a stack of {size!r} frames, and it is "
            f"{list(shape)} per row: the first dimension (or the last) must be that of the frames, "
            "or the first a multiple of it, and there must be two frames or more"
        )

    @property
    def pointers(self) -> Field:
        """What a row has in place of the stack: the places of its frames."""
        return Field(self.field.key, (self.size,), torch.int64)

    @property
    def frame(self) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of a stored frame."""
        return (math.prod(self.field.shape) // self.size,), self.field.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one place of a frame: the frame, and the number of its owner."""
        return self.field.nbytes // self.size + torch.int64.itemsize

    def split(self, values: torch.Tensor) -> Any:
        """Return the frames of stacks ``[..., *shape]`` as words, ``[..., size, words]``."""
        lead = values.ndim - len(self.field.shape)
        values = values.detach().cpu()
        if self.last:
            values = values.movedim(-1, lead)
        return words(values.reshape(*values.shape[:lead], self.size, *self.frame[0]))

    def join(self, frames: torch.Tensor, pointers: torch.Tensor) -> torch.Tensor:
        """Return stacks ``[..., *shape]`` of the frames at ``pointers``, ``[..., size]``."""
        lead, shape = pointers.shape[:-1], self.field.shape
        values = frames.index_select(0, pointers.reshape(-1))
        if not self.last:
            return values.view(*lead, *shape)
        # A view: interleaving the elements of frames takes longer than gathering them.
        return values.view(*lead, self.size, *shape[:-1]).movedim(len(lead), -1)


def words(frames: torch.Tensor) -> Any:
    """Return the bits of ``frames`` as a numpy array of words, which compare fast."""
    flat = frames.contiguous().view(torch.uint8)
    if flat.shape[-1] % 8 == 0:
        flat = (flat.clone() if flat.storage_offset() % 8 else flat).view(torch.int64)
    return flat.numpy()


def chosen_stacks(
    fields: Mapping[Key, Field], dedup: tuple[Key, ...], stacks: Mapping[NestedKey, int]
) -> tuple[Stack, ...]:
    """Return how the entries that ``stacks`` names are taken apart.

    Raises:
        ConfigError: an entry is not stored once, or is no stack.
    """
    for key in map(as_key, stacks):
        if key not in dedup:
            raise ConfigError(
                f"stacks names {format_key(key)}, which is none of the entries that are stored "
                f"once: {[format_key(key) for key in dedup]}"
            )
    if len(stacks) >= TABLES:
        raise ConfigError(f"stacks names {len(stacks)} entries, at most {TABLES - 1} are possible")
    return tuple(Stack.of(fields[as_key(key)], size) for key, size in stacks.items())


class FrameStore:
    """Stores the frames of one entry of rows, and points to them from rows and overflow places.

    A stack that continues the one of the row before it, without its first frame and with a new one
    at the end, shares all other frames with it. So does the successor of a row. The stack of a row
    that continues none (after a reset, another environment's) is compared with the successors with
    which earlier runs of rows ended, and shares all frames if it has the very bits of one. All
    other frames are stored anew, except those that are equal to the frame before them in their
    stack. Bits are compared, so no sample differs from the data that was stored.

    A frame's owner is the newest row that points to it, directly or from its overflow place. Its
    place is free when that row was overwritten: no older row is left then. Rows of an earlier
    `extend` may have shared frames with rows that a killed process never completed, whose places
    would be free too early. So a word tells the newest row that owners know of; if it was not
    completed, owners are found anew.
    """

    def __init__(
        self,
        table: int,
        stack: Stack,
        tensors: tuple[torch.Tensor, ...],
        ring: RingIndex,
        links: Words,
        take_room: TakeRoom,
    ) -> None:
        """Describe the frames of ``stack``, whose places are table ``table`` of ``ring``.

        Args:
            table: The number of the table.
            stack: The entry.
            tensors: Pointers of all rows and overflow places; frames; owners of frames.
            ring: The rows.
            links: The place of the successor of every row.
            take_room: Reserves the memory of frames.
        """
        pointers, frames, owners = tensors
        self.stack = stack
        self.places = Places(
            table, ring, owners.numpy(), len(links), 64, (frames, owners), take_room
        )
        self._ring = ring
        self._newest = ring.table(table)[2:]
        self._links = links
        self._pointers: Words = pointers.numpy()
        self._words = words(frames)
        self._ends: dict[int, tuple[int, int]] = {}
        """By the hash of a stack: position number of a row, and the overflow place it is in."""

    def store(
        self,
        first: int,
        roots: torch.Tensor,
        unlinked: Words,
        successors: torch.Tensor,
        overflow: Words,
    ) -> None:
        """Store the stacks of rows from position ``first`` on; inside `RingIndex.append`.

        Args:
            first: The position of the first row.
            roots: The stacks, ``[rows, (envs,) *shape]``.
            unlinked: Which frames have successors in overflow places.
            successors: The stacks of these successors.
            overflow: Their places.
        """
        ring, size = self._ring, self.stack.size
        stacks, after = self.stack.split(roots), self.stack.split(successors)
        count, width = len(stacks), stacks.shape[-1]
        stacks = stacks.reshape(count, -1, size, width)
        envs = stacks.shape[1]
        begins = np.ones((count, envs), bool)
        begins[1:] = (stacks[1:, :, :-1] != stacks[:-1, :, 1:]).any((2, 3))
        stacks = stacks.reshape(-1, size, width)
        leaves = (after[:, :-1] != stacks[unlinked, 1:]).any((1, 2))
        self._check_owners(first + count)
        numbers = np.arange(first + 1, first + 1 + count).repeat(envs)
        rows = ((numbers - 1) % ring.slots) * envs + np.tile(np.arange(envs), count)
        own = self._keep(stacks, begins.reshape(-1)).reshape(count, envs, size)
        pointers = _windows(own, begins).reshape(-1, size)
        self._point(rows, pointers, numbers)
        beyond = self._keep(after, leaves)
        beyond[~leaves, :-1] = pointers[unlinked[~leaves], 1:]
        self._point(overflow, beyond, numbers[unlinked])
        for n in range(max(0, len(after) - _ENDS), len(after)):
            end = hash(after[n].tobytes())
            self._ends.pop(end, None)
            self._ends[end] = int(numbers[unlinked[n]]), int(overflow[n])
        for end in [*self._ends][:-_ENDS]:
            del self._ends[end]

    def rebuild(self) -> None:
        """Find the owners of all frames, after rows were put back; inside `section`."""
        owners, slots = self.places.owners, self._ring.slots
        owners[: self.places.size] = 0
        numbers = self._ring.sequence[:slots].repeat(len(self._links) // slots)
        rows = np.flatnonzero(numbers > 0)
        for places in (rows, self._links[rows]):
            np.maximum.at(owners, self._pointers[places], numbers[rows, None] // STEP)

    def _check_owners(self, newest: int) -> None:
        """Find owners anew if the rows that they know of were not completed."""
        known = int(self._newest[0])
        if known and not self._is_complete(known):
            self.rebuild()
        self._newest[0] = newest

    def _is_complete(self, number: int) -> bool:
        return bool(self._ring.sequence[(number - 1) % self._ring.slots] // STEP == number)

    def _keep(self, stacks: Any, begins: Any) -> Words:
        """Store the frames that are not stored yet, and return the places of the frames.

        Args:
            stacks: ``[n, size, words]``.
            begins: Which stacks do not continue another one. Of those that do, only the last frame
                is looked at.
        """
        first, where = stacks[begins], np.flatnonzero(begins)
        known = [self._find_end(stack) for stack in first]
        new = np.zeros(stacks.shape[:2], bool)
        new[:, -1] = True
        new[where, 0] = True
        new[where, 1:] = (first[:, 1:] != first[:, :-1]).any(-1)
        new[where] &= np.array([end is None for end in known], bool)[:, None]
        claimed = self.places.claim(int(np.count_nonzero(new)))
        self._words[claimed] = stacks[new]
        self.places.owners[claimed] = 0  # those of rows long gone
        places = np.zeros(new.shape, np.int64)
        places[new] = claimed
        before = np.maximum.accumulate(np.where(new, np.arange(new.shape[1]), 0), axis=1)
        places = np.take_along_axis(places, before, 1)
        for n, end in zip(where, known, strict=True):
            if end is not None:
                places[n] = end
        return places

    def _find_end(self, stack: Any) -> Words | None:
        """Return the places of the frames of an earlier run's last successor, if it is this."""
        number, place = self._ends.get(hash(stack.tobytes()), (0, 0))
        if not number or not self._is_complete(number):
            return None
        pointers = self._pointers[place]
        return pointers if np.array_equal(self._words[pointers], stack) else None

    def _point(self, places: Words, pointers: Words, numbers: Words) -> None:
        """Have rows or overflow places point to frames, which the rows ``numbers`` own now."""
        for n in range(self.stack.size):
            # One dimension at a time, numpy stores whole words: others may read meanwhile.
            self._pointers[:, n][places] = pointers[:, n]
        np.maximum.at(self.places.owners, pointers, numbers[:, None])


def _windows(own: Words, begins: Any) -> Words:
    """Return the places of the frames of stacks that continue one another along dimension 0.

    Args:
        own: Of stacks that begin, the places of all frames, ``[rows, envs, size]``; of others,
            only the last is looked at.
        begins: Which stacks begin, ``[rows, envs]``.
    """
    count, envs, size = own.shape
    row = np.arange(count)[:, None]
    since = row - np.maximum.accumulate(np.where(begins, row, 0), axis=0)
    # Frame j of a stack is the last one of some row before, or one of the stack that begins.
    back = np.minimum(np.arange(size)[::-1], since[..., None])
    places: Words = own[row[..., None] - back, np.arange(envs)[:, None], np.arange(size) + back]
    return places
