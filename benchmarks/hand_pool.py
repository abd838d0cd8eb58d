"""The bare loop over a vectorised environment whose automatic reset costs a step (NEXT_STEP)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.actors import Actor
from benchmarks.harness import Fields


class PoolLoop:
    """Steps the pool ``T`` times per batch and stores every row it returns.

    The step after an end is no transition, only the reset: such rows are marked in ``mask`` and not
    counted. Ours delivers none of them; the bare loop leaves sorting them out to its user.
    """

    def __init__(self, pool: Any, steps: int, actor: Actor) -> None:
        self._pool, self._actor, self._steps = pool, actor, steps
        first = pool.reset()[0]
        count = len(first)
        self._rows = np.zeros((steps + 1, *first.shape), first.dtype)
        self._rows[steps] = first
        self._single = list(self._rows)
        self._tensor_rows = torch.from_numpy(self._rows).unbind()
        self._next = np.zeros_like(self._rows[1:])
        self._reward = np.zeros((steps, count), np.float32)
        self._terminated, self._truncated, self._done = np.zeros((3, steps, count), bool)
        self._mask = np.ones((steps + 1, count), bool)
        self._root_flags = np.zeros((steps, count), bool)
        self._traj = np.zeros((steps, count), np.int64)
        self._episodes = np.zeros(count, np.int64)

    def collect_batch(self) -> int:
        act, step = self._actor, self._pool.step
        rows, rewards = self._single, self._reward
        terminated, truncated = self._terminated, self._truncated
        self._rows[0] = self._rows[self._steps]
        with torch.no_grad():
            act.begin(self._tensor_rows)
            for t in range(self._steps):
                observed, reward, dead, late, _ = step(act(t))
                rows[t + 1][...] = observed
                rewards[t] = reward
                terminated[t] = dead
                truncated[t] = late
            act.finish()
        return self._finish()

    def _finish(self) -> int:
        self._next[...] = self._rows[1:]
        np.logical_or(self._terminated, self._truncated, out=self._done)
        self._mask[0] = self._mask[self._steps]
        np.logical_not(self._done, out=self._mask[1:])
        resets = np.cumsum(~self._mask[:-1], 0)
        np.add(resets, self._episodes, out=self._traj)
        self._episodes = self._traj[-1].copy()
        self._traj *= len(self._episodes)
        self._traj += np.arange(len(self._episodes))
        return int(np.count_nonzero(self._mask[:-1]))

    def fields(self) -> Fields:
        flat = {
            **{name: value.numpy() for name, value in self._actor.outputs.items()},
            "observation": self._rows[:-1],
            "next.observation": self._next,
            "next.reward": self._reward,
            "next.done": self._done,
            "next.terminated": self._terminated,
            "next.truncated": self._truncated,
            "done": self._root_flags,
            "terminated": self._root_flags,
            "truncated": self._root_flags,
            "collector.traj_ids": self._traj,
            "mask": self._mask[:-1],
        }
        return {name: value.swapaxes(0, 1).copy() for name, value in flat.items()}

    def close(self) -> None:
        self._pool.close()
