"""Samples of consecutive steps, never across the end of a trajectory, a gap or the cursor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.keys import TRAJ_IDS, Key, NestedKey, as_key, format_key
from gleanrl.core.options import check_int
from gleanrl.memory.replay.row_visibility import STEP, Version
from gleanrl.memory.replay.samplers import Draw, Sampler, SamplerWithoutReplacement
from gleanrl.memory.replay.storages import Storage
from gleanrl.memory.shared import fence

_DONE: Key = ("next", "done")
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Same: TypeAlias = Callable[[Storage, Places, Places], Bools]
"""Tells whether rows continue the trajectory of the rows before them, ``[n, envs]``."""


class SliceSampler(Sampler):
    """Draws slices of trajectories, one after the other in a flat batch.

    The sampler draws a trajectory uniformly among the long enough ones, then the start of the slice
    in it. A trajectory that is stored in several pieces counts as several. A piece ends before rows
    of other trajectories, and where another collector or another run stored the next row. With
    ``strict_length=False``, a ``slice_len`` beyond the longest trajectory gives whole trajectories.

    Args:
        num_slices: Slices per batch; the batch size is divided by it.
        slice_len: Steps per slice; give this or ``num_slices``.
        traj_key: Entry that identifies trajectories, in addition to ``("collector",
            "traj_ids")`` if that is stored.
        end_key: Entry that is true at the last step of a trajectory; by default
            ``("next", "done")``, if no entry identifies trajectories.
        strict_length: Draw from trajectories with at least ``slice_len`` steps only; otherwise
            shorter ones are taken whole, and batches are smaller.
        truncated_key: Where the ends of slices are marked in the batch (and ``"done"`` next to it);
            ``None`` marks nothing.
    """

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        traj_key: NestedKey | None = None,
        end_key: NestedKey | None = None,
        strict_length: bool = True,
        truncated_key: NestedKey | None = ("next", "truncated"),
    ) -> None:
        if (num_slices is None) == (slice_len is None):
            raise ConfigError(
                f"give num_slices ({num_slices}) or slice_len ({slice_len}), and not both"
            )
        self.num_slices = num_slices and check_int("num_slices", num_slices)
        self.slice_len = slice_len and check_int("slice_len", slice_len)
        if (self.num_slices or self.slice_len or 0) < 1:
            raise ConfigError(f"num_slices and slice_len are positive, not {num_slices, slice_len}")
        self.strict_length = strict_length
        self.truncated_key = None if truncated_key is None else as_key(truncated_key)
        self.traj_key = None if traj_key is None else as_key(traj_key)
        self._end_key = None if end_key is None else as_key(end_key)
        self._index = SegmentIndex(self._same)

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose slices of ``count`` frames together (fewer if some are short)."""
        slices, length = self._sizes(count)
        segments, numbers = self._index.segments(storage)
        eligible = self._eligible(segments, length)
        chosen = eligible[torch.randint(len(eligible), (slices,), generator=generator)]
        return _slices(storage, segments[:, chosen], numbers, length, generator)

    def _eligible(self, segments: torch.Tensor, length: int) -> torch.Tensor:
        """Return the segments that are long enough for slices of ``length``."""
        least = length if self.strict_length else 1
        eligible = (segments[1] >= least).nonzero().squeeze(1)
        if not len(eligible):
            longest = int(segments[1].max()) if segments.numel() else 0
            raise ReplayError(
                f"no trajectory has {length} steps in a row (the longest: {longest}); "
                "shorten slices, or strict_length=False"
            )
        return eligible

    def _sizes(self, count: int) -> tuple[int, int]:
        parts = self.num_slices or self.slice_len or 1
        if count % parts:
            name = "num_slices" if self.num_slices else "slice_len"
            raise ConfigError(f"a batch of {count} is not divisible by {name} ({parts})")
        return (parts, count // parts) if self.num_slices else (count // parts, parts)

    def _same(self, storage: Storage, rows: Places, before: Places) -> Bools:
        """Tell whether ``rows`` may continue the ones ``before`` them, ``[n, envs]``."""
        same = np.ones((len(rows), storage.envs), bool)
        keys = set() if self.traj_key is None else {self.traj_key}
        keys |= set() if storage.field(TRAJ_IDS) is None else {TRAJ_IDS}
        for key in keys:
            ids = _column(storage, key)
            same &= ids[rows] == ids[before]
        end_key = self._end_key if keys or self._end_key else _DONE
        if end_key is not None:
            same &= ~_column(storage, end_key)[before].astype(bool)
        return same


class SliceSamplerWithoutReplacement(SliceSampler, SamplerWithoutReplacement):
    """Draws one slice of every trajectory per epoch.

    An epoch has the trajectories that were stored at its beginning. If some of their rows are
    overwritten meanwhile, slices come from the remaining rows. Arguments as in `SliceSampler`, and:

    Args:
        shuffle: Trajectories in random order; in that of their places otherwise.
        drop_last: Leave out the last batch of an epoch if it has fewer slices.
    """

    STATE = ("segments",)
    _UNITS = "trajectories"
    _SHAPE = (2, 0)
    draw = SamplerWithoutReplacement.draw

    def __init__(self, *, shuffle: bool = True, drop_last: bool = False, **arguments: Any) -> None:
        SliceSampler.__init__(self, **arguments)
        SamplerWithoutReplacement.__init__(self, drop_last, shuffle)

    def _begin(self, storage: Storage, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        segments, numbers = self._index.segments(storage)
        return segments[:, self._eligible(segments, length)], numbers.clone()

    def _still_stored(self, storage: Storage, order: torch.Tensor, length: int) -> torch.Tensor:
        """Return the part of each segment after its last overwritten row."""
        frames, segment, step, _ = _frames_of(storage, order)
        gone = storage.sequence_of(frames) != self._numbers[storage.slots_of(frames)]
        lost = torch.zeros_like(order[1])
        lost.scatter_reduce_(0, segment[gone], step[gone] + 1, "amax")
        first = (order[0] + lost * storage.envs) % max(storage.ring.slots * storage.envs, 1)
        left = torch.stack([first, order[1] - lost])
        return left[:, left[1] >= (length if self.strict_length else 1)]

    def _draw_of(
        self, storage: Storage, chosen: torch.Tensor, length: int, generator: torch.Generator | None
    ) -> Draw:
        return _slices(storage, chosen, self._numbers, length, generator)


def _column(storage: Storage, key: Key) -> Any:
    found = storage.field(key)
    if found is None:
        raise ConfigError(f"no {format_key(key)} is stored: slices need traj_key, or end_key")
    column = found.cpu().reshape(storage.ring.slots, storage.envs, -1)
    if column.shape[2] != 1:
        raise ConfigError(
            f"{format_key(key)} has {column.shape[2]} elements per frame, slices need one"
        )
    return column[:, :, 0].numpy()


def _slices(
    storage: Storage,
    segments: torch.Tensor,
    numbers: torch.Tensor,
    length: int,
    generator: torch.Generator | None,
) -> Draw:
    """Draw the start of a slice in each segment."""
    first, have = segments
    room = (have - length).clamp_min_(0) + 1
    share = torch.rand(len(room), dtype=torch.float64, generator=generator)
    start = first + torch.minimum((share * room).long(), room - 1) * storage.envs
    frames, _, _, ends = _frames_of(storage, (start, have.clamp_max(length)))
    marks = torch.zeros(len(frames), dtype=torch.bool)
    marks[ends - 1] = True
    return Draw(frames, numbers[storage.slots_of(frames)], ends=marks)


def _frames_of(storage: Storage, segments: Any) -> tuple[torch.Tensor, ...]:
    """Return the flat place, segment and step of every frame of segments, and their ends."""
    first, length = segments
    ends = length.cumsum(0)
    segment = torch.arange(len(length)).repeat_interleave(length)
    step = torch.arange(len(segment)) - (ends - length)[segment]
    places = (first[segment] + step * storage.envs) % max(storage.ring.slots * storage.envs, 1)
    return places, segment, step, ends


class SegmentIndex:
    """Finds the segments of a storage, without checking unchanged rows again."""

    def __init__(self, same: Same) -> None:
        """Find ends of trajectories by ``same``."""
        self._same = same
        self._version: Version | None = None
        self._numbers: Places = np.empty(0, np.int64)
        self._tensor = self._segments = torch.empty(0)

    def segments(self, storage: Storage) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the segments of all complete rows, and the sequence numbers of all slots.

        A segment is a stretch of consecutive steps of one environment: the flat place of its first
        frame and its length, ``[2, segments]``.
        """
        ring = storage.ring
        if ring.is_at(self._version):
            return self._segments, self._tensor
        # Taken first: later changes are looked at again the next time.
        version, recent = ring.changes(self._version)
        if recent is None:
            recent = np.arange(ring.slots)
            self._numbers = np.zeros(ring.slots, np.int64)
            self._tensor = torch.from_numpy(self._numbers)
            self._breaks = np.ones((storage.envs, ring.slots), bool)
        if len(recent):
            self._update(storage, recent)
        self._segments = self._find(ring.top, storage.envs)
        # Without slots it is a ring whose memory is yet to come: nothing of it can be kept.
        self._version = version if ring.slots else None
        return self._segments, self._tensor

    def _update(self, storage: Storage, rows: Places) -> None:
        numbers = storage.ring.sequence
        before = rows - 1
        before[before < 0] += len(self._numbers)
        new, old = numbers[rows], numbers[before]
        fence()  # rows are looked at between two looks at their numbers
        same = self._same(storage, rows, before)
        fence()
        new[new != numbers[rows]] = 0
        self._numbers[rows] = new
        same &= ((new > 0) & (new - old == STEP) & (old == numbers[before]))[:, None]
        self._breaks[:, rows] = ~same.T

    def _find(self, top: int, envs: int) -> torch.Tensor:
        breaks = self._breaks[:, :top]
        around = ~self._breaks[:, :1]
        # Environment by environment: segments never go from one to the next.
        self._breaks[:, :1] = True
        starts = np.flatnonzero(breaks)
        self._breaks[:, :1] = ~around
        lengths = np.diff(starts, append=envs * top)
        slots, owners = starts % max(top, 1), starts // max(top, 1)
        keep = self._numbers[slots] > 0
        for env in np.flatnonzero(around).tolist():
            # The ring's first row continues its last: one segment, which starts at the end.
            first, last = np.searchsorted(starts, [env * top, (env + 1) * top - 1], "right") - 1
            lengths[last] += lengths[first]
            keep[first] = False
        return torch.from_numpy(np.stack([slots * envs + owners, lengths])[:, keep])
