"""Stand-ins for Gymnasium environments, and for workers of TorchRL's ``ParallelEnv``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase


class Tape(gym.Env[Any, Any]):
    """Stands in for an environment: it returns made-up data and keeps the actions."""

    def __init__(self, env: gym.Env[Any, Any], seed: int = 0) -> None:
        self.observation_space = copy.deepcopy(env.observation_space)
        self.action_space = copy.deepcopy(env.action_space)
        self.metadata, self.render_mode = env.metadata, env.render_mode
        self._seed = seed
        self.log: list[Any] = []
        self.rewind()
        self.ale = self

    def rewind(self) -> list[Any]:
        """Return the actions, and begin anew: with the same data, and without actions."""
        log, self.log = self.log, []
        self.observation_space.seed(self._seed)
        self._draw = np.random.default_rng(self._seed)
        return log

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


class TapedWorker:
    """Stands in for a worker, and for the channel to it: it carries out commands at once."""

    def __init__(self, seed: int) -> None:
        """Make up data, other ones for each ``seed``."""
        self._draw = np.random.default_rng(seed)
        self.log: list[Any] = []

    def serve(self, memory: TensorDictBase, done: bytearray, index: int) -> None:
        """Have ``memory`` in common with the environment; number ``index`` in ``done``."""
        self._root = {key: one for key, one in memory.items(True, True) if key[0] != "next"}
        self._after = dict(memory.get("next").items(True, True))
        self._done, self._index = done, index

    def is_alive(self) -> bool:
        return True

    def send(self, command: tuple[str, Any]) -> None:
        """Keep the command and all that a worker can read; make up its results."""
        if command[0] == "step_and_maybe_reset":
            self.send(("step", command[1]))
            if self._after["done"].any():
                self.send(("reset", (["_reset"], {})))
            return
        read = {k: v.numpy().tobytes() for k, v in self._root.items() if k != "_reset"}
        self.log.append((command, read))
        steps = command[0] == "step"
        for key, root in self._root.items():
            if key in self._after:
                shown = self._after[key] if steps else root
                shown.copy_(self._made_up(shown))
        if steps:
            self._after["reward"].copy_(torch.tensor(float(self._draw.integers(-2, 3)) / 2))
            for key, likely in (("terminated", 0.2), ("truncated", 0.1)):
                self._after[key].fill_(bool(self._draw.random() < likely))
            self._after["done"].copy_(self._after["terminated"] | self._after["truncated"])
            for key in self._root.keys() & self._after.keys():
                self._root[key].copy_(self._after[key])
        else:
            for key in ("done", "terminated", "truncated"):
                self._root[key].zero_()
        self._done[self._index] = 1

    def send_bytes(self, message: bytes) -> None:
        """Carry out the command in ``message``."""
        self.send(ForkingPickler.loads(message))

    def _made_up(self, like: torch.Tensor) -> torch.Tensor:
        shape, drawn = tuple(like.shape), self._draw
        if like.is_floating_point():
            return torch.from_numpy(np.asarray(drawn.normal(size=shape) * 3)).to(like.dtype)
        made = torch.from_numpy(np.asarray(drawn.integers(0, 2, shape)))
        made.view(-1)[:1] = 1  # a mask allows some action
        return made.to(like.dtype)
