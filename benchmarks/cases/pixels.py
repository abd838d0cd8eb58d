"""The workload of TorchRL's public asynchronous benchmarks: pixels, a CNN and slow resets.

Eight environments show 3 x 84 x 84 bytes and take 1 ms per step. The policy is a CNN with two
layers of 256 units, with one thread. Episodes take 200 steps; in the second case they take 16, and
each reset of the first environment takes 200 ms. Source: ``benchmarks/ASYNC_BENCHMARKS.md`` of
TorchRL's repository. The code here is ours.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from benchmarks.harness import Case, Reference, System
from benchmarks.systems import ours

ENVS, FRAMES, ACTIONS = 8, 256, 6
STEP_S, RESET_S = 1e-3, 0.2
CHUNK = 32
"""Steps of a rollout: each environment's share of a batch."""


def all_cases() -> list[Case]:
    """Return the case of equal environments, and that of one with slow resets."""
    references = [
        Reference("TorchRL AsyncBatchedCollector, process slots", torchrl_slots, 2.0),
        Reference("TorchRL AsyncBatchedCollector, queues", torchrl_queues, 2.0),
        Reference("TorchRL Collector over ParallelEnv", torchrl_parallel, 2.0),
        Reference("GleanRL, synchronous", synchronous),
        Reference("GleanRL, inference='workers'", with_copies),
    ]
    title = f"{ENVS} environments of pixels and 1 ms, CNN policy, one process per environment"
    return [
        Case(
            "pixels",
            title,
            partial(asynchronous, slow=False),
            _of(references, slow=False),
            stopped=True,
        ),
        Case(
            "pixels-slow-resets",
            f"{title}, one of them with resets of 200 ms",
            partial(asynchronous, slow=True),
            [
                Reference("the same without slow resets", partial(asynchronous, slow=False), 0.9),
                *_of(references, slow=True),
            ],
            stopped=True,
        ),
    ]


def _of(references: list[Reference], slow: bool) -> list[Reference]:
    return [Reference(r.name, partial(r.build, slow=slow), r.target) for r in references]


class Pixels(gym.Env[Any, Any]):
    """Shows noise, and takes its time."""

    observation_space = gym.spaces.Box(0, 255, (3, 84, 84), np.uint8)
    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self, length: int = 200, reset_s: float = 0.0) -> None:
        self._length, self._reset_s, self._steps = length, reset_s, 0
        self._frames = np.random.default_rng(0).integers(0, 256, (16, 3, 84, 84), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self._reset_s:
            time.sleep(self._reset_s)
        self._steps = 0
        return self._frames[0], {}

    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        self._steps += 1
        frame = self._frames[self._steps % len(self._frames)]
        return frame, 1.0, False, self._steps >= self._length, {}


class Network(nn.Module):
    """Acts greedily on pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 256)]
        layers += [nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, ACTIONS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        rows = observation.shape[:-3]
        logits = self.layers(observation.reshape(-1, 3, 84, 84).float() / 255)
        return logits.argmax(-1).reshape(rows)


def policy() -> TensorDictModule:
    """Return the policy."""
    return TensorDictModule(Network(), ["observation"], ["action"])


def makes(slow: bool) -> list[Any]:
    """Return a function per environment."""
    if not slow:
        return [Pixels] * ENVS
    return [partial(Pixels, 16, RESET_S), *[partial(Pixels, 16)] * (ENVS - 1)]


def asynchronous(slow: bool) -> System:
    """Return our asynchronous collector with one policy, in this process."""
    from gleanrl.collectors import AsyncBatchedCollector

    return ours.Batches(
        AsyncBatchedCollector(
            makes(slow),
            policy=policy(),
            frames_per_batch=FRAMES,
            total_frames=-1,
            transition_chunk_size=CHUNK,
        )
    )


def synchronous(slow: bool) -> System:
    """Return our synchronous collector with one policy."""
    return ours.over("process", "sync", makes(slow), policy(), FRAMES, inference="central")


def with_copies(slow: bool) -> System:
    """Return our asynchronous collector with a copy of the policy in each worker."""
    return ours.over("process", "async", makes(slow), policy(), CHUNK)


def torchrl_slots(slow: bool) -> System:
    """Return TorchRL's with the policy in a process, which its process slots ask for."""
    return _torchrl(slow, policy_factory=policy, transport="auto", transition_chunk_size=CHUNK)


def torchrl_queues(slow: bool) -> System:
    """Return TorchRL's with the policy in this process."""
    return _torchrl(slow, policy=policy())


def _torchrl(slow: bool, **options: Any) -> System:
    from torchrl.collectors import AsyncBatchedCollector

    collector = AsyncBatchedCollector(
        [partial(_wrapped, make) for make in makes(slow)],
        frames_per_batch=FRAMES,
        total_frames=-1,
        env_backend="multiprocessing",
        max_batch_size=ENVS,
        server_timeout=1e-3,
        **options,
    )
    return ours.Batches(collector)


def torchrl_parallel(slow: bool) -> System:
    """Return TorchRL's synchronous collector over its environments in processes."""
    from torchrl.collectors import Collector
    from torchrl.envs import ParallelEnv

    env = ParallelEnv(ENVS, [partial(_wrapped, make) for make in makes(slow)])
    return ours.Batches(Collector(env, policy(), frames_per_batch=FRAMES, total_frames=-1))


def _wrapped(make: Any) -> Any:
    from torchrl.envs import GymWrapper

    return GymWrapper(make(), categorical_action_encoding=True)
