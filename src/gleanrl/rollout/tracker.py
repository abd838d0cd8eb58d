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
        self._all_ends: Array | None = None
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
        columns, rows = done.T.nonzero()
        self._all_ends = rows * (done.shape[1] + 1) + columns + 1

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
        if steps == 1 or (not self._ended and self._all_ends is None):
            self._finish_one_run(steps, rewards, ids, counts)
            return
        # All that follows is paid per rollout with cold caches: some 2 us for every kind of call.
        envs, width = len(self._episode), steps + 1
        ends = self._all_ends
        if ends is None:
            places = zip(self._ended, self._ended_at, strict=True)
            ends = np.array([env * width + step for env, step in places], np.int64)
        flat = np.zeros(envs * width, bool)
        flat[ends] = True
        begins = flat.reshape(envs, width)
        if ids is not None:
            found = ids[:, :steps]
            np.cumsum(begins[:, :-1], 1, out=found)
            found *= self._stride
            found += (self._episode * self._stride + self._index)[:, None]
            if steps < ids.shape[1]:
                ids[:, steps:] = -1
        if counts is not None:
            time = np.arange(width)
            started = np.where(begins, time, -self._age[:, None])
            counts[:, :width] = time - np.maximum.accumulate(started, 1)
        begins[:, 0] = True
        self._add_up(flat.nonzero()[0], ends, rewards)

    def _add_up(self, begins: Array, ends: Array, rewards: Array) -> None:
        """Sum the rewards of every run of frames of one episode; take down what ended.

        Args:
            begins: Where runs begin, ascending, in ``rewards`` with one more column.
            ends: Where episodes were over, likewise, in the order of their ends.
            rewards: ``[P, T]``.
        """
        envs, steps = rewards.shape
        padded = np.zeros((envs, steps + 1))  # the run that begins behind the last step is worth 0
        padded[:, :-1] = rewards
        returns = np.add.reduceat(padded.reshape(-1), begins)
        edges = np.arange(0, (envs + 1) * (steps + 1), steps + 1)
        places = begins.searchsorted(edges)
        opening, last = places[:-1], places[1:] - 1
        returns[opening] += self._return
        over = begins.searchsorted(ends) - 1
        begins[opening] -= self._age
        self.episodes = episodes = np.empty((len(ends), 2))
        episodes[:, 0] = returns[over]
        episodes[:, 1] = ends - begins[over]
        self._return = returns[last]
        self._age = edges[:-1] + steps - begins[last]
        self._episode += last - opening

    def _finish_one_run(
        self, steps: int, rewards: Array, ids: Array | None, counts: Array | None
    ) -> None:
        """Do the same for a rollout in which no episode ended before the last step."""
        self._return += rewards[:, 0] if steps == 1 else np.add.reduce(rewards, 1, np.float64)
        if ids is not None:
            ids[:, :steps] = (self._episode * self._stride + self._index)[:, None]
            if steps < ids.shape[1]:
                ids[:, steps:] = -1
        if counts is not None:
            counts[:, : steps + 1] = self._age[:, None] + np.arange(steps + 1)
        self._age += steps
        ended = self._ended if self._all_ends is None else self._all_ends // (steps + 1)
        self.episodes = NO_EPISODES
        if len(ended):
            self.episodes = np.array((self._return[ended], self._age[ended])).T
            self._episode[ended] += 1
            self._return[ended] = self._age[ended] = 0
            if counts is not None:
                counts[ended, steps] = 0

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
