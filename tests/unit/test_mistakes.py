"""Mistakes of new users get an answer: what is wrong, the value, and what to do."""

import re

import gymnasium as gym
import pytest
import torch
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential
from torch import nn

from gleanrl import Collector, GleanError, MultiSyncCollector, PolicyError

FRAMES = {"frames_per_batch": 8, "total_frames": 80}


def collect(env="CartPole-v1", policy=None, **arguments):
    with Collector(env, policy, **{**FRAMES, **arguments}) as collector:
        return next(iter(collector))


def net(features=4, dtype=torch.float32):
    body = nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    choose = Mod(lambda logits: logits.argmax(-1), ["logits"], ["action"])
    return TensorDictSequential(Mod(body, ["observation"], ["logits"]), choose)


class Wide(gym.ObservationWrapper):
    """CartPole with float64 observations."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))
        inner = self.env.observation_space
        self.observation_space = gym.spaces.Box(inner.low, inner.high, dtype="float64")

    def observation(self, observation):
        return observation.astype("float64")


# -- policies that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "policy", "says"),
    [
        (
            "CartPole-v1",
            net(5),
            [
                "layer 'module.0.module.0', Linear(in_features=5",
                "got float32 of shape (4,)",
                "'observation': float32 of shape (4,)",
                "in_features=4",
                "mat1",
            ],
        ),
        ("CartPole-v1", nn.Linear(5, 2), ["Linear(in_features=5", "in_features=4"]),
        ("CartPole-v1", nn.Conv2d(3, 2, 3), ["Conv2d(3, 2", "reshape that before it"]),
        (
            "CartPole-v1",
            net(dtype=torch.float64),
            ["float64 weights", "Call policy.float()", "observation_dtype=torch.float64"],
        ),
        ("CartPole-v1", net(dtype=torch.float16), ["float16 weights", "Call policy.float()"]),
        (Wide, net(), ["Pass observation_dtype=torch.float32 to the collector"]),
        ("FrozenLake-v1", nn.Linear(1, 4), ["int64", "observation.to(torch.float32)"]),
        (
            "CartPole-v1",
            Mod(nn.Linear(4, 2), ["obs"], ["action"]),
            ["reads 'obs'", "it gives 'observation'", "did you mean 'observation'"],
        ),
        (
            "CartPole-v1",
            Mod(nn.Linear(4, 2), ["observation"], ["logits"]),
            ["did not write 'action'", "wrote 'logits'", "out_keys"],
        ),
        ("CartPole-v1", nn.Linear(4, 2), ["shape (2,)", "argmax", "Categorical"]),
        ("Pendulum-v1", nn.Linear(3, 2), ["mean and scale", "NormalParamExtractor"]),
        ("CartPole-v1", net().to("meta"), ["'meta' device", "to_empty"]),
    ],
)
def test_a_policy_that_does_not_fit_is_told_what_to_change(env, policy, says):
    with pytest.raises(PolicyError) as caught:
        collect(env, policy)
    for part in says:
        assert part in str(caught.value)


def test_a_layer_that_does_not_fit_is_named_by_workers_too():
    with pytest.raises(PolicyError, match=r"'module\.0\.module\.0', Linear\(in_features=5"):
        MultiSyncCollector(["CartPole-v1"] * 2, net(5), **FRAMES)


# -- arguments -------------------------------------------------------------------------------------


def vector():
    return gym.make_vec("CartPole-v1", num_envs=2)


@pytest.mark.parametrize("env", [vector, vector()], ids=["callable", "built"])
def test_num_envs_of_a_vector_environment_is_to_be_dropped(env):
    with pytest.raises(GleanError, match=re.escape("is 2 of them already: drop num_envs=")):
        collect(env, num_envs=3)


def test_batches_that_workers_cannot_share_out_are_rounded_with_a_warning_at_this_line():
    with pytest.warns(UserWarning, match=r"\(41\).*batches hold 42 frames") as caught:
        MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=41, backend="inline").shutdown()
    assert [warning.filename for warning in caught] == [__file__]
