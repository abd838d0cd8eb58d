"""Recurrent policies: states are zero at resets, carried over steps and rollouts."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from policies_rig import STEPS, assert_same, collect, layout, make, plain, same, written
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictModuleBase
from tensordict.nn import TensorDictSequential as Seq
from torch import nn
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

from gleanrl import Collector, PolicyError

FLOATS = ((3,), torch.float32)
ENDS = {1: [0], 3: [2, 4]}


class Cell(TensorDictModuleBase):
    """Needs its state to be there."""

    in_keys = ["observation", "hidden"]
    out_keys = ["action", ("next", "hidden")]

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tensordict):
        hidden = tensordict["hidden"]
        batch = hidden.shape[:-1]
        observation = tensordict["observation"].reshape(-1, 4)
        after = self.cell(observation, hidden.reshape(-1, 8)).reshape(*batch, 8)
        tensordict["action"] = self.head(after)
        tensordict["next", "hidden"] = after
        return tensordict


class Layers(TensorDictModuleBase):
    """Recurrent layers of torch, whose states are `[layers, size]` per environment."""

    in_keys = ["observation", "h", "c"]
    out_keys = ["action", ("next", "h"), ("next", "c")]

    def __init__(self, layers=1):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(4, 8, layers, batch_first=True), nn.Linear(8, 3)

    def forward(self, tensordict):
        before = [tensordict[key].transpose(0, 1).contiguous() for key in "hc"]
        out, after = self.lstm(tensordict["observation"].reshape(-1, 1, 4), before)
        tensordict["action"] = self.head(out[:, 0])
        for key, state in zip("hc", after, strict=True):
            tensordict["next", key] = state.transpose(0, 1)
        return tensordict


def modules():
    torch.manual_seed(0)
    cell = Mod(nn.GRUCell(4, 8), ["observation", "hidden"], [("next", "hidden")])
    return Seq(cell, Mod(nn.Linear(8, 3), [("next", "hidden")], ["action"]))


def torchrls(kind, width=8, **options):
    torch.manual_seed(0)
    return Seq(
        kind(input_size=4, hidden_size=8, in_key="observation", out_key="deep", **options),
        Mod(nn.Linear(width, 3), ["deep"], ["action"]),
    )


def own_gru(kind, input_size, hidden_size, **keys):
    return GRUModule(gru=kind(input_size, hidden_size, batch_first=True), **keys)


class Twice(nn.GRU):
    def forward(self, *args):
        out, state = super().forward(*args)
        return out * 2, state


lstm, gru = partial(torchrls, LSTMModule, num_layers=2), partial(torchrls, GRUModule)


KINDS = {
    "own-module": (Cell, [("hidden", (8,))], False, 0),
    "layer": (Layers, [("h", (1, 8)), ("c", (1, 8))], False, 0),
    "cell-in-modules": (modules, [("hidden", (8,))], False, 2),
    "lstm": (lstm, [("recurrent_state_h", (2, 8)), ("recurrent_state_c", (2, 8))], True, 2),
    "lstm-dropout": (
        partial(lstm, dropout=0.5, bias=False),
        [("recurrent_state_h", (2, 8)), ("recurrent_state_c", (2, 8))],
        True,
        2,
    ),
    "lstm-python": (
        partial(torchrls, LSTMModule, python_based=True),
        [("recurrent_state_h", (1, 8)), ("recurrent_state_c", (1, 8))],
        True,
        2,
    ),
    "gru": (gru, [("recurrent_state", (1, 8))], True, 2),
    "gru-own": (
        lambda: torchrls(partial(own_gru, Twice)),
        [("recurrent_state", (1, 8))],
        True,
        0,
    ),
    "gru-both-ways": (
        partial(gru, width=16, bidirectional=True),
        [("recurrent_state", (2, 8))],
        True,
        2,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_states_are_carried_and_zeroed_like_in_plain_calls(name):
    build, states, init, recorded = KINDS[name]
    env = layout((5,), FLOATS, ends=ENDS)
    batch, count = same(build(), env, states=states, init=init)
    assert count == recorded
    assert {key for key, _ in states} <= set(batch.keys())
    assert ("is_init" in batch.keys()) is init


@pytest.mark.parametrize("change", ["weights", "replaced", "mode"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_what_changes_between_batches_counts(name, change):
    build, states, init, _ = KINDS[name]
    env, policy = layout((5,), FLOATS, ends=ENDS), build()
    with make(policy, env) as collector:
        before = next(iter(collector)).clone()
        if change == "weights":
            getattr(policy[0], name).weight_hh_l0.data.mul_(3)
        elif change == "replaced":
            layer = getattr(policy[0], name)
            layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 3)
        with set_recurrent_mode(True) if change == "mode" else nullcontext():
            after = next(iter(collector)).clone()
            expected = plain(policy, env, after, states=states, init=init)
        assert_same(after, expected, env, states)
        assert not torch.equal(after["action"], before["action"])


@pytest.mark.parametrize("name", ["own-module", "lstm", "gru"])
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_states_take_any_batch_shape(name, batch):
    build, states, init, _ = KINDS[name]
    same(build(), layout(batch, FLOATS), states=states, init=init)


def test_the_state_after_the_last_step_continues_in_the_next_rollout():
    env, policy = layout((5,), FLOATS), Cell()
    half = {"frames_per_batch": STEPS // 2 * 5, "reset_at_each_iter": False}
    with make(policy, env, **half) as collector:
        parts = [batch.clone() for _, batch in zip(range(2), collector, strict=False)]
    batch = torch.cat(parts, 1)
    expected = plain(policy, env, batch, states=[("hidden", (8,))])
    assert torch.equal(batch["action"], expected["action"])


def test_root_rows_hold_the_state_that_was_read():
    env = layout((5,), FLOATS, ends={1: [0]})
    with make(Cell(), env, reset_at_each_iter=False) as collector:
        batch, following = (batch.clone() for _, batch in zip(range(2), collector, strict=False))
    root, after = batch["hidden"], batch["next", "hidden"]
    assert not root[:, 0].any()
    assert not root[0, 2].any()
    assert torch.equal(root[1:, 1:], after[1:, :-1])
    assert after[0, 1].any(), "the state at the end of the episode is delivered"
    assert torch.equal(following["hidden"][:, 0], after[:, -1])


class Plain(nn.Module):
    """Takes tensors it cannot make by itself; its layered network hides the shape of its state."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, observation, hidden):
        out, after = self.gru(observation.unsqueeze(0), hidden[None].contiguous())
        return self.head(out[0]), after[0]


