"""Hand-written loops over single Gymnasium environments: what ours is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.actors import Actor
from benchmarks.envs import EnvFactory
from benchmarks.harness import Fields


class RawSteps:
    """``env.step`` and ``env.reset`` alone: actions were drawn before, nothing is stored."""

    def __init__(self, factories: Sequence[EnvFactory], steps: int) -> None:
        self._envs = [factory() for factory in factories]
        for env in self._envs:
            env.reset()
        self._frames = steps * len(self._envs)
        shape = (8, steps, len(self._envs))
        high = self._envs[0].action_space.n  # type: ignore[attr-defined]
        self._plans = np.random.default_rng(0).integers(high, size=shape).tolist()
        self._batch = 0

    def collect_batch(self) -> int:
        plan = self._plans[self._batch % len(self._plans)]
        self._batch += 1
        pairs = [(env, env.step) for env in self._envs]
        for actions in plan:
            for (env, step), action in zip(pairs, actions, strict=True):
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    env.reset()
        return self._frames

    def fields(self) -> Fields:
        return {}

    def close(self) -> None:
        for env in self._envs:
            env.close()


class HandLoop:
    """The tightest loop we can write that delivers the fields of a dense batch.

    Memory is ``[T, P, ...]`` (rows in one piece) and reused. Observations are written once per step
    into ``T + 1`` rows; ``next.observation`` is those rows shifted by one, copied in bulk, with the
    few final observations put back.
    """

    def __init__(self, factories: Sequence[EnvFactory], steps: int, actor: Actor) -> None:
        self._envs = [factory() for factory in factories]
        self._moves = [env.step for env in self._envs]
        self._actor = actor
        self._steps, count = steps, len(self._envs)
        self._frames = steps * count
        first = np.stack([env.reset()[0] for env in self._envs])
        kind = np.dtype(np.float32) if first.dtype == np.float64 else first.dtype
        rows = np.zeros((steps + 1, *first.shape), kind)
        rows[steps] = first
        self._rows = rows
        self._single = list(rows)
        # Rows with environment and first observation dimension merged, as `concatenate` wants them.
        self._flat = list(rows.reshape(steps + 1, -1, *first.shape[2:]))
        self._tensor_rows = torch.from_numpy(rows).unbind()
        self._next = np.zeros((steps, *first.shape), kind)
        self._reward = np.zeros((steps, count), np.float32)
        self._flags = np.zeros((3, steps, count), bool)
        self._root_flags = np.zeros((steps, count), bool)
        self._traj = np.zeros((steps, count), np.int64)
        self._ids = np.arange(count)
        self._finals: list[tuple[int, int, Any]] = []

    def collect_batch(self) -> int:
        act, moves, flat, concatenate = self._actor, self._moves, self._flat, np.concatenate
        rewards: list[Any] = []
        self._finals = []
        self._rows[0] = self._rows[self._steps]
        self._flags[...] = False
        self._traj[...] = self._ids
        with torch.no_grad():
            act.begin(self._tensor_rows)
            for t in range(self._steps):
                results = [move(action) for move, action in zip(moves, act(t), strict=False)]
                observed, reward, terminated, truncated, _ = zip(*results, strict=False)
                concatenate(observed, out=flat[t + 1], casting="same_kind")
                rewards.append(reward)
                if True in terminated or True in truncated:
                    self._end(t, terminated, truncated)
            act.finish()
        self._reward[...] = rewards
        self._next[...] = self._rows[1:]
        for t, env, final in self._finals:
            self._next[t, env] = final
        return self._frames

    def _end(self, t: int, terminated: Sequence[bool], truncated: Sequence[bool]) -> None:
        row = self._single[t + 1]
        for env, (dead, late) in enumerate(zip(terminated, truncated, strict=True)):
            if not (dead or late):
                continue
            self._flags[:, t, env] = True, dead, late
            self._finals.append((t, env, row[env].copy()))
            row[env] = self._envs[env].reset()[0]
            self._ids[env] += len(self._envs)
            self._traj[t + 1 :, env] = self._ids[env]

    def fields(self) -> Fields:
        done, terminated, truncated = self._flags
        flat = {
            **{name: value.numpy() for name, value in self._actor.outputs.items()},
            "observation": self._rows[:-1],
            "next.observation": self._next,
            "next.reward": self._reward,
            "next.done": done,
            "next.terminated": terminated,
            "next.truncated": truncated,
            "done": self._root_flags,
            "terminated": self._root_flags,
            "truncated": self._root_flags,
            "collector.traj_ids": self._traj,
        }
        return {name: value.swapaxes(0, 1).copy() for name, value in flat.items()}

    def close(self) -> None:
        for env in self._envs:
            env.close()
