"""Environments of which every observation tells its origin.

An observation holds the environment's number, its episode, the step inside, and the action before.
An action holds the weights' tag, which is their version, and a function of the observation. So a
frame can be checked by arithmetic alone, see `tools.hunt.checks`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from pettingzoo import ParallelEnv
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.envs import EnvBase

NUMBER, EPISODE, STEP, TAG, ECHO, NOISE = range(6)
"""Places in an observation: the last action is at TAG and ECHO."""
AGENTS = ("agent_0", "agent_1")
GROUP = "agent"
_ENVS_PER_WORKER = 16
_counters: defaultdict[int, Any] = defaultdict(count)
"""Per worker, how many environments were made for it in this process."""
at_reset: list[Callable[[int], None]] = []
"""Called with the episode where one begins in this process; what they do is part of the world."""


def mixed(number: int, episode: int) -> int:
    """Return a whole number that looks random."""
    return (number * 2654435761 + episode * 40503 + 12345) % 1009


def length(number: int, episode: int) -> int:
    """Return how many steps an episode has: one to nine."""
    return 1 + mixed(number, episode) % 9


def terminates(number: int, episode: int) -> bool:
    """Tell whether an episode ends by termination, else by truncation."""
    return mixed(number, episode) % 2 == 0


def reward(number: int, step: int, tag: float, bonus: float = 0.0) -> float:
    """Return the reward of the step that is taken after ``step`` others."""
    return 64.0 * number + step + 4096.0 * tag + bonus


def label(number: int, episode: int, step: int) -> float:
    """Return the ``info`` entry of an observation."""
    return number + 32.0 * step + 1024.0 * episode


class Life:
    """The arithmetic of one environment, whatever its interface is.

    Args:
        number: Its own.
        draws: Whether it draws from the global generators of torch and numpy at each step.
        bonus: Added to each reward.
    """

    def __init__(self, number: int, draws: bool, bonus: float) -> None:
        self.number, self.draws, self.bonus = number, draws, bonus
        self.episode, self.steps = -1, 0

    def show(self, action: Any, number: int | None = None) -> tuple[float, ...]:
        """Return an observation after ``action``."""
        noise = float(torch.rand(())) + np.random.randn() if self.draws else 0.0
        number = self.number if number is None else number
        return number, self.episode, self.steps, float(action[0]), float(action[1]), noise

    def begin(self) -> None:
        """Begin the next episode."""
        self.episode += 1
        self.steps = 0
        for call in at_reset:
            call(self.episode)

    def step(self) -> tuple[bool, bool]:
        """Take a step; return whether it terminates or truncates the episode."""
        self.steps += 1
        over = self.steps >= length(self.number, self.episode)
        dies = terminates(self.number, self.episode)
        return over and dies, over and not dies


class Certified(gym.Env[Any, Any]):
    """A `Life` as a Gymnasium environment.

    Args:
        number: Its own.
        kind: ``"fresh"`` observations, one ``"reused"`` buffer, one buffer ``"shared"`` by all,
            ``"dict"``, or ``"double"`` precision.
        draws: See `Life`.
        bonus: See `Life`.
    """

    action_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float32)
    _shared = np.zeros(6, np.float32)

    def __init__(self, number: int, kind: str, draws: bool, bonus: float = 0.0) -> None:
        self.kind, self.life = kind, Life(number, draws, bonus)
        dtype = np.float64 if kind == "double" else np.float32
        self._own = np.zeros(6, dtype)
        box = gym.spaces.Box(-np.inf, np.inf, (6,), dtype)
        self.observation_space = gym.spaces.Dict(observation=box) if kind == "dict" else box

    def _show(self, action: Any) -> tuple[Any, dict[str, Any]]:
        memory = {"reused": self._own, "shared": Certified._shared}.get(self.kind)
        shown = self._own.copy() if memory is None else memory
        shown[:] = self.life.show(action)
        info = {"label": label(self.life.number, self.life.episode, self.life.steps)}
        return {"observation": shown} if self.kind == "dict" else shown, info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode."""
        super().reset(seed=seed)
        self.life.begin()
        return self._show((0.0, 0.0))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step."""
        life = self.life
        paid = reward(life.number, life.steps, float(action[0]), life.bonus)
        ends = life.step()
        observation, info = self._show(action)
        return observation, paid, *ends, info


class Agents(ParallelEnv):  # type: ignore[misc]
    """Two agents in one `Life`, numbered ``2 * number`` and the next."""

    def __init__(self, number: int, draws: bool, bonus: float = 0.0) -> None:
        self.life = Life(number, draws, bonus)
        self.metadata = {"name": "certified"}
        self.possible_agents = list(AGENTS)
        self.agents: list[str] = []
        self._box = gym.spaces.Box(-np.inf, np.inf, (6,), np.float32)

    def observation_space(self, agent: str) -> Any:
        """Return the space of observations."""
        return self._box

    def action_space(self, agent: str) -> Any:
        """Return the space of actions."""
        return Certified.action_space

    def _show(self, actions: Any) -> tuple[Any, Any]:
        shown, infos = {}, {}
        for at, agent in enumerate(AGENTS):
            number = 2 * self.life.number + at
            shown[agent] = np.array(self.life.show(actions[agent], number), np.float32)
            infos[agent] = {"label": label(number, self.life.episode, self.life.steps)}
        return shown, infos

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        """Begin the next episode."""
        self.agents = list(AGENTS)
        self.life.begin()
        return self._show(dict.fromkeys(AGENTS, (0.0, 0.0)))

    def step(self, actions: Any) -> Any:
        """Take a step."""
        life = self.life
        paid = {
            agent: reward(2 * life.number + at, life.steps, float(actions[agent][0]), life.bonus)
            for at, agent in enumerate(AGENTS)
        }
        terminated, truncated = life.step()
        shown, infos = self._show(actions)
        if terminated or truncated:
            self.agents = []
        ends = dict.fromkeys(AGENTS, terminated), dict.fromkeys(AGENTS, truncated)
        return shown, paid, *ends, infos


class Native(EnvBase):
    """A `Life` as an environment of TensorDicts; its ``wage`` is a model that episodes begin with.

    The wage at the reset is added to each reward of the episode.
    """

    def __init__(self, number: int, draws: bool, bonus: float = 0.0) -> None:
        super().__init__()
        gymnasium = Certified(number, "fresh", draws, bonus)
        self.life = gymnasium.life
        self._gymnasium, self._bonus = gymnasium, bonus
        self.wage = wage(0.0)
        like = _native_specs()
        self.observation_spec, self.action_spec, self.reward_spec, self.done_spec = like

    def _reset(self, tensordict: Any | None = None, **options: Any) -> TensorDictBase:
        self.life.bonus = self._bonus + float(self.wage.weight.detach())
        observation, _info = self._gymnasium.reset()
        ends = {name: torch.zeros(1, dtype=torch.bool) for name in ("done", "terminated")}
        ends["truncated"] = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"observation": torch.as_tensor(observation.copy()), **ends}, [])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        observation, paid, *ends, _info = self._gymnasium.step(tensordict["action"].cpu().numpy())
        flags = dict(zip(("terminated", "truncated"), ends, strict=True)) | {"done": any(ends)}
        shown = {name: torch.tensor([flag]) for name, flag in flags.items()}
        shown |= {
            "observation": torch.as_tensor(observation.copy()),
            "reward": torch.tensor([paid]),
        }
        return TensorDict(shown, [])

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(seed or 0)


def wage(value: float) -> nn.Linear:
    """Make the model that an environment adds to its rewards."""
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, value)
    return made


def _torchrl(env: gym.Env[Any, Any]) -> Any:
    """Return ``env`` as TorchRL's own wrapper shows it, with two of its transforms."""
    from torchrl.envs import GymWrapper, InitTracker, StepCounter, TransformedEnv

    return TransformedEnv(GymWrapper(env), StepCounter()).append_transform(InitTracker())


