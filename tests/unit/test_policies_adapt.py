"""What users may give as a policy, and what they are told when it does not fit."""

import functools
from collections import UserList
from typing import Optional

import gymnasium as gym
import numpy as np
import pytest
import torch
from policies_rig import collect, layout, make, plain, same, written
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as D
from torch import nn
from torchrl.modules import MLP

from gleanrl import Collector, PolicyError, PolicyTypeError

FLOATS = ((3,), torch.float32)
PIXELS = {"pixels": (2, 2)}


def as_tensordict_policy(fn, names=("observation",), extra=()):
    """The same policy on TensorDicts, for reference."""
    return Mod(lambda *xs: fn(*xs), list(names), ["action", *extra])


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, observation, scale: float = 2.0):
        return self.net(observation) * scale


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, pixels, observation):
        return self.net(observation) + pixels.mean((-1, -2), keepdim=False)[..., None]


TENSORS = {
    "linear": lambda: nn.Linear(4, 3),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
    "torchrl-mlp": lambda: MLP(in_features=4, out_features=3, num_cells=[8]),
    "named": Named,
    "lambda": lambda: lambda x: x[..., :3] + 1,
    "partial": lambda: functools.partial(
        lambda scale, observation: observation[..., :3] * scale, 3.0
    ),
}


@pytest.mark.parametrize("batch", [(5,), (), (2, 3)], ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_callables_on_tensors_get_the_observation(name, batch):
    policy = TENSORS[name]()
    same(policy, layout(batch, FLOATS), reference=as_tensordict_policy(policy))


def test_arguments_named_after_observations_get_those():
    policy = Two()
    reference = as_tensordict_policy(policy, ("pixels", "observation"))
    same(policy, layout((5,), FLOATS, more=PIXELS), reference=reference)


def test_further_results_of_a_callable_on_tensors_are_numbered():
    def policy(observation):
        return observation[..., :3], observation.sum(-1), observation

    reference = as_tensordict_policy(policy, extra=["output1", "output2"])
    env = layout((5,), FLOATS)
    batch, _ = same(policy, env, reference=reference)
    assert written(env, batch) == {"action", "output1", "output2"}


def act_on(td):
    return td.set("action", td["observation"][..., :3])


class WithKeys:
    in_keys = ["observation"]
    out_keys = ["action"]

    def __call__(self, data):
        return act_on(data)


class Annotated(nn.Module):
    def forward(self, data: TensorDictBase):
        return act_on(data)


class Postponed(nn.Module):
    def forward(self, data: "TensorDict", strict: bool = True):
        return act_on(data)


class Unresolved(nn.Module):
    def forward(self, data: "unknown.TensorDict"):  # noqa: F821  (for type checkers only)
        return act_on(data)


class Maybe(nn.Module):
    def forward(self, data: Optional[TensorDictBase]):  # noqa: UP045  (users write it)
        return act_on(data)


class Object:
    def __call__(self, tensordict):
        return act_on(tensordict)


class Bound:
    def policy(self, td):
        return act_on(td)


TENSORDICTS = {
    "keys": WithKeys,
    "annotated": Annotated,
    "postponed": Postponed,
    "unresolved": Unresolved,
    "maybe": Maybe,
    "object": Object,
    "method": lambda: Bound().policy,
    "lambda": lambda: lambda td: act_on(td),
}


@pytest.mark.parametrize("name", TENSORDICTS)
def test_callables_on_tensordicts_get_a_tensordict(name):
    same(TENSORDICTS[name](), layout((5,), FLOATS))


def test_a_trusted_policy_is_called_with_a_tensordict_whatever_its_signature():
    env = layout((5,), FLOATS)

    def policy(anything, other=None):
        return act_on(anything)

    batch = collect(policy, env, trust_policy=True)
    assert torch.equal(batch["action"], batch["observation"][..., :3])


class Unwrappable(nn.Module):
    def forward(self, observation, other_stuff):
        return observation


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (Unwrappable(), r"Unwrappable\(observation, other_stuff\) cannot be called.*'observation'"),
        (3, r"policy \(3\) must be a callable"),
        (nn.Linear, "pass an instance rather than a class"),
        (lambda: 3, r"cannot be called with what the environment gives"),
    ],
)
def test_a_policy_that_cannot_be_called_is_a_type_error_that_says_what_is_expected(policy, match):
    with pytest.raises(PolicyTypeError, match=match):
        make(policy, layout((5,), FLOATS))


def test_one_argument_and_several_observations_is_a_type_error():
    with pytest.raises(PolicyTypeError, match=r"'observation', 'pixels'"):
        make(nn.Linear(4, 3), layout((5,), FLOATS, more=PIXELS))


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (lambda td: 3, "returned int; it must return a TensorDict"),
        (lambda observation: {"action": observation}, "called with tensors and returned dict"),
    ],
)
def test_a_result_of_the_wrong_type_is_named(policy, match):
    with pytest.raises(PolicyTypeError, match=match):
        make(policy, layout((5,), FLOATS))


@pytest.mark.parametrize(
    ("policy", "action", "match"),
    [
        (
            lambda td: td.set("move", td["observation"]),
            FLOATS,
            "did not write 'action'; it wrote 'move'",
        ),
        (
            nn.Linear(4, 2),
            FLOATS,
            r"'action' with shape \(5, 2\); the environment wants \(5, 3\)",
        ),
        (nn.Linear(4, 2), ((), torch.int64), "take the index .argmax."),
        (
            lambda observation: observation[..., 0],
            ((), torch.int64),
            "'action' as torch.float32; the environment wants torch.int64",
        ),
        (
            lambda observation: observation[..., :3].double(),
            FLOATS,
            r"as torch.float64; the environment wants torch.float32.*action.to\(torch.float32\)",
        ),
        (
            Mod(nn.Linear(4, 3), ["state"], ["action"]),
            FLOATS,
            r"reads 'state', which the environment does not give; it gives .*'observation'",
        ),
    ],
)
def test_what_does_not_fit_the_environment_is_named(policy, action, match):
    with pytest.raises(PolicyError, match=match):
        make(policy, layout((5,), action))


