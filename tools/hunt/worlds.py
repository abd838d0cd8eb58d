"""Environments and policies of which every frame tells its origin.

An observation holds the environment's number, its episode, the step inside, and the action before.
An action holds the weights' tag, which is their version, and a function of the observation. So a
frame can be checked by arithmetic alone, see `tools.hunt.checks`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

NUMBER, EPISODE, STEP, TAG, ECHO, NOISE = range(6)
"""Places in an observation: the last action is at TAG and ECHO."""
_ENVS_PER_WORKER = 16
_counters: defaultdict[int, Any] = defaultdict(count)
"""Per worker, how many environments were made for it in this process."""


def mixed(number: int, episode: int) -> int:
    """Return a whole number that looks random."""
    return (number * 2654435761 + episode * 40503 + 12345) % 1009


def length(number: int, episode: int) -> int:
    """Return how many steps an episode has: one to nine."""
    return 1 + mixed(number, episode) % 9


def terminates(number: int, episode: int) -> bool:
    """Tell whether an episode ends by termination, else by truncation."""
    return mixed(number, episode) % 2 == 0


def reward(number: int, step: int, tag: float) -> float:
    """Return the reward of the step that is taken after ``step`` others."""
    return 64.0 * number + step + 4096.0 * tag


class Certified(gym.Env[Any, Any]):
    """Shows all that it knows of itself.

    Args:
        number: Its own.
        kind: ``"fresh"`` observations, one ``"reused"`` buffer, one buffer ``"shared"`` by all, or
            ``"dict"``.
        draws: Whether it draws from the global generators of torch and numpy at each step.
    """

    action_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    _shared = np.zeros(6, np.float32)

    def __init__(self, number: int, kind: str, draws: bool) -> None:
        self.number, self.kind, self.draws = number, kind, draws
        self.episode, self.steps = -1, 0
        self._own = np.zeros(6, np.float32)
        box = gym.spaces.Box(-np.inf, np.inf, (6,), np.float32)
        self.observation_space = gym.spaces.Dict(observation=box) if kind == "dict" else box

    def _show(self, action: Any) -> Any:
        noise = float(torch.rand(())) + np.random.randn() if self.draws else 0.0
        memory = {"reused": self._own, "shared": Certified._shared}.get(self.kind)
        shown = np.zeros(6, np.float32) if memory is None else memory
        shown[:] = self.number, self.episode, self.steps, action[0], action[1], noise
        return {"observation": shown} if self.kind == "dict" else shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self._show((0.0, 0.0)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        paid = reward(self.number, self.steps, float(action[0]))
        self.steps += 1
        over = self.steps >= length(self.number, self.episode)
        dies = terminates(self.number, self.episode)
        return self._show(action), paid, over and dies, over and not dies, {}


def make_one(worker: int, kind: str, draws: bool) -> gym.Env[Any, Any]:
    """Make the next environment of a worker; numbers differ over all workers."""
    return Certified(worker * _ENVS_PER_WORKER + next(_counters[worker]), kind, draws)


def start_counting() -> None:
    """Number environments from the beginning again."""
    _counters.clear()


def make_vector(
    worker: int, mode: str, envs: int, draws: bool
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make a vectorised environment."""
    members = [partial(make_one, worker, "fresh", draws)] * envs
    return gym.vector.SyncVectorEnv(members, autoreset_mode=gym.vector.AutoresetMode(mode))


class Acting(nn.Module):
    """Acts with its tag, and with a function of the observation; both are one linear layer."""

    def __init__(self, memory: bool = False, draws: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.memory, self.draws = memory, draws
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.weight[1, NUMBER], self.layer.weight[1, STEP] = 1.0, 16.0
            self.layer.bias.zero_()

    def tag(self, version: int) -> None:
        """Make weights of ``version``."""
        with torch.no_grad():
            self.layer.bias[0] = float(version)

    def forward(self, observation: torch.Tensor, hidden: torch.Tensor | None = None) -> Any:
        """Return the action; with memory also the steps since the reset, else perhaps a draw."""
        action = self.layer(observation)
        if hidden is not None:
            return action, hidden + 1
        return (action, torch.rand(observation.shape[:-1])) if self.draws else action


def make_policy(kind: str) -> tuple[Any, Acting]:
    """Return a policy, and the module in it that has the weights."""
    acting = Acting(kind == "recurrent", kind == "drawing")
    if kind == "linear":
        return TensorDictModule(_Plain(acting), ["observation"], ["action"]), acting
    if kind == "module":
        return acting, acting
    if kind == "recurrent":
        keys = ["observation", "hidden"], ["action", ("next", "hidden")]
        policy = TensorDictModule(acting, *keys)
        policy.state_shapes = {"hidden": (1,)}
        return policy, acting
    outs = ["action", "drawn"] if kind == "drawing" else ["action"]
    return TensorDictModule(acting, ["observation"], outs), acting


class _Plain(nn.Sequential):
    """Library layers only, which the fast path records."""

    def __init__(self, acting: Acting) -> None:
        super().__init__(acting.layer)