def test_the_state_of_a_layered_network_has_to_be_declared():
    policy = Mod(Plain(), ["observation", "hidden"], ["action", ("next", "hidden")])
    with pytest.raises(PolicyError, match=r"unknown shape; .*state_shapes = \{'hidden'"):
        make(policy, layout((5,), FLOATS))
    policy.state_shapes = {"hidden": (8,)}
    same(policy, layout((5,), FLOATS, ends=ENDS), states=[("hidden", (8,))])


@pytest.mark.parametrize("turn", [True, False])
def test_the_states_of_several_layers_have_to_be_declared(turn):
    """States that are not turned fit two environments, and mix them."""
    policy = Layers(2)
    if not turn:
        policy.forward = lambda td: unturned(policy, td)
    with pytest.raises(PolicyError, match="unknown shape"):
        make(policy, layout((2,), FLOATS))
    if turn:
        policy.state_shapes = {"h": (2, 8), "c": (2, 8)}
        states = [("h", (2, 8)), ("c", (2, 8))]
        same(policy, layout((5,), FLOATS, ends=ENDS), states=states)


def unturned(policy, td):
    out, (h, c) = policy.lstm(td["observation"].unsqueeze(1), (td["h"], td["c"]))
    return td.update({"action": policy.head(out[:, 0]), "next": {"h": h, "c": c}})


def test_a_state_beside_an_encoder_of_layers_has_to_be_declared():
    policy = Opaque()
    policy.encoder = nn.GRU(4, 8)
    policy.forward = lambda td: td.update(
        {"action": td["observation"][..., :3], "next": {"memory": td["memory"] + 1}}
    )
    with pytest.raises(PolicyError, match="unknown shape"):
        make(policy, layout((5,), FLOATS))


def test_a_cell_tells_the_shape_beside_an_encoder_of_layers():
    policy = Cell()
    policy.encoder = nn.GRU(4, 16)
    same(policy, layout((5,), FLOATS, ends=ENDS), states=[("hidden", (8,))])


def test_a_state_of_unknown_shape_is_named_also_if_the_policy_reads_is_init():
    policy = Mod(
        lambda observation, hidden, is_init: (observation[..., :3], hidden + 1),
        ["observation", "hidden", "is_init"],
        ["action", ("next", "hidden")],
    )
    with pytest.raises(PolicyError, match=r"unknown shape; .*state_shapes = \{'hidden'"):
        make(policy, layout((5,), FLOATS))


def test_a_state_that_is_not_written_as_it_is_read_is_an_error():
    policy = Opaque()
    policy.state_shapes = {"memory": (2,)}
    policy.forward = lambda td: Opaque.forward(policy, td).set(
        ("next", "memory"), torch.zeros(5, 3)
    )
    with pytest.raises(PolicyError, match=r"'memory' with shape \(5, 2\) and wrote shape \(5, 3\)"):
        make(policy, layout((5,), FLOATS))


class Opaque(TensorDictModuleBase):
    in_keys = ["observation", "memory"]
    out_keys = ["action", ("next", "memory")]

    def forward(self, tensordict):
        memory = tensordict["memory"]
        tensordict["action"] = tensordict["observation"][..., :3] + memory.sum(-1, True)
        tensordict["next", "memory"] = memory + 1
        return tensordict


def test_a_state_of_unknown_shape_is_an_error_that_says_how_to_declare_it():
    with pytest.raises(PolicyError, match=r"state_shapes = \{'memory': \(hidden_size,\)\}"):
        make(Opaque(), layout((5,), FLOATS))


