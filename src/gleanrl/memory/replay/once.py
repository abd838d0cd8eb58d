"""Successors that are not stored twice: where rows find the observation that followed.

Every row has a *link*, the place of its successor's observation. Where the next row of the same
reservation begins with the very bits, that is the next row's place. All others (the last row of a
reservation, ends of episodes, rows of other trajectories side by side) keep theirs in *spare*
places behind those of the ring. What is told apart are bits, not ids or flags, so nothing that is
sampled can differ from what was given.

A row never outlives what it links to: places are reserved in order, so the next row of a
reservation is never taken before the row itself, and a spare place is free only when the stamp of
the row that has it is gone. There are as many spare places as rows, so there is always one; memory
is touched only as far as they were ever needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import NestedKey, as_key, format_key, next_key
from gleanrl.memory.replay.ledger import STEP, Ledger, Words
from gleanrl.memory.replay.reservation import Reservation
from gleanrl.memory.replay.rows import RowLayout, Rows

_LINK_BYTES = 8
_CHUNK = 1024


def choose(layout: RowLayout, compact: bool | Sequence[NestedKey]) -> RowLayout:
    """Return ``layout`` with the entries whose successors are not stored apart.

    Args:
        layout: The fields of a row.
        compact: ``False``, ``True`` for every entry that is larger than the link that replaces it,
            or root keys.

    Raises:
        ConfigError: there are no such entries, or without a successor of the same shape and dtype.
    """
    if compact is False:
        return _agreed(layout, ())
    fields = {field.key: field for field in layout.fields}
    twins = [
        key
        for key, field in fields.items()
        if (after := fields.get(next_key(key))) is not None
        and (after.shape, after.dtype) == (field.shape, field.dtype)
    ]
    if compact is True:
        once = [
            key
            for key in twins
            if fields[key].nbytes > _LINK_BYTES and fields[key].dtype != torch.bool
        ]
    else:
        once = [as_key(key) for key in compact]
        for key in once:
            if key not in twins:
                raise ConfigError(
                    f"compact names {format_key(key)}, but the data have no "
                    f"{format_key(next_key(key))} of the same shape and dtype; they have "
                    f"{[format_key(k) for k in fields]}"
                )
    if not once:
        raise ConfigError(
            "a compact storage needs observations together with their successors under 'next', of "
            f"more than {_LINK_BYTES} bytes; the data have {[format_key(k) for k in fields]}. "
            "Collect with compact_obs=False (the storage keeps each observation once by itself), "
            "or store with compact=False"
        )
    return _agreed(layout, tuple(once))


def _agreed(layout: RowLayout, once: tuple[Any, ...]) -> RowLayout:
    if layout.once and layout.once != once:
        raise ConfigError(
            f"rows that keep {[format_key(k) for k in layout.once]} once do not fit into a storage "
            f"with {[format_key(k) for k in once] or 'compact=False'}"
        )
    return replace(layout, once=once)


class Successors:
    """Links the rows of one storage, and gives out its spare places."""

    def __init__(self, rows: Rows, ledger: Ledger, take_room: Callable[[range], None]) -> None:
        """Link ``rows``, whose stamps are in ``ledger``.

        Args:
            rows: The rows.
            ledger: Their stamps.
            take_room: Is called before spare places are written for the first time.
        """
        self._rows = rows
        self._take_room = take_room
        self._ledger = ledger
        self._envs = rows.layout.envs or 1
        self._lead = 1 if rows.layout.envs is None else 2
        self._owners: Words = rows.owners.numpy()
        self._links: Words = rows.tensors[-1].view(rows.frames).numpy()
        keys = [field.key for field in rows.layout.fields]
        self._pairs = [
            (keys.index(key), keys.index(next_key(key)), rows.places(key))
            for key in rows.layout.once
        ]

    def link(
        self, reservation: Reservation, values: Sequence[torch.Tensor], offset: int, count: int
    ) -> None:
        """Store the successors of ``count`` reserved rows, from ``offset`` on in ``values``."""
        rows, envs = self._rows, self._envs
        slot = (reservation.first + 1 + np.arange(count, dtype=np.int64)) % rows.slots
        links = (slot[:, None] * envs + np.arange(envs)).reshape(-1)
        apart = np.flatnonzero(self._apart(values, offset, count))
        row = apart // envs
        spare = rows.frames + self._claim(reservation.first + 1 + row)
        links[apart] = spare
        for start, stop, ahead in self._ledger.pieces(reservation.first, count):
            part = links[ahead * envs : (ahead + stop - start) * envs]
            # A ufunc stores whole words: others may read a link while it changes.
            np.add(part, 0, out=self._links[start * envs : stop * envs])
        where = torch.from_numpy(spare)
        chosen: tuple[torch.Tensor, ...] = (torch.from_numpy(row + offset),)
        if self._lead == 2:
            chosen = (*chosen, torch.from_numpy(apart % envs))
        for _, after, places in self._pairs:
            found = values[after].detach()
            mine = found[chosen].to(places.device).reshape(len(spare), *places.shape[1:])
            places.index_copy_(0, where, mine)

    def grow(self, size: int) -> None:
        """Have at least ``size`` spare places, taken or not; inside `section`.

        Raises:
            OSError: the disk is full.
        """
        first = self._ledger.spare
        if size > first:
            self._take_room(range(first, size))
            self._owners[first:size] = 0
            self._ledger.spare = size

    def rebuild(self) -> None:
        """Note who has which spare place, after rows were put back; inside `section`."""
        frames = self._rows.frames
        stamps = self._ledger.stamps[: self._rows.slots].repeat(self._envs)
        having = np.flatnonzero((stamps > 0) & (self._links >= frames))
        self._owners[: self._ledger.spare] = 0
        self._owners[self._links[having] - frames] = stamps[having] // STEP

    def _apart(self, values: Sequence[torch.Tensor], offset: int, count: int) -> Any:
        """Tell which frames are not followed by the next row's, ``[count * envs]``."""
        apart = np.ones((count, self._envs), bool)
        apart[:-1] = False
        stop = offset + count
        for root, after, _ in self._pairs:
            other = _differ(
                values[after][offset : stop - 1], values[root][offset + 1 : stop], self._lead
            )
            apart[:-1] |= other.reshape(count - 1, self._envs)
        return apart.reshape(-1)

    def _claim(self, numbers: Words) -> Words:
        """Return a spare place for each row with these position numbers."""
        ledger, need = self._ledger, len(numbers)
        with ledger.section():
            found = self._free(need)
            if len(found) < need:
                first, missing = ledger.spare, need - len(found)
                size = min(self._rows.frames, first + max(missing, first // 4))
                self.grow(size)
                found = np.concatenate([found, np.arange(first, first + missing)])
            self._owners[found] = numbers
            if need:
                ledger.spare_next = int(found[-1]) + 1
        return found

    def _free(self, need: int) -> Words:
        """Look for free places from where the last ones were given out, oldest first."""
        size, first = self._ledger.spare, self._ledger.spare_next
        parts, have = [np.empty(0, np.int64)], 0
        for begin, end in ((first, size), (0, min(first, size))):
            for start in range(begin, end, max(_CHUNK, need)):
                if have >= need:
                    break
                stop = min(end, start + max(_CHUNK, need))
                owners = self._owners[start:stop]
                stamps = self._ledger.stamps[(owners - 1) % self._rows.slots]
                taken = (owners > 0) & (np.abs(stamps) // STEP == owners)
                parts.append(np.flatnonzero(~taken) + start)
                have += len(parts[-1])
        return np.concatenate(parts)[:need]


def follow(
    own: torch.Tensor, spare: torch.Tensor, links: torch.Tensor, frames: int
) -> torch.Tensor:
    """Return what ``links`` lead to: places of ``own``, or of ``spare`` from ``frames`` on.

    Args:
        own: ``[n, ...]`` with ``n`` up to ``frames``.
        spare: ``[m, ...]``.
        links: int64, any shape, which the result's begins with.
        frames: Places of the ring.
    """
    near = links < frames
    out = own.new_empty((*links.shape, *own.shape[1:]))
    out[near] = own[links[near]]
    out[~near] = spare[links[~near] - frames]
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
