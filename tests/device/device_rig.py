"""Environments and policies that run on any device; workers import this.

Tests use CUDA where there is a CUDA device, else the stand-in device.
"""

import random

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn

from gleanrl.envs import GymEnv

ON = "cuda" if torch.cuda.is_available() else "standin"
SECOND = f"{ON}:1"
DEVICES = torch.cuda.device_count() or 2


def make(kind, *args, **kwargs):
    """Call ``kind``: CUDA is in every process; `standin.make` brings the stand-in."""
    return kind(*args, **kwargs)


def skip_unless_comparable(policy, options):
    """Skip a test of data that this machine's device cannot give as the CPU does."""
    if ON == "cuda" and policy == "sampling":
        pytest.skip("CUDA draws other numbers than the CPU")
    if DEVICES == 1 and SECOND in str(options):
        pytest.skip("there is one device only")


class Walk(gym.Env):
    """A point that two actions push to and fro; episodes end after three to eight steps."""

    observation_space = gym.spaces.Box(-100, 100, (2,), dtype="float32")
    action_space = gym.spaces.Discrete(2)

    def __init__(self, interruptor=None, at=5):
        self.interruptor, self.at, self.steps = interruptor, at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.random(2, dtype="float32")
        self.left = int(self.np_random.integers(3, 9))
        return self.x.copy(), {}

    def step(self, action):
        self.steps += 1
        if self.interruptor is not None and self.steps % self.at == 0:
            self.interruptor.stop_collection()
        self.left -= 1
        self.x = self.x[::-1] * 0.9 + (0.1 if action else -0.1)
        return self.x.copy(), float(self.x.sum()), self.left == 0, False, {}


def several():
    """Return a vector environment that resets in its next step."""
    return gym.vector.SyncVectorEnv([Walk] * 3)


def at_once():
    """Return a vector environment that resets in the same step."""
    return gym.vector.SyncVectorEnv([Walk] * 3, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)


def tensordicts():
    """Return an environment with TensorDict methods, whose data can be on any device."""
    return GymEnv(Walk(), device="cpu")


def net():
    """Return a policy that takes the better action; each call changes its buffers."""
    torch.manual_seed(0)
    layers = nn.Linear(2, 8), Drift(), nn.Tanh(), nn.Linear(8, 2)
    values = TensorDictModule(nn.Sequential(*layers), ["observation"], ["values"])
    return TensorDictSequential(values, TensorDictModule(Best(), ["values"], ["action"]))


class Drift(nn.Module):
    """Counts its calls in a buffer, which it adds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(8))

    def forward(self, x):
        self.calls.add_(0.1)
        return x + self.calls


class Best(nn.Module):
    """Takes the best."""

    def forward(self, values):
        return values.argmax(-1)


def sampling():
    """Return a policy that draws its actions."""
    torch.manual_seed(0)
    logits = TensorDictModule(nn.Linear(2, 2), ["observation"], ["logits"])
    draw = ProbabilisticTensorDictModule(
        ["logits"],
        ["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return TensorDictSequential(logits, draw)


def recurrent():
    """Return a policy with a hidden state."""
    torch.manual_seed(1)
    cell = TensorDictModule(nn.GRUCell(2, 4), ["observation", "hidden"], [("next", "hidden")])
    values = TensorDictModule(nn.Linear(4, 2), [("next", "hidden")], ["values"])
    return TensorDictSequential(cell, values, TensorDictModule(Best(), ["values"], ["action"]))


def seeded():
    """Seed all streams, those of devices as well."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def check_same(there, here):
    """Raise `AssertionError` unless batches are the same, wherever they are.

    Bit for bit; floats that CUDA computed may be rounded otherwise.
    """
    from tests.zoo.laws import comparable, leaves, unlike

    assert len(there) == len(here)
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        pair = [comparable(batch.cpu().clear_device_()) for batch in (one, other)]
        if ON == "cuda":
            torch.testing.assert_close(*map(leaves, pair), rtol=1e-4, atol=1e-5)
        else:
            found = unlike(*pair)
            assert not found, f"batch {number}: {found}"