def test_a_declared_state_has_the_declared_shape():
    policy = Opaque()
    policy.state_shapes = {"memory": (2,)}
    batch, _ = same(policy, layout((5,), FLOATS, ends=ENDS), states=[("memory", (2,))])
    assert batch["next", "memory"].shape == (5, STEPS, 2)


def remembering(td):
    """Makes its own first state, which is not zero."""
    memory = td.get("memory", None)
    memory = torch.full((*td.batch_size, 1), 3.0) if memory is None else memory
    td["action"] = td["observation"][..., :1] * 0 + memory
    td["next", "memory"] = memory + 1


@pytest.mark.parametrize("fast", [True, False])
def test_functions_keep_what_they_wrote_over_the_ends_of_episodes(fast):
    options = {"frames_per_batch": 7, "max_frames_per_traj": 4, "fast": fast}
    with Collector("Pendulum-v1", remembering, **options) as collector:
        found = [batch.clone() for _, batch in zip(range(2), collector, strict=False)]
    actions = torch.cat([batch["action"].flatten() for batch in found])
    assert actions.tolist() == [float(3 + t) for t in range(14)]
    after = torch.cat([batch["next", "memory"].flatten() for batch in found])
    assert after.tolist() == [float(4 + t) for t in range(14)]
    assert any(batch["next", "truncated"].any() for batch in found)


class OwnStart(TensorDictModuleBase):
    """Begins episodes with a state of its own, where ``"is_init"`` says so."""

    in_keys = ["observation", "memory", "is_init"]
    out_keys = ["action", ("next", "memory")]

    def forward(self, tensordict):
        start = torch.full((*tensordict.batch_size, 1), 3.0)
        memory = torch.where(tensordict["is_init"], start, tensordict.get("memory", start))
        tensordict["action"] = memory.clone()
        tensordict["next", "memory"] = memory + 1
        return tensordict


@pytest.mark.parametrize("fast", [True, False])
def test_a_policy_that_reads_is_init_makes_its_first_state(fast):
    options = {"frames_per_batch": 6, "max_frames_per_traj": 3, "fast": fast}
    with Collector("Pendulum-v1", OwnStart(), **options) as collector:
        actions = next(iter(collector))["action"].flatten().tolist()
    assert actions == [3, 4, 5, 3, 4, 5]


class Begins(TensorDictModuleBase):
    """Begins with states of its own, of the shape of its layer or not."""

    in_keys = ["observation", "h", "c", "is_init"]
    out_keys = ["action", ("next", "h"), ("next", "c")]

    def __init__(self, layer, shape):
        super().__init__()
        self.encoder, self.shape = layer, shape

    def forward(self, tensordict):
        start = torch.full((*tensordict.batch_size, *self.shape), 3.0)
        for key in "hc":
            tensordict["next", key] = tensordict.get(key, start) + 1
        tensordict["action"] = tensordict["next", "h"].flatten(-len(self.shape))[..., :1]
        return tensordict


@pytest.mark.parametrize("shape", [(1, 8), (16,)], ids=str)
@pytest.mark.parametrize("layer", [nn.GRU(3, 8), nn.LSTM(3, 8)], ids=["gru", "lstm"])
def test_layers_leave_a_policy_that_reads_is_init_its_first_state(layer, shape):
    with Collector("Pendulum-v1", Begins(layer, shape), frames_per_batch=3) as collector:
        assert next(iter(collector))["action"].flatten().tolist() == [4, 5, 6]


def test_next_entries_that_are_not_read_are_outputs_and_no_states():
    policy = Mod(lambda x: (x[..., :3], x), ["observation"], ["action", ("next", "guess")])
    env = layout((5,), FLOATS)
    batch, _ = same(policy, env)
    assert "guess" not in batch.keys()
    assert written(env, batch) == {"action", ("next", "guess")}


def test_random_frames_have_zero_states_and_extras():
    env = layout((5,), FLOATS, ends={0: [1]})
    with make(Cell(), env, init_random_frames=30, reset_at_each_iter=False) as collector:
        batch, following = (batch.clone() for _, batch in zip(range(2), collector, strict=False))
    assert batch["action"].any()
    for key in ["hidden", ("next", "hidden")]:
        assert not batch[key].any()
    assert not following["hidden"][:, 0].any()


def test_modules_that_keep_their_inputs_keep_the_right_ones():
    class Stacking(TensorDictModuleBase):
        in_keys = ["observation"]
        out_keys = ["action"]

        def __init__(self):
            super().__init__()
            self.last = None

        def forward(self, tensordict):
            now = tensordict["observation"]
            before, self.last = self.last, now
            before = torch.zeros_like(now) if before is None else before
            return tensordict.set("action", (now - before)[..., :3])

    batch = collect(Stacking(), layout((5,), FLOATS))
    seen = batch["observation"][..., :3]
    assert torch.equal(batch["action"][:, 1:], seen[:, 1:] - seen[:, :-1])
