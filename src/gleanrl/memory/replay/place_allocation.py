"""Places that rows of a ring take, and that are free again when those rows were overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.memory.replay.row_visibility import STEP, RingIndex, Words

TakeRoom: TypeAlias = Callable[[Sequence[torch.Tensor]], None]
"""Reserves the memory of tensors before they are written."""
_CHUNK = 1024
"""Places that are checked together."""
_SHARE = 64
"""When no place is free, this fraction (a divisor) of all places is added."""


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
        """Describe a table.

        Args:
            table: The number of this table among those of ``ring``.
            ring: The rows.
            owners: For each place that there can ever be, the position of its owner plus 1, or 0.
            first: Places that are there from the beginning.
            tensors: The contents of places.
            take_room: Reserves the memory of contents.
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
