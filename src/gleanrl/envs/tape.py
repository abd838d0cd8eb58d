"""A stand-in for a Gymnasium environment."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np


class Tape(gym.Env[Any, Any]):
    """Stands in for an environment: it returns made-up data and keeps the actions."""

    def __init__(self, env: gym.Env[Any, Any], seed: int = 0) -> None:
        """Have the spaces of ``env``."""
        self.observation_space = copy.deepcopy(env.observation_space)
        self.action_space = copy.deepcopy(env.action_space)
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self.observation_space.seed(seed)
        self._draw = np.random.default_rng(seed)
        self.log: list[Any] = []
        self.ale = self

    def lives(self) -> int:
        """Return what an Atari environment would; ``unwrapped.ale`` is this object."""
        return 3 - len(self.log) // 2 % 4

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.log.append("reset")
        return self._made_up(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        value = np.asarray(action)
        self.log.append((type(action), value.dtype, value.shape, value.tobytes()))
        number = self._draw.normal() * 3
        rewards: Sequence[Any] = (number, float(number), 1, 0, 0.0, -0.0, 1.0)
        reward = rewards[int(self._draw.integers(len(rewards)))]
        late = bool(self._draw.random() < 0.1)
        dead = bool(self._draw.random() < 0.2)
        return self._made_up(), reward, dead, late, {}

    def _made_up(self) -> Any:
        shown = self.observation_space.sample()
        for one in shown.values() if isinstance(shown, dict) else ():
            if isinstance(one, np.ndarray) and one.dtype in (np.int8, np.bool_):
                one.reshape(-1)[:1] = 1  # a mask allows some action
        return shown
