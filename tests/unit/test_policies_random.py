"""Acting at random."""

import gymnasium as gym
import pytest
import torch
from policies_rig import layout, make
from tensordict import TensorDict
from torchrl import data as rl
from torchrl import modules
from torchrl.envs import GymEnv as TheirGymEnv
from torchrl.envs import GymWrapper
from torchrl_rig import assert_equal, collected

from gleanrl import Collector, PolicyError
from gleanrl.data import Bounded, Categorical, Composite
from gleanrl.modules import RandomPolicy

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
        (RandomPolicy(Categorical(2)), r"with shape \(5,\); the environment wants \(5, 3\)"),
        (
            RandomPolicy(Bounded(-1, 1, (3,), dtype=torch.float64)),
            "as torch.float64; the environment wants torch.float32",
        ),
        (RandomPolicy(SPEC, "move"), "did not write 'action'; it wrote 'move'"),
        (RandomPolicy(Composite({"move": SPEC})), "did not write 'action'; it wrote 'move'"),
    ],
)
def test_a_spec_that_does_not_fit_is_named(policy, match):
    with pytest.raises(PolicyError, match=match):
        make(policy, layout((5,), FLOATS))


def test_a_policy_without_a_spec_cannot_be_called():
    with pytest.raises(PolicyError, match="has no action_spec to draw from"):
        RandomPolicy()(TensorDict({}, []))


@pytest.mark.parametrize("given", [gym.spaces.Discrete(2), {"action": SPEC}, 2], ids=str)
def test_what_is_no_spec_is_refused_at_construction(given):
    with pytest.raises(TypeError, match=r"action_spec \(.*has no rand\(shape\): give"):
        RandomPolicy(given)


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


# -- specs and policies that are not what a library wrote ------------------------------------------

KINDS = pytest.mark.parametrize("kind", [modules.RandomPolicy, RandomPolicy])


def pendulum():
    return TheirGymEnv("Pendulum-v1")


class Halving(rl.Composite):
    def rand(self, shape=None):
        return super().rand(() if shape is None else shape) * 0.5


def patched(spec, rand):
    object.__setattr__(spec, "rand", rand)


def halving(kind):
    return kind(Halving(action=pendulum().action_spec))


def of_patched_composite(kind):
    policy = kind(rl.Composite(action=pendulum().action_spec))
    patched(policy.action_spec, lambda shape=None: policy.action_spec.zero())
    return policy


def of_patched_leaf(kind):
    policy = kind(pendulum().action_spec)
    patched(policy.action_spec, lambda shape=None: torch.full((1,), 0.3, dtype=torch.float64))
    return policy


def of_bound_rand(kind):
    policy = kind(pendulum().action_spec)
    patched(policy.action_spec, policy.action_spec.zero)
    return policy


@KINDS
@pytest.mark.parametrize("build", [halving, of_patched_composite, of_patched_leaf, of_bound_rand])
def test_a_spec_that_draws_in_its_own_way_is_drawn_from_by_calls(build, kind):
    explained = assert_equal(pendulum, actor=lambda: build(kind))
    assert all("RandomPolicy: called" in text for text in explained)


def to_subclass(env, collector):
    class Still(type(collector.policy)):
        def __call__(self, td):
            return super().__call__(td).update({"action": td["action"] * 0})

    collector.policy.__class__ = Still


def to_patched(env, collector):
    zero = collector.policy.action_spec.zero()
    patched(collector.policy.action_spec, lambda shape=None: zero.clone())


def to_noted(env, collector):
    collector.policy.note = 3


@KINDS
@pytest.mark.parametrize(
    ("change", "last"),
    [(to_subclass, "Still: called"), (to_patched, "called"), (to_noted, "tensor calls")],
)
def test_what_changes_between_rollouts_shows_in_the_next_one(change, last, kind):
    explained = assert_equal(pendulum, actor=lambda: kind(pendulum().action_spec), change=change)
    assert "RandomPolicy: tensor calls" in explained[0]
    assert last in explained[-1]


def test_a_spec_that_is_taken_away_is_named():
    def change(env, collector):
        collector.policy.action_spec = None

    with pytest.raises(PolicyError, match="has no action_spec to draw from"):
        collected(pendulum, fast=True, actor=lambda: RandomPolicy(SPEC_1), change=change)


SPEC_1 = rl.Bounded(-2.0, 2.0, (1,))
NARROW = rl.Bounded(-0.1, 0.1, (1,))


class Narrows(gym.Wrapper):
    """Narrows the spec of ``policy`` in its third step once it is armed."""

    policy, left = None, 3

    def step(self, action):
        if self.policy is not None:
            self.left -= 1
            if self.left == 0:
                self.policy.action_spec = NARROW
        return super().step(action)


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [(modules.RandomPolicy, GymWrapper), (RandomPolicy, GymWrapper), (RandomPolicy, lambda e: e)],
)
def test_a_spec_that_is_replaced_during_a_rollout_is_an_error(kind, wrap):
    policy, inner = kind(SPEC_1), Narrows(gym.make("Pendulum-v1"))
    with Collector(wrap(inner), policy, frames_per_batch=6, total_frames=12) as collector:
        inner.policy = policy
        with pytest.raises(PolicyError, match="setting of the policy changed while a rollout"):
            next(iter(collector))


def test_a_policy_on_rows_reads_its_spec_and_class_at_every_rollout():
    policy = RandomPolicy(SPEC_1)
    with Collector("Pendulum-v1", policy, frames_per_batch=6, total_frames=-1) as collector:
        batches = iter(collector)
        next(batches)
        policy.action_spec = NARROW
        assert next(batches)["action"].abs().max() <= 0.1
        to_subclass(None, collector)
        assert not next(batches)["action"].any()


class Duck:
    shape, dtype = torch.Size([1]), torch.float32

    def rand(self, shape):
        return torch.rand((*shape, 1))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("build", [pendulum, lambda: gym.make("Pendulum-v1")])
def test_anything_with_shape_dtype_and_rand_is_a_spec(build, fast):
    env, policy = build(), RandomPolicy(Duck())
    with Collector(env, policy, frames_per_batch=5, total_frames=5, fast=fast) as collector:
        (batch,) = collector
    assert batch["action"].unique().numel() == 5
