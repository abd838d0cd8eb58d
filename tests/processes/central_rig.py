"""Environments and policies for tests of central inference; workers get them by value."""

import sys

import cloudpickle
import gymnasium as gym
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torchrl.envs import Compose, DoubleToFloat, RewardSum, StepCounter, TransformedEnv
from torchrl.envs import GymEnv as TorchRLGymEnv

from gleanrl import GymEnv
from gleanrl.data import Binary, Composite, Unbounded
from gleanrl.envs import EnvBase

# Workers that need not import this file start in milliseconds.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def transformed():
    env = TorchRLGymEnv("CartPole-v1", categorical_action_encoding=True)
    return TransformedEnv(env, Compose(StepCounter(9), RewardSum(), DoubleToFloat()))


class Counting(EnvBase):
    """Has TensorDict methods only; an episode takes five steps and rewards the action."""

    def __init__(self):
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((4,)), seen=Unbounded((2, 3)))
        self.action_spec = Unbounded(())
        self.reward_spec = Unbounded((1,))
        flags = ("done", "terminated", "truncated")
        self.done_spec = Composite({name: Binary(shape=(1,), dtype=torch.bool) for name in flags})
        self.count = 0

    def _reset(self, tensordict=None):
        self.count = 0
        return self._shown()

    def _shown(self):
        seen = torch.full((2, 3), float(self.count))
        return TensorDict({"observation": torch.full((4,), self.count * 0.1), "seen": seen})

    def _step(self, tensordict):
        self.count += 1
        done = torch.tensor([self.count == 5])
        result = {"reward": tensordict["action"].reshape(1).float() + self.count, "done": done}
        result |= {"terminated": done, "truncated": torch.zeros_like(done)}
        return self._shown().update(result)

    def _set_seed(self, seed, static=False):
        pass


ENVS = {
    "id": "CartPole-v1",
    "function": lambda: gym.make("Acrobot-v1", max_episode_steps=9),
    "TensorDict environment": lambda: GymEnv("CartPole-v1"),
    "TorchRL's, transformed": transformed,
}


def linear(inputs, outputs):
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def greedy(inputs, outputs):
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linear(inputs, outputs)

        def forward(self, observation):
            return self.net(observation).argmax(-1)

    return TensorDictModule(Greedy(), ["observation"], ["action"])


def sampling(inputs, outputs):
    return ProbabilisticTensorDictSequential(
        TensorDictModule(linear(inputs, outputs), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def recurrent(inputs, outputs):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(11)
            self.cell = nn.GRUCell(inputs, 5)
            self.head = nn.Linear(5, outputs)

        def forward(self, observation, hidden, is_init):
            hidden = torch.where(is_init, torch.zeros_like(hidden), hidden)
            hidden = self.cell(observation, hidden)
            return self.head(hidden).argmax(-1), hidden

    keys = ["observation", "hidden", "is_init"]
    return TensorDictModule(Recurrent(), keys, ["action", ("next", "hidden")])


def on_tensordicts(inputs, outputs):
    net = linear(inputs, outputs)

    def act(td):
        """Act on the number of calls for each environment, which only the TensorDict holds."""
        before = td.get("_calls", torch.full(td.shape, 7))
        assert torch.equal(before, td.get("calls", before))
        action = (net(td["observation"]).argmax(-1) + before) % outputs
        return td.set("action", action).set("calls", before + 1).set("_calls", before + 1)

    return act


def keeping(inputs, outputs):
    """Is called as it is in every step, because it keeps the TensorDict."""
    net, kept = linear(inputs, outputs), []

    def act(td):
        kept[:] = [td.set("action", net(td["observation"]).argmax(-1))]
        return td

    return act


POLICIES = {
    "random": lambda *sizes: None,
    "greedy": greedy,
    "sampling": sampling,
    "recurrent": recurrent,
    "on TensorDicts": on_tensordicts,
    "keeping": keeping,
}
SIZES = {"id": (4, 2), "function": (6, 3), "TensorDict environment": (4, 2)} | {
    "TorchRL's, transformed": (4, 2)
}


def same(one, two):
    keys = set(one.keys(True, True))
    return (
        one.shape == two.shape
        and keys == set(two.keys(True, True))
        and all(torch.equal(one[key], two[key]) for key in keys)
    )
