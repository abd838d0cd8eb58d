"""Samples of consecutive steps, never across the end of a trajectory, a gap or the cursor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.keys import TRAJ_IDS, Key, NestedKey, as_key, format_key
from gleanrl.memory.replay.ring import STEP, RingIndex
from gleanrl.memory.replay.samplers import Draw, Sampler, saved_tensor
from gleanrl.memory.replay.storages import Storage
from gleanrl.memory.shared import fence

_DONE: Key = ("next", "done")
Bools: TypeAlias = "np.ndarray[Any, np.dtype[np.bool_]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Same: TypeAlias = Callable[[Storage, Places, Places], Bools]
"""Tells whether rows continue the trajectory of the rows before them, ``[n, envs]``."""
_PIECEMEAL = 64
"""From so many changed stretches on, looking at all rows is cheaper."""


class SliceSampler(Sampler):
    """Slices of trajectories, one after the other in a flat batch.

    A trajectory is drawn uniformly among those long enough, then where the slice starts in it.
    What is stored of a trajectory in several pieces (because other rows stand between) counts as
    several. A ``slice_len`` beyond the longest trajectory with ``strict_length=False`` gives whole
    trajectories.

    Args:
        num_slices: Slices per batch; the batch size is divided by it.
        slice_len: Steps per slice; give this or ``num_slices``.
        traj_key: Entry that tells trajectories apart; ``("collector", "traj_ids")`` if it is
            stored and no ``end_key`` is given.
        end_key: Entry that is true at the last step of a trajectory; ``("next", "done")`` by
            default where there are no trajectory ids.
        strict_length: Draw from trajectories with at least ``slice_len`` steps only; otherwise
            shorter ones are taken whole, and batches are smaller.
        truncated_key: Where the ends of slices are marked in the batch (and ``"done"`` beside it);
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
        if (num_slices or slice_len or 0) < 1:
            raise ConfigError(f"num_slices and slice_len are positive, not {num_slices, slice_len}")
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.strict_length = strict_length
        self.truncated_key = None if truncated_key is None else as_key(truncated_key)
        self._traj_key = None if traj_key is None else as_key(traj_key)
        self._end_key = None if end_key is None else as_key(end_key)
        self._index = SegmentIndex(self._same)

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose slices of ``count`` frames together (fewer if some are short)."""
        slices, length = self._sizes(count)
        segments = self._index.segments(storage)
        eligible = self._eligible(segments, length)
        chosen = eligible[torch.randint(len(eligible), (slices,), generator=generator)]
        return _slices(storage, segments.select(chosen), length, generator)

    def _eligible(self, segments: TrajectorySegments, length: int) -> torch.Tensor:
        """Return which segments are long enough for slices of ``length``."""
        least = length if self.strict_length else 1
        eligible = (segments.length >= least).nonzero().squeeze(1)
        if not len(eligible):
            longest = int(segments.length.max()) if len(segments.length) else 0
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
        traj_key, end_key = self._traj_key, self._end_key
        if traj_key is None and end_key is None:
            traj_key = TRAJ_IDS if storage.field(TRAJ_IDS) is not None else None
            end_key = _DONE if traj_key is None else None
        if traj_key is not None:
            ids = _column(storage, traj_key)
            same &= ids[rows] == ids[before]
        if end_key is not None:
            same &= ~_column(storage, end_key)[before].astype(bool)
        return same


class SliceSamplerWithoutReplacement(SliceSampler):
    """Slices of which every trajectory gives one per epoch.

    An epoch is over the trajectories that there were when it began. Of those of which rows were
    overwritten meanwhile, slices are taken from the rest. Arguments as in `SliceSampler`, and:

    Args:
        shuffle: Trajectories in random order; in that of their places otherwise.
        drop_last: Leave out the last batch of an epoch if it has fewer slices.
    """

    def __init__(self, *, shuffle: bool = True, drop_last: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.restart()

    def restart(self) -> None:
        """Begin a new epoch with the next draw."""
        self._epoch: TrajectorySegments | None = None
        self._next = 0

    def position(self) -> Any:
        """Return the segments of the epoch and how far it is."""
        return self._epoch, self._next

    def seek(self, position: Any) -> None:
        """Deliver again what was drawn since ``position``."""
        self._epoch, self._next = position

    def state_dict(self, storage: Storage) -> dict[str, Any]:
        """Return what is left of the epoch: first places and lengths of its segments."""
        if self._epoch is None:
            return {}
        rest = self._epoch.select(torch.arange(self._next, len(self._epoch.length)))
        rest = rest.remaining(storage.ring.sequence_tensor)
        return {"first": rest.slot * storage.envs + rest.env, "length": rest.length}

    def check_state_dict(self, state: dict[str, Any], frames: int) -> None:
        """Refuse segments that lie outside the ring."""
        first, length = (saved_tensor(state, name, torch.int64) for name in ("first", "length"))
        inside = ((first >= 0) & (first < frames) & (length >= 0) & (length <= frames)).all()
        if len(first) != len(length) or not inside or int(length.sum()) > frames:
            raise ConfigError(f"slices of other rows than those of {frames} frames: {first}")

    def load_state_dict(self, state: dict[str, Any], storage: Storage) -> None:
        """Continue the epoch."""
        first, numbers = state["first"], storage.ring.sequence_tensor[: storage.ring.slots].clone()
        slot = first.div(storage.envs, rounding_mode="floor")
        epoch = TrajectorySegments(slot, first % storage.envs, state["length"], numbers)
        # Rows that are not complete are none of the epoch's.
        self._epoch, self._next = epoch.remaining(numbers.where(numbers > 0, -1)), 0

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose slices of the next trajectories of the epoch."""
        slices, length = self._sizes(count)
        first, epoch = self._next == 0, self._epoch
        segments = None if epoch is None else self._take(storage, epoch, slices, length)
        if epoch is None or segments is None:
            first, epoch = True, self._begin(storage, length, generator)
            segments = self._take(storage, epoch, slices, length)
            if segments is None:
                raise ReplayError(
                    f"an epoch over {len(epoch.length)} trajectories has no whole batch of "
                    f"{slices} slices; lower the batch size, or drop_last=False"
                )
        left = len(epoch.length) - self._next
        draw = _slices(storage, segments, length, generator)
        draw.first, draw.last = first, left == 0 or (self.drop_last and left < slices)
        if draw.last:
            self.restart()
        return draw

    def _begin(
        self, storage: Storage, length: int, generator: torch.Generator | None
    ) -> TrajectorySegments:
        segments = self._index.segments(storage)
        eligible = self._eligible(segments, length)
        if self.shuffle:
            eligible = eligible[torch.randperm(len(eligible), generator=generator)]
        self._next, self._epoch = (
            0,
            replace(segments.select(eligible), numbers=segments.numbers.clone()),
        )
        return self._epoch

    def _take(
        self, storage: Storage, epoch: TrajectorySegments, slices: int, length: int
    ) -> TrajectorySegments | None:
        """Take the next segments; ``None`` if none are left, or too few for a batch."""
        parts, have = [], 0
        while have < slices and self._next < len(epoch.length):
            some = torch.arange(len(epoch.length))[self._next :][: slices - have]
            left = epoch.select(some).remaining(storage.ring.sequence_tensor)
            parts.append(left.select(left.length >= (length if self.strict_length else 1)))
            self._next += len(some)
            have += len(parts[-1].length)
        if not have or (self.drop_last and have < slices):
            return None
        return TrajectorySegments(
            torch.cat([part.slot for part in parts]),
            torch.cat([part.env for part in parts]),
            torch.cat([part.length for part in parts]),
            epoch.numbers,
        )


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
    storage: Storage, segments: TrajectorySegments, length: int, generator: torch.Generator | None
) -> Draw:
    """Draw where a slice of each segment begins."""
    room = (segments.length - length).clamp_min_(0) + 1
    share = torch.rand(len(room), dtype=torch.float64, generator=generator)
    start = segments.slot + torch.minimum((share * room).long(), room - 1)
    segment, step, ends = _steps_of(segments.length.clamp_max(length))
    slots = (start[segment] + step) % len(segments.numbers)
    marks = torch.zeros(len(slots), dtype=torch.bool)
    marks[ends - 1] = True
    return Draw(slots * storage.envs + segments.env[segment], segments.numbers[slots], ends=marks)


