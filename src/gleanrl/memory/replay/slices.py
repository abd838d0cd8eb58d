"""Samples of consecutive steps, never across the end of a trajectory, a gap or the cursor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.keys import TRAJ_IDS, Key, NestedKey, as_key, format_key
from gleanrl.memory.replay.runs import Bools, Places, RunFinder, Runs, steps_of
from gleanrl.memory.replay.samplers import Draw, Sampler
from gleanrl.memory.replay.storages import Storage

_DONE: Key = ("next", "done")


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
        step_key: Entry that counts steps: where it does not grow by one is a gap.
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
        step_key: NestedKey | None = None,
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
        self._step_key = None if step_key is None else as_key(step_key)
        self._finder = RunFinder(self._same)

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose slices of ``count`` frames together (fewer if some are short)."""
        slices, length = self._sizes(count)
        runs = self._finder.runs(storage)
        eligible = self._eligible(runs, length)
        chosen = eligible[torch.randint(len(eligible), (slices,), generator=generator)]
        return _slices(storage, runs.select(chosen), length, generator)

    def _eligible(self, runs: Runs, length: int) -> torch.Tensor:
        """Return which runs are long enough for slices of ``length``."""
        least = length if self.strict_length else 1
        eligible = (runs.length >= least).nonzero().squeeze(1)
        if not len(eligible):
            longest = int(runs.length.max()) if len(runs.length) else 0
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
        if self._step_key is not None:
            steps = _column(storage, self._step_key)
            same &= steps[rows] == steps[before] + 1
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
        self._epoch: Runs | None = None
        self._next = 0

    def position(self) -> Any:
        """Return the runs of the epoch and how far it is."""
        return self._epoch, self._next

    def seek(self, position: Any) -> None:
        """Deliver again what was drawn since ``position``."""
        self._epoch, self._next = position

    def draw(self, storage: Storage, count: int, generator: torch.Generator | None) -> Draw:
        """Choose slices of the next trajectories of the epoch."""
        slices, length = self._sizes(count)
        first, epoch = self._next == 0, self._epoch
        runs = None if epoch is None else self._take(storage, epoch, slices, length)
        if epoch is None or runs is None:
            first, epoch = True, self._begin(storage, length, generator)
            runs = self._take(storage, epoch, slices, length)
            if runs is None:
                raise ReplayError(
                    f"an epoch over {len(epoch.length)} trajectories has no whole batch of "
                    f"{slices} slices; lower the batch size, or drop_last=False"
                )
        left = len(epoch.length) - self._next
        draw = _slices(storage, runs, length, generator)
        draw.first, draw.last = first, left == 0 or (self.drop_last and left < slices)
        if draw.last:
            self.restart()
        return draw

    def _begin(self, storage: Storage, length: int, generator: torch.Generator | None) -> Runs:
        runs = self._finder.runs(storage)
        eligible = self._eligible(runs, length)
        if self.shuffle:
            eligible = eligible[torch.randperm(len(eligible), generator=generator)]
        self._next, self._epoch = 0, replace(runs.select(eligible), stamps=runs.stamps.clone())
        return self._epoch

    def _take(self, storage: Storage, epoch: Runs, slices: int, length: int) -> Runs | None:
        """Take the next runs; ``None`` if none are left, or too few for a batch."""
        parts, have = [], 0
        while have < slices and self._next < len(epoch.length):
            some = torch.arange(len(epoch.length))[self._next :][: slices - have]
            left = epoch.select(some).remaining(storage.ledger.words)
            parts.append(left.select(left.length >= (length if self.strict_length else 1)))
            self._next += len(some)
            have += len(parts[-1].length)
        if not have or (self.drop_last and have < slices):
            return None
        return Runs(
            torch.cat([part.slot for part in parts]),
            torch.cat([part.env for part in parts]),
            torch.cat([part.length for part in parts]),
            epoch.stamps,
        )


def _column(storage: Storage, key: Key) -> Any:
    found = storage.field(key)
    if found is None:
        raise ConfigError(f"no {format_key(key)} is stored: slices need traj_key, or end_key")
    column = found.cpu().reshape(storage.ledger.slots, storage.envs, -1)
    if column.shape[2] != 1:
        raise ConfigError(
            f"{format_key(key)} has {column.shape[2]} elements per frame, slices need one"
        )
    return column[:, :, 0].numpy()


def _slices(storage: Storage, runs: Runs, length: int, generator: torch.Generator | None) -> Draw:
    """Draw where a slice of each run begins."""
    room = (runs.length - length).clamp_min_(0) + 1
    share = torch.rand(len(room), dtype=torch.float64, generator=generator)
    start = runs.slot + torch.minimum((share * room).long(), room - 1)
    run, step, ends = steps_of(runs.length.clamp_max(length))
    slots = (start[run] + step) % len(runs.stamps)
    marks = torch.zeros(len(slots), dtype=torch.bool)
    marks[ends - 1] = True
    return Draw(slots * storage.envs + runs.env[run], runs.stamps[slots], ends=marks)
