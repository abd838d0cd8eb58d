"""Which trajectory every frame belongs to, and when one has to be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gleanrl.core.keys import IS_INIT
from gleanrl.core.protocols import Array, Window

_NEVER = np.iinfo(np.int64).max


class Tracker:
    """Counts episodes and steps of ``P`` environments.

    During a rollout only the ends are noted; trajectory ids and step counts follow from them in
    bulk. An id is ``episode * stride + base + environment``: unique over the run, independent of
    timing and of where batches begin.
    """

    def __init__(self, envs: int, base: int, stride: int, max_frames: int | None) -> None:
        """Start at episode 0 of every environment."""
        self._index = base + np.arange(envs, dtype=np.int64)
        self._stride = stride
        self._max = max_frames
        self._episode = np.zeros(envs, np.int64)
        self._age = np.zeros(envs, np.int64)
        """Steps each environment has taken in its running episode, at rollout start."""
        self._due = np.full(envs, _NEVER)
        self._ends: list[tuple[int, Sequence[int]]] = []
        self._init_rows: list[Array] = []
        self.next_cut = -1
        """The next step at which some environment has to be truncated, or -1."""

    def begin(self, window: Window, carry: Window) -> None:
        """Start a rollout at step 0; keeps root ``"is_init"`` right if the window has it."""
        self._ends = []
        if IS_INIT in window.keys():
            window.tensor(IS_INIT)[:, 1:] = False
            carry.tensor(IS_INIT).zero_()
            self._init_rows = window.rows(IS_INIT)[1:] + carry.rows(IS_INIT)
        if self._max is not None:
            self._due = self._max - 1 - self._age
            self.next_cut = int(self._due.min())

    def due(self, t: int) -> Sequence[int]:
        """Return the environments to truncate at step ``t``."""
        return np.flatnonzero(self._due == t).tolist()

    def end(self, t: int, ended: Sequence[int]) -> None:
        """Note that ``ended`` finished an episode with step ``t``."""
        self._ends.append((t, ended))
        if self._init_rows:
            self._init_rows[t][list(ended)] = True
        if self._max is not None:
            self._due[list(ended)] = t + self._max
            self.next_cut = int(self._due.min())

    def finish(self, steps: int, ids: Array | None, counts: Array | None) -> None:
        """Close a rollout of ``steps`` steps.

        Args:
            steps: Steps taken; may be less than the arrays hold.
            ids: ``[P, T]`` int64, receives trajectory ids, -1 from ``steps`` on. Or ``None``.
            counts: ``[P, T + 1]`` int64, receives steps taken in the episode before each root row.
                Or ``None``.
        """
        envs = len(self._episode)
        ended = np.zeros((envs, steps + 1), bool)
        for t, which in self._ends:
            ended[list(which), t + 1] = True
        episode = np.cumsum(ended, 1, dtype=np.int64)
        time = np.arange(steps + 1)
        started = np.maximum.accumulate(np.where(ended, time, 0), 1)
        age = time - started + np.where(episode == 0, self._age[:, None], 0)
        episode += self._episode[:, None]
        if ids is not None:
            ids[:, :steps] = episode[:, :-1] * self._stride + self._index[:, None]
            ids[:, steps:] = -1
        if counts is not None:
            counts[:, : steps + 1] = age
        self._episode, self._age = episode[:, -1].copy(), age[:, -1].copy()

    def restart(self, envs: Sequence[int] | None = None) -> None:
        """Begin a new episode in ``envs`` (all by default) that have taken a step."""
        chosen = np.zeros(len(self._episode), bool)
        chosen[slice(None) if envs is None else list(envs)] = True
        chosen &= self._age > 0
        self._episode[chosen] += 1
        self._age[chosen] = 0

    def state(self) -> dict[str, Any]:
        """Return the counters."""
        return {"episode": self._episode.copy(), "age": self._age.copy()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from saved counters; running episodes count as over (environments restart)."""
        self._episode = np.asarray(state["episode"], np.int64).copy()
        self._age = np.asarray(state["age"], np.int64).copy()
        self.restart()
