"""Construction calls the policy once, on the real first observation, and leaves no trace."""

import random
from collections import UserList

import numpy as np
import pytest
import torch
from policies_rig import MODE, OBS, RANDOM, layout, make, plain, probe_of, run, same, windows
from tensordict.nn import InteractionType, set_interaction_type
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as D
from torch import nn

from gleanrl import ConfigError
from gleanrl.policies import (
    ExplorationType,
    ProgramPolicy,
    exploration_type,
    parse_exploration_mode,
    set_exploration_type,
)
from gleanrl.policies.adapt import adapt
from gleanrl.policies.policy import root_of
from gleanrl.policies.probe import learn

FLOATS = ((3,), torch.float32)
INT = ((), torch.int64)


class Spy(nn.Module):
    """Draws from every stream, moves its buffers, and notes how it was called."""

    def __init__(self):
        super().__init__()
        self.calls = UserList()  # a list that construction does not put back
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
    make(policy, env, exploration=MODE)
    assert streams() == before
    ((seen, kind, grad),) = spy.calls
    assert torch.equal(seen, probe_of(env).tensor(OBS)[:, 0])
    assert kind is MODE
    assert not grad
    for name, buffer in spy.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name])


def test_modules_inside_closures_are_left_as_they_were():
    norm = nn.BatchNorm1d(4)
    make(lambda td: td.set("action", norm(td["observation"])[..., :3]), layout((5,), FLOATS))
    assert norm.num_batches_tracked == 0
    assert not norm.running_mean.any()


def test_a_lowered_policy_is_not_called_again_by_rollouts_to_come():
    calls = UserList()  # a list that construction does not put back
    inner = nn.Linear(4, 3)
    inner.register_forward_hook(lambda *a: calls.append(1))
    policy = ProbSeq(
        Mod(inner, ["observation"], ["logits"]),
        Prob(["logits"], ["action"], distribution_class=D.Categorical),
    )
    before = streams()
    ours = make(policy, layout((5,), INT))
    with set_exploration_type(RANDOM), torch.no_grad():
        ours.begin(*windows(layout((5,), INT), ours))
    assert streams() == before
    assert calls == [1]


def test_lazy_layers_are_materialised():
    policy = Mod(nn.LazyLinear(3), ["observation"], ["action"])
    before = streams()
    make(policy, layout((5,), FLOATS))
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
        make(policy, layout((5,), FLOATS))
    assert streams() == before


def test_the_outputs_say_what_is_written_actions_first():
    policy = ProbSeq(
        Mod(nn.Linear(4, 3), ["observation"], [("net", "logits")]),
        Prob(
            {"logits": ("net", "logits")},
            ["action"],
            distribution_class=D.Categorical,
            return_log_prob=True,
        ),
    )
    ours = make(policy, layout((2, 3), INT))
    assert [(f.key, f.shape, f.dtype) for f in ours.outputs] == [
        (("action",), (), torch.int64),
        (("net", "logits"), (3,), torch.float32),
        (("action_log_prob",), (), torch.float32),
    ]
    assert ours.inner is policy
    assert ours.states == ()
    assert not ours.needs_is_init


@pytest.mark.parametrize("options", [True, {"backend": "eager"}])
def test_a_compiled_policy_gives_what_the_policy_gives(options):
    if options is True:
        options = {"backend": "eager", "dynamic": False}
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    env = layout((5,), FLOATS)
    ours = make(policy, env, compile_policy=options)
    window, carry = windows(env, ours)
    run(ours, window, carry)
    assert torch.equal(window.tensor(("action",)), plain(policy, env, window)[("action",)])
    assert ours.lowered == 0


def test_an_already_compiled_policy_is_called_with_a_tensordict():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    same(torch.compile(policy, backend="eager"), layout((5,), FLOATS), reference=policy)


def test_a_cuda_graph_needs_cuda():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    with pytest.raises(ConfigError, match="needs a policy on a CUDA device, this one is on cpu"):
        make(policy, layout((5,), FLOATS), cudagraph_policy=True, device="cpu")


@pytest.mark.parametrize("name", ["compile_policy", "cudagraph_policy"])
def test_options_of_the_wrong_kind_are_named(name):
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    with pytest.raises(ConfigError, match=rf"{name} \('fast'\) must be True, False or a dict"):
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


def recurrent():
    cell = Mod(nn.GRUCell(4, 3), ["observation", "hidden"], [("next", "hidden")])
    head = Mod(lambda after: (after, after * 2), [("next", "hidden")], ["action", "extra"])
    return Seq(cell, head)


@pytest.mark.parametrize("steps", [6, 2])
def test_off_the_cpu_extras_and_states_stay_until_the_rollout_is_over(steps):
    # The cells are on the CPU all the same; what is tested is where rows go and when.
    policy, env, ends = recurrent(), layout((5,), FLOATS), {1: [0]}
    adapted = adapt(policy, [OBS], [("action",)])
    adapted, signature = learn(policy, adapted, env, root_of(env, probe_of(env)), RANDOM)
    ours = ProgramPolicy(policy, adapted.call, signature, env, device=torch.device("cuda"))
    near = make(policy, env)
    (window, carry), (other, other_carry) = windows(env, ours), windows(env, near)
    for rollout in range(2):
        if rollout:
            window.tensor(("hidden",))[:, 0] = carry.tensor(("hidden",))[:, 0]
            other.tensor(("hidden",))[:, 0] = other_carry.tensor(("hidden",))[:, 0]
        run(ours, window, carry, ends=ends, steps=steps)
        run(near, other, other_carry, ends=ends, steps=steps)
        for key in [("action",), ("extra",), ("next", "hidden"), ("hidden",)]:
            assert torch.equal(window.tensor(key)[:, :steps], other.tensor(key)[:, :steps])
        assert torch.equal(carry.tensor(("hidden",)), other_carry.tensor(("hidden",)))


def test_a_policy_is_run_where_its_weights_are():
    policy = Mod(nn.Linear(4, 3), ["observation"], ["action"])
    same(policy, layout((5,), FLOATS))
    ours = make(policy, layout((5,), FLOATS), device="cpu")
    assert ours.outputs[0].key == ("action",)
