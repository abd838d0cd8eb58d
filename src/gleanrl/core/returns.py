"""Returns and lengths of episodes, added up from the rewards of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from gleanrl.core.window import Array

NO_EPISODES: Array = np.empty((0, 2))
_AT_ONCE = 1 << 16
"""Bytes of rewards that are added up at once, and fit into caches."""


Rewards: TypeAlias = tuple[int, str, bytes, bytes, bytes]
"""What the episodes of a rollout are added up from:

- how many environments there are, ``P``, and numpy's character for the dtype of the rewards,
- rewards, ``[P, T]``: one of each frame,
- ends, ``[2, N]`` int64: the environment of each episode that ended, in the order of their ends,
  and how many steps of the rollout it got,
- begun, int64: environments that began an episode with the rollout though none had ended.

Arrays are bytes, as they are sent. It is a plain tuple: one of a class takes 4 us more to make.
"""
Ended: TypeAlias = Rewards | Array
"""What says which episodes ended in a rollout: what they are added up from, or return and length of
each, ``[N, 2]`` float64, in the order of their ends."""


class EpisodeSums:
    """Adds up the episodes of one worker.

    To add up many rollouts at once costs a fraction of what each would. A return is the sum of
    rewards from first to last, in float64; it does not depend on where rollouts begin, nor on how
    many are added up at once.
    """

    def __init__(self) -> None:
        """Start before the first rollout."""
        self._open: Array = np.empty((2, 0))
        """Return and length of the running episode of each environment."""

    def add(self, rollouts: Sequence[Ended]) -> tuple[Array, list[int]]:
        """Take in the next rollouts; return the episodes that ended, and how many in each."""
        found: list[Array] = [NO_EPISODES]
        counts: list[int] = []
        for raw, group in groupby(rollouts, lambda own: isinstance(own, tuple)):
            own: list[Any] = list(group)
            if not raw:
                found += own
                counts += map(len, own)
                continue
            each = 1 + _AT_ONCE // (1 + len(own[0][2]))
            for at in range(0, len(own), each):
                episodes, ended = self._added(own[at : at + each])
                found.append(episodes)
                counts += ended
        return np.concatenate(found), counts

    def _added(self, rollouts: Sequence[Rewards]) -> tuple[Array, list[int]]:
        rewards, ends, begun = [], [], []
        for envs, kind, *arrays in rollouts:
            rewards.append(np.frombuffer(arrays[0], kind).reshape(envs, -1))
            ends.append(np.frombuffer(arrays[1], np.int64).reshape(2, -1))
            begun.append(np.frombuffer(arrays[2], np.int64))
        if not self._open.size:
            self._open = np.zeros((2, len(rewards[0])))
        # Column 0 is the step before: it has what running episodes have returned so far.
        values = np.concatenate([self._open[0][:, None], *rewards], 1)
        width = values.shape[1]
        steps = np.array([own.shape[1] for own in rewards])
        before = steps.cumsum() - steps
        counts = [own.shape[1] for own in ends]
        row, column = np.concatenate(ends, 1)
        column += before.repeat(counts)
        anew = (
            np.concatenate([row, *begun]),
            np.concatenate([column, before.repeat([len(own) for own in begun])]) + 1,
        )
        last = row * width + column
        begins = np.zeros(values.size + 1, bool)
        begins[anew[0] * width + anew[1]] = begins[::width] = True
        lengths = np.diff(begins.nonzero()[0])
        run = np.arange(len(lengths)).repeat(lengths)
        """Which run of frames of one episode each frame is part of."""
        totals: Array = np.array([np.bincount(run, values.reshape(-1)), lengths])
        totals[1, run[::width]] += self._open[1] - 1
        self._open = totals[:, run[width - 1 :: width]]
        self._open[:, anew[0][anew[1] == width]] = 0
        return totals[:, run[last]].T, counts
