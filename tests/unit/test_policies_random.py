"""Acting at random."""

import gymnasium as gym
import pytest
import torch
from policies_rig import layout, make
from tensordict import TensorDict
from torchrl import data as rl
from torchrl import modules
from torchrl.envs import GymEnv as TheirGymEnv

from gleanrl import Collector, PolicyError
from gleanrl.data import Bounded, Categorical, Composite
from gleanrl.policies import RandomPolicy

FLOATS = ((3,), torch.float32)
SPEC = Bounded(-1.0, 1.0, (3,), dtype=torch.float32)


@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        Composite({"action": SPEC}),
        rl.Bounded(-1.0, 1.0, (3,)),
        rl.Composite(action=rl.Bounded(-1, 1, (3,))),
    ],
    ids=["leaf", "composite", "torchrl-leaf", "torchrl-composite"],
)
def test_with_a_spec_it_draws_what_its_calls_draw(spec, batch):
    env, policy = layout(batch, FLOATS), RandomPolicy(spec)
    with make(policy, env) as collector:
        torch.manual_seed(0)
        got = next(iter(collector)).clone()
    torch.manual_seed(0)
    for td in got.unbind(-1):
        drawn = policy(TensorDict({"observation": td["observation"]}, batch))
        assert torch.equal(td["action"], drawn["action"])


def test_a_spec_of_the_whole_batch_is_drawn_from_once():
    env = layout((5,), FLOATS)
    whole = Bounded(-1.0, 1.0, (5, 3), dtype=torch.float32)
    with make(RandomPolicy(whole), env) as collector:
        torch.manual_seed(0)
        action = next(iter(collector))["action"][:, 0].clone()
    torch.manual_seed(0)
    assert torch.equal(action, whole.rand())
    torch.manual_seed(0)
    assert torch.equal(action, RandomPolicy(whole)(TensorDict({}, [5]))["action"])


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (
            RandomPolicy(Categorical(2)),
            r"as torch.int64 of shape \(\); the environment wants torch.float32",
        ),
        (RandomPolicy(Bounded(-1, 1, (2,), dtype=torch.float32)), r"of shape \(2,\)"),
        (RandomPolicy(SPEC, "move"), "writes 'move'; the environment reads 'action'"),
        (RandomPolicy(Composite({"move": SPEC})), "has no 'action'"),
    ],
)
def test_a_spec_that_does_not_fit_is_named(policy, match):
    with pytest.raises(PolicyError, match=match):
        make(policy, layout((5,), FLOATS))


def test_a_policy_without_a_spec_cannot_be_called():
    with pytest.raises(PolicyError, match="has no action_spec to draw from"):
        RandomPolicy()(TensorDict({}, []))


def test_the_action_key_is_respected():
    td = RandomPolicy(SPEC, ("agents", "action"))(TensorDict({}, [2]))
    assert td["agents", "action"].shape == (2, 3)


# -- TorchRL's -------------------------------------------------------------------------------------


def cart_pole():
    return gym.make("CartPole-v1")


@pytest.mark.parametrize("env", [cart_pole, lambda: TheirGymEnv("CartPole-v1")])
def test_torchrls_random_policy_draws_from_the_environment(env):
    policy = modules.RandomPolicy()
    with Collector(env, policy, frames_per_batch=64) as collector:
        batch = collector.next()
    assert 0 < batch["action"].float().mean() < 1
    if env is not cart_pole:
        assert policy.action_spec["action"].is_in(batch["action"][0])


def test_torchrls_random_policy_keeps_a_spec_it_has():
    env = TheirGymEnv("CartPole-v1", categorical_action_encoding=True)
    policy = modules.RandomPolicy(env.full_action_spec)
    Collector(env, policy, frames_per_batch=4).shutdown()
    assert policy.action_spec == env.full_action_spec
