"""Environments whose every observation says where it belongs."""

from __future__ import annotations

import multiprocessing

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorWrapper

# What the processes of Gymnasium's asynchronous environments would each import by themselves.
multiprocessing.set_forkserver_preload(["gleanrl.collectors", "hypothesis"])


class Clock(gym.Env):
    """Shows ``[number, episode, step]``; episode ``k`` lasts ``lengths[k % len(lengths)]`` steps.

    Every second episode is truncated, the others terminate.
    """

    observation_space = gym.spaces.Box(0, 1e6, (3,), np.float32)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, number=0, lengths=(3,)):
        self.number, self.lengths = number, lengths
        self.episode, self.t = -1, 0

    def _show(self):
        now = np.array([self.number, self.episode, self.t], np.float32)
        return now, {"left": float(self.lengths[self.episode % len(self.lengths)] - self.t)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._show()

    def step(self, action):
        self.t += 1
        now, info = self._show()
        over = info["left"] == 0
        late = over and self.episode % 2 == 1
        return now, float(action) + 10 * self.t, over and not late, late, info


class Plain(VectorWrapper):
    """Hides that the environments behind it can be reset one by one."""


def clocks(lengths, mode="NextStep", wrap=False, copy=True):
    """Return one `Clock` per entry of ``lengths``, vectorised."""
    env = SyncVectorEnv(
        [lambda i=i, each=each: Clock(i, each) for i, each in enumerate(lengths)],
        autoreset_mode=mode,
        copy=copy,
    )
    return Plain(env) if wrap else env
