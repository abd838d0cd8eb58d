"""Making a collector calls a policy once and leaves no trace in it."""

import random
from collections import deque

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl import modules as rl
from torchrl.envs import GymEnv as TheirGymEnv

from gleanrl import Collector

CALLS = []
COUNT = 0


def make():
    return gym.make("CartPole-v1")


def collect(policy, env=make, frames=4):
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=frames)
    batch = [batch.clone() for batch in collector]
    collector.shutdown()
    return batch[0]


def state_of(policy, look):
    collector = Collector(make, policy, frames_per_batch=4, total_frames=4)
    before = look()
    for _ in collector:
        pass
    collector.shutdown()
    return before, look()


class Noise:
    """An object of the user's that is no module and cannot be called."""

    def __init__(self):
        self.calls = 0
        self.numbers = np.random.default_rng(0)


class Remembering(nn.Module):
    """Keeps count of its calls in every way."""

    shared = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("total", torch.zeros(()))
        self.count, self.list, self.dict, self.recent = 0, [], {}, deque(maxlen=2)
        self.nested = {"a": [0]}
        self.array, self.tensor = np.zeros(1), torch.zeros(1)
        self.data = TensorDict(sum=torch.zeros(1))
        self.noise = Noise()
        self.generator = torch.Generator().manual_seed(0)
        self.python = random.Random(0)

    def forward(self, tensordict):
        global COUNT
        COUNT += 1
        CALLS.append(1)
        Remembering.shared += 1
        self.total += 1
        self.count += 1
        self.list.append(self.count)
        self.dict[self.count] = self.count
        self.recent.append(self.count)
        self.nested["a"][0] += 1
        self.array += 1
        self.tensor += 1
        self.data["sum"] += 1
        self.noise.calls += 1
        self.noise.numbers.normal()
        torch.rand(1, generator=self.generator)
        self.python.random()
        with torch.no_grad():
            self.layer.weight += 1
        self.layer.weight.grad = torch.ones(1, 4)
        self.layer.weight.requires_grad_(False)
        self.extra = nn.Linear(1, 1)
        self.layer.register_forward_hook(lambda *a: None)
        self.eval()
        return tensordict.set("action", torch.zeros((), dtype=torch.int64))

    def look(self):
        return {
            "module": (COUNT, len(CALLS), Remembering.shared, self.count, self.list.copy()),
            "containers": (self.dict.copy(), list(self.recent), self.nested["a"][0]),
            "tensors": (self.total.item(), self.array.item(), self.tensor.item()),
            "tensordict": self.data["sum"].item(),
            "noise": (self.noise.calls, str(self.noise.numbers.bit_generator.state)),
            "generators": (self.generator.get_state().sum().item(), self.python.getstate()),
            "weight": (self.layer.weight.detach().sum().item(), self.layer.weight.requires_grad),
            "grad": self.layer.weight.grad is None,
            "modules": (len(list(self.modules())), len(self.layer._forward_hooks), self.training),
        }


@pytest.mark.parametrize("part", Remembering().look())
def test_nothing_shows_that_a_module_was_called(part):
    policy = Remembering()
    start = policy.look()[part]
    before, after = state_of(policy, lambda: policy.look()[part])
    assert before == start
    assert after != start


def test_nothing_shows_that_a_function_was_called():
    count, calls = 0, []

    def policy(tensordict):
        nonlocal count
        count += 1
        calls.append(count)
        policy.seen = getattr(policy, "seen", 0) + 1
        return tensordict.set("action", torch.tensor(0))

    before, after = state_of(policy, lambda: (count, list(calls), getattr(policy, "seen", 0)))
    assert before == (0, [], 0)
    assert after == (4, [1, 2, 3, 4], 4)


def test_nothing_shows_that_a_method_or_an_object_was_called():
    class Counting:
        def __init__(self):
            self.calls = 0

        def act(self, tensordict):
            self.calls += 1
            return tensordict.set("action", torch.tensor(self.calls % 2))

        __call__ = act

    for policy in (Counting(), Counting().act):
        owner = getattr(policy, "__self__", policy)
        assert state_of(policy, lambda one=owner: one.calls) == (0, 4)


def test_containers_and_tensors_stay_the_same_objects():
    policy = Remembering()
    held = [vars(policy), policy.list, policy.nested["a"], policy.data, policy.layer.weight]
    Collector(make, policy, frames_per_batch=4, total_frames=4).shutdown()
    now = [vars(policy), policy.list, policy.nested["a"], policy.data, policy.layer.weight]
    assert all(one is other for one, other in zip(held, now, strict=True))


def test_what_cannot_be_copied_is_left_alone():
    class Refusing(dict):
        def copy(self):
            raise RuntimeError

        def items(self):
            raise RuntimeError

        __iter__ = keys = values = items

    policy = Remembering()
    policy.odd = Refusing(a=1)
    policy.stream = iter([1, 2])
    before, _ = state_of(policy, lambda: policy.count)
    assert before == 0


# -- specs that a policy lacks ---------------------------------------------------------------------


@pytest.mark.parametrize("env", [make, lambda: TheirGymEnv("CartPole-v1")], ids=["ours", "theirs"])
def test_torchrls_random_policy_draws_from_the_environment(env):
    policy = rl.RandomPolicy()
    batch = collect(policy, env, frames=64)
    assert 0 < batch["action"].float().mean() < 1
    if env is not make:
        assert policy.action_spec["action"].is_in(batch["action"][0])


def test_torchrls_random_policy_keeps_a_spec_it_has():
    env = TheirGymEnv("CartPole-v1", categorical_action_encoding=True)
    policy = rl.RandomPolicy(env.full_action_spec)
    collect(policy, lambda: TheirGymEnv("CartPole-v1", categorical_action_encoding=True))
    assert policy.action_spec == env.full_action_spec
