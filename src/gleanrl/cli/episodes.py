"""Returns and lengths of episodes, added up over batches."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.keys import MASK, NEXT, TRAJ_IDS, as_key
from gleanrl.engine.trajectories import end_flags

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Summary:
    """A few numbers about many."""

    mean: float
    std: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Array) -> Summary | None:
        """Summarise ``[N]`` values; ``None`` if there are none."""
        if len(values) == 0:
            return None
        return cls(
            float(values.mean()), float(values.std()), float(values.min()), float(values.max())
        )

    def as_json(self) -> dict[str, float | None]:
        """Return the numbers by name; JSON has no NaN and no infinity, so these become null."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}


class EpisodeStats:
    """Return and length of every episode that ended, whatever batches it came in.

    Episodes are told apart by trajectory id if the batches have one and by environment (row)
    otherwise. Work is done in bulk: the cost per batch is that of sorting its runs of frames.
    """

    def __init__(self) -> None:
        """Start without episodes."""
        self.frames = 0
        """Frames seen."""
        self.episodes = 0
        """Episodes that ended."""
        self._open_ids = np.empty(0, np.int64)
        """Sorted ids of episodes that run on, beside what they have so far."""
        self._open_return = np.empty(0, np.float64)
        self._open_length = np.empty(0, np.int64)
        self._returns: list[Array] = []
        self._lengths: list[Array] = []
        self._ends: list[Array] = []

    @property
    def returns(self) -> Array:
        """Undiscounted returns in the order in which episodes ended, float64 ``[N]``."""
        return _joined(self._returns, np.float64)

    @property
    def lengths(self) -> Array:
        """Steps of each episode, int64 ``[N]``."""
        return _joined(self._lengths, np.int64)

    @property
    def ends(self) -> Array:
        """How many frames had been collected when each episode ended, int64 ``[N]``."""
        return _joined(self._ends, np.int64)

    def recent(self, number: int) -> tuple[float, float] | None:
        """Return mean return and mean length of the last ``number`` episodes, if there are any."""
        if self.episodes == 0:
            return None
        returns, lengths = _tail(self._returns, number), _tail(self._lengths, number)
        return float(returns.mean()), float(lengths.mean())

    def update(self, batch: TensorDictBase) -> None:
        """Take in a batch ``[T]`` or ``[..., T]`` as collectors deliver it.

        Raises:
            ConfigError: the batch has no end flags.
        """
        steps = batch.shape[-1]
        ids, mask = batch.get(TRAJ_IDS, None), batch.get(MASK, None)
        self.add(
            _rewards(batch).reshape(-1, steps).cpu().numpy(),
            end_flags(batch).reshape(-1, steps).cpu().numpy(),
            None if ids is None else ids.reshape(-1, steps).cpu().numpy(),
            None if mask is None else mask.reshape(-1, steps).cpu().numpy(),
        )

    def add(
        self, rewards: Array, ended: Array, ids: Array | None = None, mask: Array | None = None
    ) -> None:
        """Take in ``T`` steps of ``R`` environments.

        Args:
            rewards: ``[R, T]``.
            ended: ``[R, T]`` bool, True on the last frame of an episode.
            ids: ``[R, T]`` trajectory ids, -1 on frames never collected. Without them every row is
                one environment, the same in every batch.
            mask: ``[R, T]`` bool, False on frames never collected.
        """
        rows = rewards.shape[0]
        if ids is None:
            ids = np.broadcast_to(np.arange(rows)[:, None], rewards.shape)
        valid = (ids != -1) if mask is None else (ids != -1) & mask
        env, time = np.nonzero(valid)
        if len(env) == 0:
            return
        first = _run_starts(ids[valid], ended[valid])
        last = np.append(first[1:], len(env)) - 1
        self._merge(
            ids[valid][first],
            np.add.reduceat(rewards[valid].astype(np.float64), first),
            last - first + 1,
            ended[valid][last],
            time[last] * rows + env[last],
            self.frames + np.minimum((time[last] + 1) * rows, len(env)),
        )
        self.frames += len(env)

    def _merge(
        self,
        ids: Array,
        returns: Array,
        lengths: Array,
        ended: Array,
        order: Array,
        frames: Array,
    ) -> None:
        """Join runs of frames with the same id, and with what is open, into episodes."""
        by_id = np.argsort(ids, kind="stable")
        ids, returns, lengths, ended = ids[by_id], returns[by_id], lengths[by_id], ended[by_id]
        first = _run_starts(ids, ended)
        last = np.append(first[1:], len(ids)) - 1
        returns, lengths = np.add.reduceat(returns, first), np.add.reduceat(lengths, first)
        ids, ended = ids[last], ended[last]
        order, frames = order[by_id][last], frames[by_id][last]
        self._resume(ids, returns, lengths)
        running = ~ended
        self._open_ids = np.append(self._open_ids, ids[running])
        self._open_return = np.append(self._open_return, returns[running])
        self._open_length = np.append(self._open_length, lengths[running])
        self._sort_open()
        done = np.flatnonzero(ended)
        done = done[np.argsort(order[done], kind="stable")]
        if len(done):
            self._returns.append(returns[done])
            self._lengths.append(lengths[done])
            self._ends.append(frames[done])
            self.episodes += len(done)

    def _resume(self, ids: Array, returns: Array, lengths: Array) -> None:
        """Add what is open of an episode to its first part here, in place, and close it."""
        if len(self._open_ids) == 0:
            return
        starts = np.append(True, ids[1:] != ids[:-1])
        where = np.searchsorted(self._open_ids, ids)
        known = starts & (self._open_ids[np.minimum(where, len(self._open_ids) - 1)] == ids)
        taken = where[known]
        returns[known] += self._open_return[taken]
        lengths[known] += self._open_length[taken]
        self._open_ids = np.delete(self._open_ids, taken)
        self._open_return = np.delete(self._open_return, taken)
        self._open_length = np.delete(self._open_length, taken)

    def _sort_open(self) -> None:
        order = np.argsort(self._open_ids)
        self._open_ids = self._open_ids[order]
        self._open_return, self._open_length = self._open_return[order], self._open_length[order]


def _run_starts(ids: Array, ended: Array) -> Array:
    """Return where runs of frames of one episode begin: at a new id, and after every end."""
    return np.flatnonzero(np.append(True, (ids[1:] != ids[:-1]) | ended[:-1]))


def _rewards(batch: TensorDictBase) -> torch.Tensor:
    """Add up everything called reward under ``"next"`` per frame, ``[..., T]`` float64."""
    total = torch.zeros(batch.shape, dtype=torch.float64)
    after = batch.get(NEXT)
    for key in after.keys(include_nested=True, leaves_only=True):
        if as_key(key)[-1] == "reward":
            leaf = after.get(key).to("cpu", torch.float64)
            total += leaf if leaf.ndim == total.ndim else leaf.flatten(total.ndim).sum(-1)
    return total


def _joined(parts: list[Array], dtype: Any) -> Array:
    if len(parts) > 1:
        parts[:] = [np.concatenate(parts)]
    return parts[0] if parts else np.empty(0, dtype)


def _tail(parts: list[Array], number: int) -> Array:
    """Return the last ``number`` values without joining all of them."""
    chosen: list[Array] = []
    missing = number
    for part in reversed(parts):
        chosen.append(part[-missing:])
        missing -= len(chosen[-1])
        if missing <= 0:
            break
    return np.concatenate(chosen[::-1])
