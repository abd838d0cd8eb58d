"""Which trajectory every frame belongs to, and when one has to be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import IS_INIT
from gleanrl.core.messages import NO_EPISODES
from gleanrl.core.window import Array, Window

_NEVER = np.iinfo(np.int64).max


class Tracker:
    """Counts episodes and steps of ``P`` environments.

    During a rollout only the ends are noted; trajectory ids and step counts follow from them in
    bulk. An id is ``episode * stride + base + environment``: unique over the run, independent of
    timing and of where batches begin.
    """

    def __init__(self, envs: int, max_frames: int | None) -> None:
        """Start at episode 0 of every environment; there are no others until `place`."""
        self._index = np.arange(envs, dtype=np.int64)
        self._stride = envs
        self._max = max_frames
        self._episode = np.zeros(envs, np.int64)
        self._age = np.zeros(envs, np.int64)
        """Steps each environment has taken in its running episode, at rollout start."""
        self._return = np.zeros(envs)
        """The sum of their rewards."""
        self.episodes: Array = NO_EPISODES
        """Return and length of each episode that ended in the last rollout, as `Report` has it."""
        self._due = np.full(envs, _NEVER)
        self._ended: list[int] = []
        self._ended_at: list[int] = []
        self._all_ends: tuple[Array, Array] | None = None
        self._init_rows: list[Array] = []
        self.next_due = -1
        """The next step at which some environment has to be truncated, or -1."""

    def place(self, base: int, stride: int) -> None:
        """Number the environments from ``base`` on, among ``stride`` of all workers."""
        self._index = base + np.arange(len(self._index), dtype=np.int64)
        self._stride = stride

    def begin(self, window: Window, next_root: Window) -> None:
        """Start a rollout at step 0; keeps root ``"is_init"`` right if the window has it."""
        self._ended, self._ended_at, self._all_ends = [], [], None
        if IS_INIT in window.keys():
            window.tensor(IS_INIT)[:, 1:] = False
            next_root.tensor(IS_INIT).zero_()
            self._init_rows = window.rows(IS_INIT)[1:] + next_root.rows(IS_INIT)
        if self._max is not None:
            self._due = self._max - 1 - self._age
            self.next_due = int(self._due.min())

    def due(self, t: int) -> Sequence[int]:
        """Return the environments to truncate at step ``t``."""
        return np.flatnonzero(self._due == t).tolist()

    def end(self, t: int, ended: Sequence[int]) -> None:
        """Note that ``ended`` finished an episode with step ``t``."""
        self._ended += ended
        self._ended_at += [t + 1] * len(ended)
        if self._init_rows:
            self._init_rows[t][list(ended)] = True
        if self._max is not None:
            self._due[list(ended)] = t + self._max
            self.next_due = int(self._due.min())

    def end_all(self, done: Array) -> None:
        """Note every end of a rollout at once, instead of `end`: ``done`` is ``[P, T]``."""
        steps = done.shape[1]
        ends = np.flatnonzero(done)
        ended = ends // steps
        self._all_ends = ended, ends - ended * steps + 1

    @np.errstate(invalid="ignore")  # the sum of both infinities is NaN, as it should be
    def finish(self, steps: int, rewards: Array, ids: Array | None, counts: Array | None) -> None:
        """Close a rollout of ``steps`` steps.

        Args:
            steps: Steps taken; may be less than the arrays hold.
            rewards: ``[P, T]``, one per frame.
            ids: ``[P, T]`` int64, receives trajectory ids, -1 from ``steps`` on. Or ``None``.
            counts: ``[P, T + 1]`` int64, receives steps taken in the episode before each root row.
                Or ``None``.
        """
        if steps < rewards.shape[1]:
            rewards = rewards[:, :steps]
        if not self._ended and self._all_ends is None:
            self._finish_without_ends(steps, rewards, ids, counts)
            return
        envs = len(self._episode)
        rows, columns = self._all_ends or (
            np.array(self._ended, np.int64),
            np.array(self._ended_at, np.int64),
        )
        begins = np.zeros((envs, steps + 1), bool)
        begins[rows, columns] = True
        if ids is not None:
            found = ids[:, :steps]
            np.cumsum(begins[:, :-1], 1, out=found)
            found *= self._stride
            found += (self._episode * self._stride + self._index)[:, None]
            ids[:, steps:] = -1
        if counts is not None:
            time = np.arange(steps + 1)
            started = np.where(begins, time, -self._age[:, None])
            counts[:, : steps + 1] = time - np.maximum.accumulate(started, 1)
        ends = np.bincount(rows, minlength=envs)
        self.episodes = self._add_up(begins, rewards, ends)
        self._age += steps
        # Of several ends of one environment the last assignment stays: they come in step order.
        self._age[rows] = steps - columns
        self._episode += ends

    def _add_up(self, begins: Array, rewards: Array, ends: Array) -> Array:
        """Sum the rewards of every run of frames of one episode; return the episodes that ended.

        Args:
            begins: ``[P, T + 1]``, where runs begin; the first column is set here.
            rewards: ``[P, T]``.
            ends: ``[P]``, how many episodes ended.
        """
        envs, width = begins.shape
        begins[:, 0] = True
        first = begins.reshape(-1).nonzero()[0]
        padded = np.zeros((envs, width))  # the run that begins behind the last step is worth 0
        padded[:, :-1] = rewards
        returns = np.add.reduceat(padded.reshape(-1), first)
        lengths = np.zeros(len(first))
        np.subtract(first[1:], first[:-1], out=lengths[:-1], casting="unsafe")
        last = (ends + 1).cumsum() - 1
        opening = last - ends
        returns[opening] += self._return
        lengths[opening] += self._age
        self._return = returns[last]
        over = np.ones(len(first), bool)
        over[last] = False
        order = (first[1:] % width)[over[:-1]].argsort(kind="stable")
        episodes = np.empty((len(order), 2))
        episodes[:, 0] = returns[over][order]
        episodes[:, 1] = lengths[over][order]
        return episodes

    def _finish_without_ends(
        self, steps: int, rewards: Array, ids: Array | None, counts: Array | None
    ) -> None:
        """Do the same for a rollout in which no episode ended: most short ones."""
        self.episodes = NO_EPISODES
        self._return += rewards[:, 0] if steps == 1 else np.add.reduce(rewards, 1, np.float64)
        if ids is not None:
            ids[:, :steps] = (self._episode * self._stride + self._index)[:, None]
            ids[:, steps:] = -1
        if counts is not None:
            counts[:, : steps + 1] = self._age[:, None] + np.arange(steps + 1)
        self._age += steps

    def restart(self, envs: Sequence[int] | None = None) -> None:
        """Begin a new episode in ``envs`` (all by default) that have taken a step."""
        chosen = np.zeros(len(self._episode), bool)
        chosen[slice(None) if envs is None else list(envs)] = True
        chosen &= self._age > 0
        self._episode[chosen] += 1
        self._age[chosen] = 0
        self._return[chosen] = 0

    def state(self) -> dict[str, torch.Tensor]:
        """Return the counters, ``[P]`` int64 each."""
        return {
            "episode": torch.from_numpy(self._episode.copy()),
            "age": torch.from_numpy(self._age.copy()),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if ``state`` is that of another number of environments."""
        saved, own = len(state["episode"]), len(self._episode)
        if saved != own:
            raise ConfigError(f"the state is that of {saved} environments, this source has {own}")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from saved counters; running episodes count as over (environments restart)."""
        self._episode = torch.as_tensor(state["episode"]).numpy().copy()
        self._age = torch.as_tensor(state["age"]).numpy().copy()
        self._return[:] = 0
        self.restart()
