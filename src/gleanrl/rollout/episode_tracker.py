"""The trajectory of every frame, and the steps at which to cut trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.episode_returns import (
    NONE_ENDED,
    Ended,
    EpisodeSums,
    episodes_that_ended,
    head_of,
)
from gleanrl.core.errors import ConfigError
from gleanrl.core.window import Array, Window
from gleanrl.rollout.policy_inputs import Provided

_NEVER = np.iinfo(np.int64).max
_NONE = np.empty((2, 0), np.int64)
_MOST_SENT = 1 << 14
"""Frames of a rollout whose rewards the learner adds up together with others."""


class Tracker:
    """Counts episodes and steps of ``P`` environments.

    During a rollout only the ends are noted; trajectory ids and step counts follow from them in
    bulk. An id is ``episode * stride + base + environment``: unique over the run, independent of
    timing and of where batches begin.
    """

    def __init__(self, envs: int, max_frames: int | None, provided: Provided | None = None) -> None:
        """Start at episode 0 of every environment, without other environments until `place`.

        Episodes are cut after ``max_frames`` steps. ``provided`` is told where they begin.
        """
        self._index = np.arange(envs, dtype=np.int64)
        self._stride = envs
        self._max = max_frames
        self._episode = np.zeros(envs, np.int64)
        self.ages = np.zeros(envs, np.int64)
        """Steps each environment has taken in its running episode, at rollout start."""
        self._sums: EpisodeSums | None = None
        """Adds up large rollouts. All rollouts have one size, except stopped ones."""
        self._begun = self._index
        """Environments that begin an episode with the next rollout though none has ended."""
        self._head, self._head_for = b"", (-1, np.dtype(float))
        """The head of `Ended` for rollouts of so many steps with rewards of that dtype."""
        self.ended: Ended = NONE_ENDED
        """The data about episodes that ended in the last rollout."""
        self._due = np.full(envs, _NEVER)
        self._over: list[int] = []
        self._over_after: list[int] = []
        """Environments whose episodes ended in this rollout, and after how many of its steps."""
        self._all_ends = _NONE
        self.voids: list[tuple[int, int]] = []
        """The environment and the step of each frame of this rollout that is no transition."""
        self.absent: dict[int, int] = {}
        """By environment that is lost for good: its first frame of this rollout that is missing."""
        self.lacking = 0
        """The number of frames of the last rollout that are no transitions."""
        self._provided = provided or None
        self.next_due = -1
        """The next step at which an environment must be truncated, or -1."""

    def place(self, base: int, stride: int) -> None:
        """Number the environments from ``base`` on, among ``stride`` of all workers."""
        self._index = base + np.arange(len(self._index), dtype=np.int64)
        self._stride = stride

    def begin(self, window: Window) -> None:
        """Start a rollout at step 0 of ``window``."""
        self._over, self._over_after, self._all_ends = [], [], _NONE
        self.voids = []
        if self.absent:
            self.absent = dict.fromkeys(self.absent, 0)
        if self._provided is not None:
            self._provided.begin(window, self.ages)
        if self._max is not None:
            self._due = self._max - 1 - self.ages
            self._due[list(self.absent)] = _NEVER
            self.next_due = int(self._due.min())

    def due(self, t: int) -> Sequence[int]:
        """Return the environments to truncate at step ``t``."""
        return np.flatnonzero(self._due == t).tolist()

    def end(self, t: int, ended: Sequence[int]) -> None:
        """Note that ``ended`` finished an episode with step ``t``."""
        self._over += ended
        self._over_after += [t + 1] * len(ended)
        if self._provided is not None:
            self._provided.started(t, ended)
        if self._max is not None:
            self._due[list(ended)] = t + self._max
            self.next_due = int(self._due.min())

    def void(self, t: int, env: int, for_good: bool = False) -> None:
        """Note that frame ``t`` of ``env`` is no transition, between two episodes.

        If that is ``for_good``, no frame of it follows in any rollout.

        That before it ends with step ``t - 1``, unless it has ended; where the rollout begins with
        frame ``t``, it ends without being counted. In the rollout's `Ended`, the frame is an
        episode that does not count.
        """
        ended = (env, t) in zip(self._over, self._over_after, strict=True)
        if t == 0:
            self.restart([env])
        elif not ended:
            self.end(t - 1, [env])
        self.end(t, [env])
        self.voids.append((env, t))
        if for_good:
            self.absent[env], self._due[env] = t + 1, _NEVER
            self.next_due = int(self._due.min())

    def end_all(self, done: Array) -> None:
        """Note every end of a rollout at once, instead of `end`: ``done`` is ``[P, T]``."""
        steps, rows = divmod(np.flatnonzero(np.ascontiguousarray(done.T)), len(done))
        self._all_ends = np.array((rows, steps + 1))

    def finish(self, steps: int, rewards: Array, ids: Array | None, counts: Array | None) -> None:
        """Close a rollout of ``steps`` steps, which may be less than the arrays hold.

        ``rewards``, ``[P, T]``, are one per frame. If there are ``ids``, ``[P, T]`` int64, they
        receive trajectory ids, -1 from ``steps`` on; ``counts``, ``[P, T + 1]`` int64, receive
        steps taken in the episode before each root row.
        """
        # All that follows is paid per rollout with cold caches: some 2 us for every kind of call.
        ended = np.array((self._over, self._over_after)) if self._over else self._all_ends
        rows, ends = ended
        first, age = self._episode * self._stride + self._index, self.ages
        any_ended = len(rows) > 0
        if any_ended:
            self._episode += np.bincount(rows, minlength=len(age))
        if ids is not None:
            found = ids[:, :steps]
            found[...] = first[:, None]
            if any_ended and steps > 1:
                inside = ends < steps
                found[:, 1:] = 0
                found[rows[inside], ends[inside]] = self._stride
                np.cumsum(found, 1, out=found)
            ids[:, steps:] = -1
        if counts is not None:
            began = np.repeat(-age[:, None], steps + 1, 1)
            began[rows, ends] = ends
            counts[:, : steps + 1] = np.arange(steps + 1) - np.maximum.accumulate(began, 1)
        age += steps
        age[rows] = steps - ends  # of several ends of one environment the last one stays
        self.lacking = len(self.voids)
        if self.absent:
            self.lacking += sum(steps - first for first in self.absent.values())
        for env, t in self.voids:
            if ids is not None:
                ids[env, t] = -1
            void = (rows == env) & (ends == t + 1)
            ended = np.array((rows, np.where(void, ~ends, ends)))
            rows, ends = ended
        self.ended = self._ends_of(steps, rewards[:, :steps], ended)

    def _ends_of(self, steps: int, rewards: Array, ends: Array) -> Ended:
        # Caches are cold here: each call takes 0.5 us or more, so there are as few as possible.
        if (steps, rewards.dtype) != self._head_for:
            self._head, self._head_for = head_of(rewards), (steps, rewards.dtype)
        if len(begun := self._begun):
            if rewards.size > _MOST_SENT and len(begun) == len(self._index):
                self._sums = EpisodeSums()  # which knows of no running episodes
            ends = np.concatenate(((begun, np.zeros_like(begun)), ends), 1)
            self._begun = begun[:0]
        rollout = self._head + rewards.tobytes() + ends.tobytes()
        return rollout if self._sums is None else episodes_that_ended(self._sums.add([rollout])[0])

    def restart(self, envs: Sequence[int] | None = None) -> None:
        """Begin a new episode in ``envs`` (all by default) that have taken a step."""
        chosen = np.zeros(len(self._episode), bool)
        chosen[slice(None) if envs is None else list(envs)] = True
        self._begun = np.union1d(self._begun, chosen.nonzero()[0])
        chosen &= self.ages > 0
        self._episode[chosen] += 1
        self.ages[chosen] = 0

    def state(self) -> dict[str, torch.Tensor]:
        """Return the counters, int64."""
        return {
            "episode": torch.from_numpy(self._episode.copy()),
            "age": torch.from_numpy(self.ages.copy()),
            "begun": torch.from_numpy(self._begun.copy()),
            **({} if self._sums is None else {"sums": self._sums.state()}),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if ``state`` is that of another number of environments."""
        saved, own = len(state["episode"]), len(self._episode)
        if saved != own:
            raise ConfigError(f"the state is that of {saved} environments, this source has {own}")
        if state["age"].shape != state["episode"].shape:
            raise ConfigError("the state has not as many ages of episodes as environments")

    def load_state(self, state: Mapping[str, Any], running: bool) -> None:
        """Continue from saved counters; unless they are ``running``, episodes count as over."""
        self._episode = torch.as_tensor(state["episode"]).numpy().copy()
        self.ages = torch.as_tensor(state["age"]).numpy().copy()
        if running:
            self._begun = state["begun"].numpy().copy()
            self._sums = EpisodeSums() if "sums" in state else None
            if self._sums is not None:
                self._sums.load_state(state["sums"])
        else:
            self.restart()