@dataclass(frozen=True, slots=True)
class TrajectorySegments:
    """Stretches of consecutive steps, each of one environment."""

    slot: torch.Tensor
    env: torch.Tensor
    length: torch.Tensor
    numbers: torch.Tensor
    """Sequence numbers of all slots when these were found."""

    def select(self, which: torch.Tensor) -> TrajectorySegments:
        """Return some of the segments."""
        return replace(self, slot=self.slot[which], env=self.env[which], length=self.length[which])

    def remaining(self, numbers: torch.Tensor) -> TrajectorySegments:
        """Return the part of each segment behind its last row that was overwritten."""
        segment, step, _ = _steps_of(self.length)
        slots = (self.slot[segment] + step) % len(self.numbers)
        gone = numbers[slots] != self.numbers[slots]
        lost = torch.zeros_like(self.length)
        lost.scatter_reduce_(0, segment[gone], step[gone] + 1, "amax")
        slot = (self.slot + lost) % max(len(self.numbers), 1)
        return replace(self, slot=slot, length=self.length - lost)


def _steps_of(length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return of every step of stretches of these lengths its stretch and number, and their ends."""
    ends = length.cumsum(0)
    segment = torch.arange(len(length)).repeat_interleave(length)
    step = torch.arange(len(segment)) - (ends - length)[segment]
    return segment, step, ends


class SegmentIndex:
    """Finds the segments of a storage; rows that did not change are not looked at again."""

    def __init__(self, same: Same) -> None:
        """Ask ``same`` where trajectories end."""
        self._same = same
        self._ring: RingIndex | None = None
        self._version = (0, -1)
        self._segments: TrajectorySegments | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ring": None}  # a copy looks at all rows anew

    def segments(self, storage: Storage) -> TrajectorySegments:
        """Return the segments of all complete rows."""
        ring = storage.ring
        # Taken first: what changes while we look is looked at again the next time.
        version = ring.version
        if self._segments is not None and self._ring is ring and version == self._version:
            return self._segments
        recent = ring.changes(self._version) if self._ring is ring else None
        if recent is None or len(recent) > _PIECEMEAL:
            self._numbers = np.zeros(ring.slots, np.int64)
            self._breaks = np.ones((storage.envs, ring.slots), bool)
            if ring.slots:
                self._update(storage, np.arange(ring.slots))
        else:
            for first, count in recent:
                # The row behind the last one may not follow it any more.
                self._update(storage, np.arange(first, first + count + 1) % ring.slots)
        # Without slots it is a ring whose memory is yet to come: nothing of it can be kept.
        self._ring, self._version = ring if ring.slots else None, version
        self._segments = self._find(ring.top, storage.envs)
        return self._segments

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

    def _find(self, top: int, envs: int) -> TrajectorySegments:
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
        return TrajectorySegments(
            torch.from_numpy(slots[keep]),
            torch.from_numpy(owners[keep]),
            torch.from_numpy(lengths[keep]),
            torch.from_numpy(self._numbers),
        )
