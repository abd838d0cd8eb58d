"""Construction calls the policy once, on the real first observation, and restores its tensors."""

import gc
import random

import numpy as np
import pytest
import torch
from policies_rig import MODE, Shows, collect, layout, lowered, make, plain, same
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn import TensorDictModule as Mod
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor

from gleanrl import ConfigError
from gleanrl.policies.policy import (
    ExplorationType,
    exploration_type,
    parse_exploration_mode,
    set_exploration_type,
)

FLOATS = ((3,), torch.float32)
INT = ((), torch.int64)


class Spy(nn.Module):
    """Draws from every stream, moves its buffers, and notes how it was called."""

    def __init__(self):
        super().__init__()
        self.calls = []  # what Python holds, construction does not put back
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, observation):
        noise = torch.rand(3) + random.random() + np.random.rand()
        self.count += 1
        self.last = self.count * 2
        kind, grad = exploration_type(), torch.is_grad_enabled()
        self.calls.append((observation.clone(), kind, grad))
        return self.norm(observation)[..., :3] + noise


def streams():
    python, (_, words, position, *_) = random.getstate(), np.random.get_state()
    return torch.get_rng_state().tolist(), python, words.tolist(), position


@pytest.mark.parametrize("wrap", [False, True])
def test_the_policy_is_called_once_on_the_first_observation_and_left_as_it_was(wrap):
    spy = Spy()
    policy = Mod(spy, ["observation"], ["action"]) if wrap else spy
    env = layout((5,), FLOATS)
    buffers = dict(spy.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    before = streams()
    make(policy, env, MODE).shutdown()
    assert streams() == before
    ((seen, kind, grad),) = spy.calls
    assert torch.equal(seen, torch.tensor(np.stack([Shows(env, i).reset()[0] for i in range(5)])))
    assert kind is MODE
    assert not grad
    for name, buffer in spy.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])


def test_modules_inside_closures_are_left_as_they_were():
    norm = nn.BatchNorm1d(4)
    policy = lambda td: td.set("action", norm(td["observation"])[..., :3])  # noqa: E731
    make(policy, layout((5,), FLOATS)).shutdown()
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()


def test_lazy_layers_are_materialised():
    policy = Mod(nn.LazyLinear(3), ["observation"], ["action"])
    before = streams()
    make(policy, layout((5,), FLOATS)).shutdown()
    assert policy.module.weight.shape == (3, 4)
    assert streams() == before


@pytest.mark.parametrize("fails", [True, False])
def test_streams_are_restored_when_the_policy_raises(fails):
    def policy(td):
        torch.rand(1)
        if fails:
            raise ZeroDivisionError("mine")
        return td.set("action", td["observation"][..., :3])

    before = streams()
    if fails:
        with pytest.raises(ZeroDivisionError, match="mine"):
            make(policy, layout((5,), FLOATS))
    else:
        make(policy, layout((5,), FLOATS)).shutdown()
    assert streams() == before


@pytest.mark.parametrize("options", [True, {"backend": "eager"}])
def test_a_compiled_policy_gives_what_the_policy_gives(options):
    if options is True:
        options = {"backend": "eager", "dynamic": False}
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    env = layout((5,), FLOATS)
    with make(policy, env, compile_policy=options) as collector:
        batch = next(iter(collector)).clone()
        assert lowered(collector) == 0
    assert torch.equal(batch["action"], plain(policy, env, batch)["action"])


def test_compiling_without_arguments_replaces_nothing_by_tensor_calls():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    with make(policy, layout((5,), FLOATS), compile_policy={}) as collector:
        assert lowered(collector) == 0


def test_an_already_compiled_policy_is_called_with_a_tensordict():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    same(torch.compile(policy, backend="eager"), layout((5,), FLOATS), reference=policy)


def test_circles_that_compiling_leaves_behind_do_not_count_as_keeping_the_tensordict():
    scores = Mod(nn.Linear(4, 3), ["observation"], ["logits"])
    policy = ProbabilisticActor(scores, ["logits"], distribution_class=Categorical)
    gc.collect()
    with make(torch.compile(policy, backend="eager"), layout((), INT)) as collector:
        assert "loop: rows" in collector.explain()


def test_a_cuda_graph_needs_cuda():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    with pytest.raises(ConfigError, match="needs a policy on a CUDA device, this one is on cpu"):
        make(policy, layout((5,), FLOATS), cudagraph_policy=True, policy_device="cpu")


@pytest.mark.parametrize("name", ["compile_policy", "cudagraph_policy"])
def test_options_of_the_wrong_kind_are_named(name):
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    with pytest.raises(ConfigError, match=rf"{name} \('fast'\) must be a bool or a mapping"):
        make(policy, layout((5,), FLOATS), **{name: "fast"})


def test_random_actions_cannot_be_compiled():
    with pytest.raises(ConfigError, match="need a policy"):
        make(None, layout(), compile_policy=True)


def test_exploration_modes_have_their_older_names():
    for name in ("random", "mode", "mean", "deterministic"):
        assert parse_exploration_mode(name) is getattr(ExplorationType, name.upper())
    with pytest.raises(ConfigError, match=r"exploration_mode \('best'\) must be one of 'random'"):
        parse_exploration_mode("best")


def test_the_exploration_type_is_tensordicts_interaction_type():
    assert ExplorationType is InteractionType
    assert set_exploration_type is set_interaction_type
    assert exploration_type() is None
    with set_exploration_type(MODE):
        assert exploration_type() is MODE


def test_a_policy_is_run_where_its_weights_are():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    same(policy, layout((5,), FLOATS))
    assert "action" in collect(policy, layout((5,), FLOATS), policy_device="cpu").keys()
