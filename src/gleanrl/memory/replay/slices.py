"""Samples of consecutive steps, never across the end of a trajectory, a gap or the cursor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, ReplayError
from gleanrl.core.keys import TRAJ_IDS, Key, NestedKey, as_key, show
from gleanrl.memory.replay.runs import Bools, Places, RunFinder, Runs
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
        eligible = torch.arange(len(runs.length))
        if self.strict_length:
            eligible = (runs.length >= length).nonzero().squeeze(1)
        if not len(eligible):
            longest = int(runs.length.max()) if len(runs.length) else 0
            raise ReplayError(
                f"no trajectory has {length} steps in a row (the longest: {longest}); "
                "shorten slices, or strict_length=False"
            )
        chosen, last = self._choose(runs, eligible, slices, generator)
        draw = _slices(storage, runs, chosen, length, generator)
        draw.last = last
        return draw

    def _sizes(self, count: int) -> tuple[int, int]:
        parts = self.num_slices or self.slice_len or 1
        if count % parts:
            name = "num_slices" if self.num_slices else "slice_len"
            raise ConfigError(f"a batch of {count} is not divisible by {name} ({parts})")
        return (parts, count // parts) if self.num_slices else (count // parts, parts)

    def _choose(
        self, runs: Runs, eligible: torch.Tensor, slices: int, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, bool]:
        return eligible[torch.randint(len(eligible), (slices,), generator=generator)], False

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
    """Slices of which every trajectory gives one per epoch (or, if rows come, per their number).

    Arguments as in `SliceSampler`. An epoch begins anew when rows were written.
    """

    def __init__(self, *, shuffle: bool = True, drop_last: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._order = torch.empty(0, dtype=torch.int64)
        self._epoch: Runs | None = None

    def restart(self) -> None:
        """Begin a new epoch with the next draw."""
        self._epoch = None

    def _choose(
        self, runs: Runs, eligible: torch.Tensor, slices: int, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, bool]:
        if self._epoch is not runs or not len(self._order):
            number = len(eligible)
            order = torch.randperm(number, generator=generator) if self.shuffle else slice(None)
            self._order, self._epoch = eligible[order], runs
        if self.drop_last and len(self._order) < slices:
            raise ReplayError(
                f"an epoch over {len(self._order)} trajectories has no whole batch of {slices}"
            )
        chosen, self._order = self._order[:slices], self._order[slices:]
        last = not len(self._order) or (self.drop_last and len(self._order) < slices)
        if last:
            self.restart()
        return chosen, last


def _column(storage: Storage, key: Key) -> Any:
    found = storage.field(key)
    if found is None:
        raise ConfigError(f"no {show(key)} is stored: slices need traj_key, or end_key")
    column = found.cpu().reshape(storage.ledger.slots, storage.envs, -1)
    if column.shape[2] != 1:
        raise ConfigError(f"{show(key)} has {column.shape[2]} elements per frame, slices need one")
    return column[:, :, 0].numpy()


def _slices(
    storage: Storage,
    runs: Runs,
    chosen: torch.Tensor,
    length: int,
    generator: torch.Generator | None,
) -> Draw:
    lengths = runs.length[chosen]
    room = (lengths - length).clamp_min_(0) + 1
    share = torch.rand(len(chosen), dtype=torch.float64, generator=generator)
    start = runs.slot[chosen] + torch.minimum((share * room).long(), room - 1)
    taken = lengths.clamp_max(length)
    ends = taken.cumsum(0)
    steps = torch.arange(int(ends[-1])) - (ends - taken).repeat_interleave(taken)
    slots = (start.repeat_interleave(taken) + steps) % len(runs.stamps)
    marks = torch.zeros(len(slots), dtype=torch.bool)
    marks[ends - 1] = True
    index = slots * storage.envs + runs.env[chosen].repeat_interleave(taken)
    return Draw(index, runs.stamps[slots], ends=marks)
