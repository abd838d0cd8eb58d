"""Deduplication of successors: where rows find the observation that followed.

Every row has a *link*, the place of its successor's observation. Where the next row of the same
reservation begins with the very bits, that is the next row's place. The successors of all other
rows (the last row of a reservation, ends of episodes, rows of other trajectories side by side) are
*unlinked*: they are kept in *overflow* places behind those of the ring. Bits are compared, not ids
or flags, so no sample differs from the data that was stored.

A row never outlives what it links to: places are reserved in order, so the next row of a
reservation is never taken before the row itself, and an overflow place is free only when the
row that has it was overwritten. There are as many overflow places as rows, so there
is always one; memory is touched only as far as they were ever needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import END_FLAGS, Key, NestedKey, as_key, format_key, next_key
from gleanrl.memory.replay.ring import STEP, Reservation, RingIndex, Words
from gleanrl.memory.replay.rows import RowLayout, Rows

_LINK_BYTES = 8
_CHUNK = 1024


def deduplicate(layout: RowLayout, compact: bool | Sequence[NestedKey]) -> RowLayout:
    """Return ``layout`` with the entries whose successors are linked.

    Args:
        layout: The fields of a row.
        compact: ``False``, ``True`` for every entry that is larger than the link that replaces it,
            or root keys.

    Raises:
        ConfigError: there are no such entries, or without a successor of the same shape and dtype.
    """
    dedup = () if compact is False else _chosen(layout, compact)
    if layout.dedup and layout.dedup != dedup:
        raise ConfigError(
            f"rows that keep {_shown(layout.dedup)} once do not fit into a storage with "
            f"{_shown(dedup) or 'compact=False'}"
        )
    return replace(layout, dedup=dedup)


def _chosen(layout: RowLayout, compact: bool | Sequence[NestedKey]) -> tuple[Key, ...]:
    fields = {field.key: field for field in layout.fields}
    twins = [
        key
        for key, field in fields.items()
        if (after := fields.get(next_key(key))) is not None
        and (after.shape, after.dtype) == (field.shape, field.dtype)
    ]
    if isinstance(compact, bool):
        large = [key for key in twins if fields[key].nbytes > _LINK_BYTES]
        chosen = tuple(key for key in large if key[-1] not in END_FLAGS)
    else:
        chosen = tuple(as_key(key) for key in compact)
        for key in chosen:
            if key not in twins:
                raise ConfigError(
                    f"compact names {format_key(key)}, but the data have no "
                    f"{format_key(next_key(key))} of the same shape and dtype; they have "
                    f"{_shown(fields)}"
                )
    if not chosen:
        raise ConfigError(
            "a compact storage needs observations together with their successors under 'next', of "
            f"more than {_LINK_BYTES} bytes; the data have {_shown(fields)}. Collect "
            "with compact_obs=False (the storage keeps each observation once by itself), or store "
            "with compact=False"
        )
    return chosen


def _shown(keys: Any) -> list[str]:
    return [format_key(key) for key in keys]


class SuccessorLinks:
    """Links the rows of one storage, and gives out its overflow places."""

    def __init__(self, rows: Rows, ring: RingIndex, take_room: Callable[[range], None]) -> None:
        """Link ``rows`` of ``ring``; overflow places get ``take_room`` before their first use."""
        self._rows = rows
        self._take_room = take_room
        self._ring = ring
        self._envs = rows.layout.envs or 1
        self._lead = 1 if rows.layout.envs is None else 2
        self._owners: Words = rows.owners.numpy()
        self._links: Words = rows.tensors[-1].view(rows.frames).numpy()
        self._pairs = [
            (rows.keys.index(key), rows.keys.index(next_key(key)), rows.places[key])
            for key in rows.layout.dedup
        ]

    def link(
        self, reservation: Reservation, values: Sequence[torch.Tensor], offset: int, count: int
    ) -> None:
        """Store the successors of ``count`` reserved rows, from ``offset`` on in ``values``."""
        rows, envs = self._rows, self._envs
        slot = (reservation.first + 1 + np.arange(count, dtype=np.int64)) % rows.slots
        links = (slot[:, None] * envs + np.arange(envs)).reshape(-1)
        unlinked = np.flatnonzero(self._unlinked(values, offset, count))
        row = unlinked // envs
        overflow = rows.frames + self._claim(reservation.first + 1 + row)
        links[unlinked] = overflow
        for start, stop, ahead in self._ring.pieces(reservation.first, count):
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
            places.index_copy_(0, where, successors.to(places.device).reshape(shape))

    def grow(self, size: int) -> None:
        """Have at least ``size`` overflow places, taken or not; inside `section`."""
        first = self._ring.overflow
        if size > first:
            self._take_room(range(first, size))
            self._owners[first:size] = 0
            self._ring.overflow = size

    def rebuild(self) -> None:
        """Note which row has which overflow place, after rows were put back; inside `section`."""
        frames = self._rows.frames
        numbers = self._ring.sequence[: self._rows.slots].repeat(self._envs)
        having = np.flatnonzero((numbers > 0) & (self._links >= frames))
        self._owners[: self._ring.overflow] = 0
        self._owners[self._links[having] - frames] = numbers[having] // STEP

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

    def _claim(self, numbers: Words) -> Words:
        """Return an overflow place for each row with these position numbers."""
        ring, need = self._ring, len(numbers)
        with ring.section():
            places = self._free(need)
            if len(places) < need:
                first, missing = ring.overflow, need - len(places)
                self.grow(min(self._rows.frames, first + max(missing, first // 4)))
                places = np.concatenate([places, np.arange(first, first + missing)])
            self._owners[places] = numbers
            if need:
                ring.overflow_next = int(places[-1]) + 1
        return places

    def _free(self, need: int) -> Words:
        """Look for free places from where the last ones were given out, oldest first."""
        size, first = self._ring.overflow, self._ring.overflow_next
        parts, have = [np.empty(0, np.int64)], 0
        for begin, end in ((first, size), (0, min(first, size))):
            for start in range(begin, end, max(_CHUNK, need)):
                if have >= need:
                    break
                stop = min(end, start + max(_CHUNK, need))
                owners = self._owners[start:stop]
                numbers = self._ring.sequence[(owners - 1) % self._rows.slots]
                taken = (owners > 0) & (np.abs(numbers) // STEP == owners)
                parts.append(np.flatnonzero(~taken) + start)
                have += len(parts[-1])
        return np.concatenate(parts)[:need]


def follow(
    frames: torch.Tensor, overflow: torch.Tensor, links: torch.Tensor, size: int
) -> torch.Tensor:
    """Return what ``links`` lead to.

    Args:
        frames: Places of the ring, ``[n, ...]`` with ``n`` up to ``size``.
        overflow: Places behind them, ``[m, ...]``.
        links: int64, any shape, which the result's begins with.
        size: Places of the ring.
    """
    near = links < size
    out = frames.new_empty((*links.shape, *frames.shape[1:]))
    out[near] = frames[links[near]]
    out[~near] = overflow[links[~near] - size]
    return out


def _differ(one: torch.Tensor, other: torch.Tensor, lead: int) -> Any:
    """Tell which frames differ in any bit."""
    shape = one.shape[:lead]
    if not one.numel():
        return np.zeros(shape, bool)
    flat = [value.detach().reshape(*shape, -1).contiguous() for value in (one, other)]
    flat = [value.view(torch.uint8) for value in flat]
    if flat[0].shape[-1] % 8 == 0 and not any(value.storage_offset() % 8 for value in flat):
        flat = [value.view(torch.int64) for value in flat]
    if one.device.type == other.device.type == "cpu":
        # A quarter of torch's time.
        return (flat[0].numpy() != flat[1].numpy()).any(-1)
    return (flat[0] != flat[1].to(one.device)).any(-1).cpu().numpy()
