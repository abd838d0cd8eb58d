"""Returns and lengths of episodes, added up from the rewards of rollouts."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import torch

from gleanrl.core.window import Array

Ended: TypeAlias = bytes
"""The data about episodes that ended in a rollout.

It is bytes from the worker that has the rewards until the learner adds them up, as each object in
between would take more time than the sums: what `head_of` returns, and memory of

- rewards, ``[P, T]``, one per frame,
- ends, ``[2, N]`` int64, in their order: the environment of each episode that ended, and how many
  steps of the rollout it got; 0 steps where an environment began an episode with the rollout though
  none had ended. ``~n`` in place of ``n`` ends an episode that does not count.

If episodes have been added up, it is what `episodes_that_ended` returns.
"""


def mean_rewards(rewards: Sequence[torch.Tensor], size: Sequence[int]) -> Array:
    """Return one reward per frame: that of the environment, or the mean of its agents' rewards.

    This is what returns are added up from, wherever they are shown. There is one tensor ``[*size,
    ...]`` per group of agents; the result is float64 of shape ``size``, 0 without rewards.
    """
    flat = [r.detach().to("cpu", torch.float64).reshape(*size, -1) for r in rewards]
    elements = torch.cat(flat, -1) if flat else torch.zeros(*size, 0)
    if not elements.shape[-1]:
        return np.zeros(size)
    mean: Array = elements.mean(-1).numpy()
    return mean


NO_EPISODES: Array = np.empty((0, 2))
_HEAD = struct.Struct("=c3x3i")
"""Numpy's character for the dtype of the rewards; how many environments (0 if what follows are
episodes), steps, and bytes of rewards there are."""
_Opened: TypeAlias = tuple[bytes, int, int, int, Ended]
"""The parts of its head, and the whole head."""
_AT_ONCE = 1 << 17
"""Bytes that are added up at once: with fewer, calls take more time, with more, cache misses."""


def head_of(rewards: Array) -> bytes:
    """Return the head of `Ended` for ``rewards``, which depends on their shape and dtype only.

    With cold caches, making it takes 7 us: more than all else that is done per rollout.
    """
    return _HEAD.pack(rewards.dtype.char.encode(), *rewards.shape, rewards.nbytes)


def episodes_that_ended(episodes: Array) -> Ended:
    """Pack return and length of each episode, ``[N, 2]`` float64, in the order of their ends."""
    return _HEAD.pack(b"d", 0, 0, 0) + episodes.tobytes()


NONE_ENDED: Ended = episodes_that_ended(NO_EPISODES)


class EpisodeSums:
    """Adds up the episodes of one worker.

    To add up many rollouts at once costs a fraction of what each would. A return is the sum of
    rewards from first to last, in float64; it does not depend on where rollouts begin, nor on how
    many are added up at once.
    """

    def __init__(self) -> None:
        self.running: Array = np.zeros((2, 0))
        """Return and length of the running episode of each environment, once these are known."""

    def state(self) -> torch.Tensor:
        """Return the running episodes."""
        return torch.from_numpy(self.running.copy())

    def load_state(self, state: torch.Tensor) -> None:
        self.running = state.numpy().copy()

    def add(self, rollouts: Sequence[Ended]) -> tuple[Array, list[int]]:
        """Take in the next rollouts; return the episodes that ended, and how many in each."""
        found: list[Array] = [NO_EPISODES]
        counts: list[int] = []
        heads = [(*_HEAD.unpack_from(ended), ended) for ended in rollouts]
        for envs, group in groupby(heads, itemgetter(1)):
            own = list(group)
            each = 1 + _AT_ONCE // len(own[0][-1])
            for at in range(0, len(own), each):
                these = own[at : at + each]
                episodes, ended = self._added(envs, these) if envs else _read(these)
                found.append(episodes)
                counts += ended
        return np.concatenate(found), counts

    def _added(self, envs: int, rollouts: Sequence[_Opened]) -> tuple[Array, list[int]]:
        rewards, ends = [], []
        for kind, _, steps, size, ended in rollouts:
            rewards.append(np.ndarray((envs, steps), kind.decode(), ended, _HEAD.size))
            start = _HEAD.size + size
            ends.append(np.ndarray((2, (len(ended) - start) // 16), np.int64, ended, start))
        if not self.running.size:
            self.running = np.zeros((2, envs))
        # Column 0 is the step before: it has what running episodes have returned so far.
        values = np.concatenate([self.running[0][:, None], *rewards], 1)
        width = values.shape[1]
        row, column = np.concatenate(ends, 1)
        ended = column > 0
        column = np.where(column < 0, ~column, column)
        steps_of = np.array([own.shape[1] for own in rewards])
        numbers = [own.shape[1] for own in ends]
        column += (steps_of.cumsum() - steps_of).repeat(numbers)
        last = row * width + column
        begins = np.zeros(values.size + 1, bool)
        begins[last + 1] = begins[::width] = True
        lengths = np.diff(begins.nonzero()[0])
        run = np.arange(len(lengths)).repeat(lengths)
        """Which run of frames of one episode each frame is part of."""
        totals: Array = np.array([np.bincount(run, values.reshape(-1)), lengths])
        totals[1, run[::width]] += self.running[1] - 1
        self.running = totals[:, run[width - 1 :: width]]
        self.running[:, row[column + 1 == width]] = 0
        of = np.arange(len(numbers)).repeat(numbers)[ended]
        return totals[:, run[last[ended]]].T, np.bincount(of, minlength=len(numbers)).tolist()


def _read(rollouts: Sequence[_Opened]) -> tuple[Array, list[int]]:
    found = [np.frombuffer(ended, offset=_HEAD.size).reshape(-1, 2) for *_, ended in rollouts]
    return np.concatenate(found), [len(own) for own in found]
