"""Acting at random."""

import pytest
import torch
from policies_rig import OBS, layout, make, no_random, run, windows
from tensordict import TensorDict
from torchrl import data as rl

from gleanrl import PolicyError
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.data import Bounded, Categorical, Composite
from gleanrl.policies import RandomActions, RandomPolicy

FLOATS = ((3,), torch.float32)
SPEC = Bounded(-1.0, 1.0, (3,), dtype=torch.float32)


def made(policy, env, random=no_random):
    return make(policy, env, random=random)


@pytest.mark.parametrize("policy", [None, RandomPolicy()])
def test_without_a_spec_the_environment_draws(policy):
    env, rows = layout((5,), FLOATS), []
    ours = made(policy, env, rows.append)
    window, carry = windows(env, ours)
    run(ours, window, carry)
    assert isinstance(ours, RandomActions)
    assert rows == list(range(window.steps))
    assert ours.outputs == env.actions
    assert ours.states == ()


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
    ours = made(policy, env)
    window, carry = windows(env, ours)
    torch.manual_seed(0)
    run(ours, window, carry)
    torch.manual_seed(0)
    for t in range(window.steps):
        td = policy(TensorDict({"observation": window.tensor(OBS)[:, t].reshape(*batch, 4)}, batch))
        assert torch.equal(window.tensor(("action",))[:, t].reshape(*batch, 3), td["action"])


def test_a_spec_of_the_whole_batch_is_drawn_from_once():
    env = layout((5,), FLOATS)
    whole = Bounded(-1.0, 1.0, (5, 3), dtype=torch.float32)
    ours = made(RandomPolicy(whole), env)
    window, carry = windows(env, ours)
    torch.manual_seed(0)
    run(ours, window, carry, steps=1)
    torch.manual_seed(0)
    assert torch.equal(window.tensor(("action",))[:, 0], whole.rand())
    torch.manual_seed(0)
    td = RandomPolicy(whole)(TensorDict({}, [5]))
    assert torch.equal(window.tensor(("action",))[:, 0], td["action"])


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
    ours = made(RandomPolicy(spec), env)
    window, carry = windows(env, ours)
    run(ours, window, carry)
    assert window.tensor(("hand", "grip")).unique().tolist() == [0, 1]
    assert window.tensor(("hand", "move")).abs().max() <= 1


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
        made(policy, layout((5,), FLOATS))


def test_a_policy_without_a_spec_cannot_be_called():
    with pytest.raises(PolicyError, match="has no action_spec to draw from"):
        RandomPolicy()(TensorDict({}, []))


def test_the_action_key_is_respected():
    td = RandomPolicy(SPEC, ("agents", "action"))(TensorDict({}, [2]))
    assert td["agents", "action"].shape == (2, 3)
