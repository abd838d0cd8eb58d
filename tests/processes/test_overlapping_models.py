"""Updates of a model and of a part of it, of which the later counts; of expanded tensors."""

import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from gleanrl import MultiAsyncCollector, MultiSyncCollector, WeightsError
from gleanrl.collectors import DistributedCollector


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        filled(self, 0.0)

    def forward(self, observation):
        row = observation.new_ones(*observation.shape[:-1], 1)
        return torch.zeros_like(row, dtype=torch.int64)[..., 0], self.first(row), self.second(row)


def filled(module, value):
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def policy():
    return TensorDictModule(Net(), ["observation"], ["action", "first", "second"])


def values_of(batch):
    return batch["first"].unique().tolist(), batch["second"].unique().tolist()


SYNC = {"frames_per_batch": 8, "sync": True}


@pytest.mark.parametrize(
    "make",
    [
        lambda policy: MultiSyncCollector(["CartPole-v1"] * 2, policy, frames_per_batch=8),
        lambda policy: DistributedCollector(["CartPole-v1"] * 2, policy, launcher="mp", **SYNC),
    ],
    ids=["processes", "nodes"],
)
def test_a_part_that_is_updated_after_the_whole_is_kept_in_every_worker(make):
    with make(policy()) as collector:
        for one in (1.0, 3.0):
            collector.update_policy_weights_(filled(policy(), one))
            part = filled(nn.Linear(1, 1, bias=False), one + 1)
            collector.update_policy_weights_(part, model_id="policy.module.first")
            assert values_of(collector.next()) == ([one + 1], [one])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the loss and of the replacement
def test_a_replacement_gets_updates_of_a_model_and_of_its_parts_in_their_order():
    with MultiSyncCollector(
        ["CartPole-v1"] * 2, policy(), frames_per_batch=8, on_failure="relaunch"
    ) as collector:
        first, second = (filled(nn.Linear(1, 1, bias=False), value) for value in (1.0, 3.0))
        collector.update_policy_weights_(first, model_id="policy.module.first")
        collector.update_policy_weights_(filled(policy(), 2.0))
        collector.update_policy_weights_(second, model_id="policy.module.second")
        os.kill(int(collector.stats("per_worker")["worker_1/pid"]), signal.SIGKILL)
        assert values_of(collector.next()) == ([2.0], [3.0])


class Gated(gym.Env):
    """Its fifth step waits until ``gate`` is opened."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, gate: torch.Tensor, steps: torch.Tensor) -> None:
        self.gate, self.steps = gate, steps

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        while self.steps >= 5 and not self.gate:
            pass
        return np.zeros(1, np.float32), 0.0, False, False, {}


def test_the_whole_that_is_updated_after_a_part_is_kept_by_a_worker_that_was_busy():
    gate, steps = torch.zeros(2, 1, dtype=torch.int64).share_memory_()
    collector = MultiAsyncCollector(
        [lambda: Gated(gate, steps)], policy(), frames_per_batch=4, track_policy_version=True
    )
    part = filled(nn.Linear(1, 1, bias=False), 1.0)
    with collector:
        collector.update_policy_weights_(part, model_id="policy.module.first")
        collector.next()
        while steps < 5:  # the worker is in its second rollout
            pass
        collector.update_policy_weights_(part, model_id="policy.module.first")
        collector.update_policy_weights_(filled(policy(), 2.0))
        gate.fill_(1)
        batch = collector.next()
        while batch["policy_version"].max() < 3:
            batch = collector.next()
        assert values_of(batch) == ([2.0], [2.0])


class Expanded(Net):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([value]).expand(3))

    def forward(self, observation):
        action, first, _ = super().forward(observation)
        return action, first, self.scale.expand(*action.shape, 3)


def test_an_expanded_tensor_is_updated_as_long_as_its_elements_are_equal():
    policy = TensorDictModule(Expanded(1.0), ["observation"], ["action", "first", "second"])
    with MultiSyncCollector(["CartPole-v1"] * 2, policy, frames_per_batch=8) as collector:
        policy.module.scale = torch.tensor([2.0]).expand(3)
        collector.update_policy_weights_()
        assert values_of(collector.next()) == ([0.0], [2.0])
        policy.module.scale = torch.arange(3.0)
        collector.update_policy_weights_()
        with pytest.raises(WeightsError, match="cannot hold different values"):
            collector.next()