def _native_specs() -> tuple[Any, ...]:
    from gleanrl.data import Binary, Bounded, Composite, Unbounded

    names = ("done", "terminated", "truncated")
    ends: dict[str, Any] = {name: Binary(1, dtype=torch.bool) for name in names}
    observation = Composite(observation=Unbounded(shape=(6,)))
    action = Bounded(-1e6, 1e6, shape=(2,), dtype=torch.float32)
    return observation, action, Unbounded(shape=(1,)), Composite(**ends)


def _number(worker: int, folder: str | None) -> int:
    """Return the next number of a worker; all processes that share ``folder`` count as one."""
    if folder is None:
        return worker * _ENVS_PER_WORKER + int(next(_counters[worker]))
    for number in count():
        try:
            os.close(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number
    raise AssertionError


def make_one(
    worker: int, kind: str, draws: bool, folder: str | None = None, bonus: float = 0.0
) -> Any:
    """Make the next environment of a worker; numbers differ over all workers.

    Args:
        worker: Index of the worker.
        kind: A kind of `Certified`, ``"agents"``, ``"native"`` or ``"torchrl"``.
        draws: See `Life`.
        folder: Where processes that cannot know their index take numbers.
        bonus: See `Life`.
    """
    number = _number(worker, folder)
    if kind == "agents":
        return Agents(number, draws, bonus)
    if kind == "native":
        return Native(number, draws, bonus)
    if kind == "torchrl":
        return _torchrl(Certified(number, "fresh", draws, bonus))
    return Certified(number, kind, draws, bonus)


def start_counting() -> None:
    """Number environments from the beginning again."""
    _counters.clear()


def make_vector(
    worker: int, mode: str, envs: int, draws: bool, kind: str
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Make a vectorised environment."""
    members = [partial(make_one, worker, kind, draws)] * envs
    return gym.vector.SyncVectorEnv(members, autoreset_mode=gym.vector.AutoresetMode(mode))
