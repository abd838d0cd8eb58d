"""Policies that act on rows of a window, and what a collector does not let one see of them."""

import random
from collections import UserList

import numpy as np
import pytest
import torch
from policy_rig import (
    DETERMINISTIC,
    MODE,
    OBS,
    RANDOM,
    layout,
    make,
    plain,
    run,
    same,
    windows,
)
from tensordict.nn import InteractionType
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from torch import distributions as D
from torch import nn

from gleanrl.core.layout import DoneGroup, EnvLayout, Field
from gleanrl.core.protocols import Policy
from gleanrl.envs.specs import Bounded, Categorical, Composite
from gleanrl.operations.op_recorder import OpRecorder, Unknown
from gleanrl.policies.policy import set_exploration_type
from gleanrl.policies.random import RandomActions, RandomPolicy

FLOATS = ((3,), torch.float32)
INT = ((), torch.int64)
SPEC = Bounded(-1.0, 1.0, (3,), dtype=torch.float32)


def streams():
    python, (_, words, position, *_) = random.getstate(), np.random.get_state()
    return torch.get_rng_state().tolist(), python, words.tolist(), position


class Setting:
    """A policy with its window; `check` makes a rollout and compares it to the plain calls."""

    def __init__(self, policy, action=FLOATS):
        self.policy, self.env = policy, layout((5,), action)
        self.ours = make(policy, self.env)
        self.window, self.carry = windows(self.env, self.ours)

    def check(self, kind=RANDOM):
        torch.manual_seed(3)
        expected = plain(self.policy, self.env, self.window, kind)
        torch.manual_seed(3)
        run(self.ours, self.window, self.carry, kind)
        for field in self.ours.outputs:
            assert torch.equal(self.window.tensor(field.key), expected[field.key])
        return self.window.tensor(("action",)).clone()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def actor(**options):
    torch.manual_seed(0)
    return ProbSeq(
        Mod(network(), ["observation"], ["logits"]),
        Prob(["logits"], ["action"], distribution_class=D.Categorical, **options),
    )


def test_the_exploration_type_of_each_rollout_counts():
    setting = Setting(actor(return_log_prob=True), INT)
    drawn = setting.check(RANDOM)
    likely = setting.check(MODE)
    assert torch.equal(likely, setting.check(DETERMINISTIC))
    assert not torch.equal(drawn, likely)
    assert torch.equal(drawn, setting.check(RANDOM))


def test_without_an_exploration_type_the_modules_default_counts():
    setting = Setting(actor(default_interaction_type=InteractionType.MODE), INT)
    assert torch.equal(setting.check(None), setting.check(MODE))


def test_a_stopped_rollout_writes_its_steps_only():
    setting = Setting(Mod(network(), ["observation"], ["action"]))
    run(setting.ours, setting.window, setting.carry, steps=2)
    assert not setting.window.tensor(("action",))[:, 2:].any()
    assert setting.window.tensor(("action",))[:, :2].any()


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
    assert ("is_init",) not in ours.provided


def written_in_part(x):
    rows = torch.ones(4, 3)
    rows[:2].copy_(x[:2])
    return rows.add_(x).unsqueeze_(0)


RECORDED = {
    "arithmetic": (lambda x: (1 - x**2).exp().log_softmax(-1) - x.pow(3), True),
    "powers that vary": (lambda x: x.abs() ** x, True),
    "written in part": (written_in_part, True),
    "several results": (lambda x: torch.stack([x, -x]).max(0)[0], True),
    "as many as there are": (lambda x: (x > 0).nonzero().sum(0), False),
    "decided by a value": (lambda x: x if x.sum() > 0 else -x, False),
    "a value that becomes a constant": (lambda x: x * float(x.sum()), False),
}


@pytest.mark.parametrize("name", RECORDED)
def test_what_was_recorded_is_done_again_with_other_values(name):
    function, complete = RECORDED[name]
    ops, x = OpRecorder(), torch.randn(4, 3)
    ops.changing([x])
    with ops:
        result = function(x)
    assert (ops.complete and not ops.numbers) == complete
    for _ in range(3 * complete):
        x.normal_()
        for call in ops.calls():
            call()
        assert torch.equal(result, function(x.clone()))


@pytest.mark.parametrize("write", ["add_", "copy_"])
def test_a_constant_that_was_read_may_not_be_written_afterwards(write):
    ops, x = OpRecorder(), torch.randn(4, 3)
    ops.changing([x])
    with ops:
        constant = torch.zeros(4, 3)
        constant.add_(1)
        x + constant
        with pytest.raises(Unknown):
            getattr(constant, write)(x)


@pytest.mark.parametrize("policy", [None, RandomPolicy()])
def test_without_a_spec_actions_are_those_of_the_environment(policy):
    env, spec = layout((5,), FLOATS), Bounded(2.0, 3.0, FLOATS[0], dtype=FLOATS[1])
    ours = make(policy, env, specs={("action",): spec})
    window, carry = windows(env, ours)
    run(ours, window, carry)
    assert isinstance(ours, RandomActions)
    drawn = window.tensor(("action",))
    assert spec.is_in(drawn[0, 0])
    assert len(drawn.unique()) == drawn.numel()
    assert ours.outputs == env.actions
    assert ours.states == ()


def test_several_actions_come_from_a_composite():
    env = EnvLayout(
        batch_shape=(5,),
        observations=(Field(OBS, (4,), torch.float32),),
        actions=(
            Field(("hand", "grip"), (), torch.int64),
            Field(("hand", "move"), (3,), dtype=torch.float32),
        ),
        rewards=(),
    )
    spec = Composite({("hand", "grip"): Categorical(2), ("hand", "move"): SPEC})
    ours = make(RandomPolicy(spec), env)
    window, carry = windows(env, ours)
    run(ours, window, carry)
    assert window.tensor(("hand", "grip")).unique().tolist() == [0, 1]
    assert window.tensor(("hand", "move")).abs().max() <= 1


def test_nested_keys_are_read_and_written():
    agents = ("agents", "observation")
    env = EnvLayout(
        batch_shape=(5,),
        observations=(Field(OBS, (4,), torch.float32), Field(agents, (2, 4), torch.float32)),
        actions=(Field(("agents", "action"), (2, 3), torch.float32),),
        rewards=(Field(("agents", "reward"), (2, 1), torch.float32),),
        dones=(DoneGroup(()), DoneGroup(("agents",), (2, 1))),
    )
    module = Mod(nn.Linear(4, 3), [agents], [("agents", "action")])
    ours = same(module, env)
    with set_exploration_type(RANDOM):
        assert ours.explain() == ["TensorDictModule: tensor calls"]

    def function(td):
        assert not td.get(("agents", "done"), torch.zeros(())).any()
        td["agents", "action"] = module.module(td[agents])
        td["agents", "extra"] = td[agents].sum(-1)

    assert {f.key for f in same(function, env).outputs} == {
        ("agents", "action"),
        ("agents", "extra"),
    }


def test_policies_are_policies():
    made: list[Policy] = [
        make(nn.Linear(4, 3), layout((5,), FLOATS)),
        make(None, layout()),
    ]
    for policy in made:
        assert policy.outputs
        for name in ("begin", "act", "finish"):
            assert callable(getattr(policy, name))