def test_float32_weights_on_float64_observations_name_the_argument_that_helps():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    with pytest.raises(PolicyError, match=r"observation_dtype=torch\.float32"):
        make(policy, layout((5,), FLOATS, dtype=torch.float64))


def test_an_error_of_the_policy_itself_is_left_as_it_is():
    def policy(td):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match=r"^mine\n"):
        make(policy, layout((5,), FLOATS))


def test_actions_are_stored_as_the_environment_wants_them():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    batch, _ = same(policy, layout((5,), ((3,), torch.float64)))
    assert batch["action"].dtype == torch.float64


def test_float_one_hot_samples_fit_an_integer_environment():
    policy = ProbSeq(
        Mod(nn.Linear(4, 3), ["observation"], ["logits"]),
        Prob(["logits"], ["action"], distribution_class=D.OneHotCategorical),
    )
    same(policy, layout((5,), ((3,), torch.int64)))


def collected(policy, fast=True, env="Pendulum-v1", **options):
    collector = Collector(env, policy, frames_per_batch=12, fast=fast, **options)
    collector.set_seed(3)
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


def replacing(td):
    td["observation"] = td["observation"] / 2
    td["action"] = td["observation"][..., :1]
    td["next", "observation"] = td["observation"]
    td["next", "reward"] = td["observation"][..., :1]
    td["done"] = torch.ones(*td.batch_size, 1, dtype=torch.bool)


def in_place(td):
    td["observation"].mul_(0.5)
    td["action"] = td["observation"][..., :1].clone()


def declared():
    return Seq(
        Mod(lambda x: x / 2, ["observation"], ["observation"]),
        Mod(lambda x: x[..., :1].clone(), ["observation"], ["action"]),
    )


def sometimes():
    """Change the observation at every second call, which one call may not show."""
    calls = []

    def policy(td):
        calls.append(1)
        scale = 0.5 if len(calls) % 2 else 1.0
        if scale != 1:
            td["observation"] = td["observation"] * scale
        td["scale"] = torch.full((*td.batch_size, 1), scale)
        td["action"] = td["observation"][..., :1] / scale / 2

    return policy


def moved(observation, action):
    """Return what Pendulum makes of one observation and one action."""
    env = gym.make("Pendulum-v1").unwrapped
    env.reset()
    cos, sin, speed = observation.double().tolist()
    env.state = np.array([np.arctan2(sin, cos), speed])
    return torch.from_numpy(env.step(np.array([action.item()]))[0])


@pytest.mark.covering
@pytest.mark.parametrize("num_envs", [None, 2])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("build", [lambda: replacing, lambda: in_place, declared, sometimes])
def test_a_changed_observation_is_delivered_and_changes_no_environment(build, fast, num_envs):
    batch = collected(build(), fast, num_envs=num_envs)
    assert batch.shape == ((12,) if num_envs is None else (2, 6))
    if "scale" not in batch.keys():
        batch["scale"] = torch.full((*batch.shape, 1), 0.5)
    for row in batch.reshape(-1, batch.shape[-1]):
        shown, after = row["observation"] / row["scale"], row["next", "observation"]
        assert torch.equal(shown[1:], after[:-1])
        assert torch.equal(row["action"], shown[..., :1] / 2)
        for step, action, then in zip(shown, row["action"], after, strict=True):
            assert torch.allclose(moved(step, action).float(), then, atol=1e-5)


@pytest.mark.parametrize("build", [lambda: replacing, lambda: in_place, declared])
def test_a_policy_that_changes_what_a_vector_environment_shows_is_an_error(build):
    def vector():
        return gym.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync")

    with pytest.raises(PolicyError, match=r"changes.* 'observation'.*num_envs="):
        collected(build(), env=vector)


def test_modules_see_the_batch_shape_of_the_environment():
    seen = UserList()  # a list that construction does not put back

    def policy(td):
        seen.append((td.batch_size, td["observation"].shape, td["done"].shape))
        return act_on(td)

    for batch in [(), (5,), (2, 3)]:
        make(policy, layout(batch, FLOATS)).shutdown()
        assert seen.pop() == (torch.Size(batch), (*batch, 4), (*batch, 1))


def test_bfloat16_outputs_are_collected():
    policy = Mod(lambda x: (x[..., :3], x.to(torch.bfloat16)), ["observation"], ["action", "half"])
    env = layout((5,), FLOATS)
    batch = collect(policy, env)
    assert torch.equal(batch["half"], batch["observation"].to(torch.bfloat16))
    assert plain(policy, env, batch)["half"].dtype == torch.bfloat16


@pytest.mark.parametrize("fast", [True, False])
def test_arrays_and_numbers_of_numpy_are_taken_as_tensors_of_their_dtype(fast):
    memory = np.zeros(2, np.int64)

    def act(observation):
        memory[:] = np.asarray(observation)[..., 2] > 0  # the policy may use its array again
        return memory, np.asarray(observation).sum(-1)

    with Collector("CartPole-v1", act, num_envs=2, frames_per_batch=40, fast=fast) as collector:
        batches = [collector.next().clone() for _ in range(2)]
    for batch in batches:
        assert torch.equal(batch["action"], (batch["observation"][..., 2] > 0).long())
        assert torch.equal(batch["output1"], batch["observation"].sum(-1))
        assert batch["output1"].dtype == torch.float32
    assert len(torch.cat([batch["action"].flatten() for batch in batches]).unique()) == 2
