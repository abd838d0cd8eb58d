"""Tensors in shared memory that environments and policies use stay shared with workers."""

import sys
from functools import partial

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymEnv as TorchRLGymEnv
from torchrl.envs import TransformedEnv, VecNorm

from gleanrl import MultiSyncCollector, ParallelEnv
from gleanrl.envs import EnvCreator, GymEnv

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as for classes of a script


class Level(gym.Env):
    """Shows ``level`` as its observation, and counts its steps in ``steps``."""

    observation_space = gym.spaces.Box(-9, 9, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, level, steps):
        self.level, self.steps = level, steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def _seen(self):
        return np.array([float(self.level)], np.float32)

    def step(self, action):
        self.steps += 1
        return self._seen(), 0.0, False, False, {}


def made(level, steps):
    return GymEnv(Level(level, steps))


def factories(how, level, steps):
    make = [partial(made, level, part) for part in steps]
    if how == "EnvCreator":
        return [EnvCreator(one) for one in make]
    if how == "ParallelEnv":
        return [ParallelEnv(1, [one]) for one in make]
    return [lambda one=one: one() for one in make]


@pytest.mark.parametrize("backend", ["process", "inline"])
@pytest.mark.parametrize("how", ["function", "EnvCreator", "ParallelEnv"])
def test_tensors_in_shared_memory_stay_shared(how, backend, tidy_workers):
    shared = torch.zeros(5, dtype=torch.float64).share_memory_()
    level, steps = shared[1], shared[2:4]  # views stay views of the same memory
    options = {"frames_per_batch": 8, "total_frames": 16, "backend": backend}
    with MultiSyncCollector(factories(how, level, steps), None, **options) as collector:
        for number, batch in enumerate(collector):
            assert (batch["next", "observation"] == number).all()
            level += 1
    assert shared.tolist() == [0, 2, 8, 8, 0]


class Biased(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.ones(1)), scale
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, observation):
        self.calls += 1
        return observation[..., :1] * 0 + self.bias * self.scale


def test_weights_in_shared_memory_are_copied_since_those_in_a_worker_are_of_one_version():
    scale = torch.ones(1).share_memory_()
    module = Biased(scale).share_memory()
    policy = TensorDictModule(module, ["observation"], ["action"])
    env = partial(gym.make, "Pendulum-v1")
    options = {"frames_per_batch": 8, "total_frames": 24}
    with MultiSyncCollector([env] * 2, policy, **options) as collector:
        seen = []
        for batch in collector:
            seen.append(batch["action"].unique().tolist())
            module.bias.data *= 100  # was not sent
            scale /= 2  # is no weight
    assert seen == [[1.0], [0.5], [0.25]]
    assert module.calls.item() == 0


def test_statistics_of_a_vec_norm_are_those_of_all_workers():
    parts = {"sum": torch.zeros(3), "ssq": torch.zeros(3), "count": torch.zeros(1)}
    held = TensorDict({f"observation_{name}": part for name, part in parts.items()})
    held.share_memory_()

    def make():
        norm = VecNorm(in_keys=["observation"], shared_td=held, new_api=False)
        return TransformedEnv(TorchRLGymEnv("Pendulum-v1"), norm)

    counts = [0.0]
    with MultiSyncCollector([make] * 2, None, frames_per_batch=40, total_frames=80) as collector:
        for _ in collector:
            counts.append(held["observation_count"].item())
    # Both workers add to it without a lock: an addition of theirs may be lost.
    assert all(20 < more <= 60 for more in np.diff(counts))


def test_a_shared_tensordict_stays_shared():
    counts = TensorDict({"a": {"b": torch.zeros(2)}}).share_memory_()

    def make(index):
        return GymEnv(Level(0.0, counts["a", "b"][index]))

    factories = [partial(make, 0), partial(make, 1)]
    with MultiSyncCollector(factories, None, frames_per_batch=8, total_frames=16) as collector:
        for _ in collector:
            pass
    assert counts["a", "b"].tolist() == [8, 8]


@pytest.mark.parametrize(
    "given",
    [
        torch.eye(2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).share_memory_().conj(),
        torch.ones(0).share_memory_(),
        torch.ones(2).share_memory_().requires_grad_(),
    ],
    ids=["sparse", "conjugate", "empty", "leaf"],
)
def test_tensors_that_are_more_than_memory_are_copied(given):
    def make(other=given):
        assert (other.layout, other.shape) == (given.layout, given.shape)
        return gym.make("CartPole-v1")

    with MultiSyncCollector([make], None, frames_per_batch=4, total_frames=4) as collector:
        assert len(list(collector)) == 1
