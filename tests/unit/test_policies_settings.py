"""Settings of a policy that change between batches: every batch is what plain calls give."""

import sys
from contextlib import nullcontext
from functools import partial
from types import MethodType
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import AddStateIndependentNormalScale, NormalParamExtractor, biased_softplus
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from torch import distributions as D
from torch import nn
from torch.overrides import TorchFunctionMode
from torchrl import modules as rl

from gleanrl import Collector, ExplorationType, PolicyError, set_exploration_type
from gleanrl.modules import TanhNormal

STEPS = 8


class Noise(gym.Env):
    """Gives random observations of 4 numbers, whatever the 3 numbers of the action are."""

    observation_space = gym.spaces.Box(-9, 9, (4,), np.float32)
    action_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action):
        return self._draw(), 0.0, False, False, {}

    def _draw(self):
        return self.np_random.normal(size=4).astype(np.float32) * 2


def check(policy, change, around=nullcontext, differs=True):
    """Collect before and after ``change``, each compared to plain calls of ``policy``."""
    collector = Collector(Noise, policy, frames_per_batch=STEPS, total_frames=-1)
    with set_exploration_type(ExplorationType.RANDOM):
        batches = iter(collector)
        first = compare(batches, policy, nullcontext)
        change(policy)
        second = compare(batches, policy, around)
    collector.shutdown()
    if differs:  # The change is one that shows, on the same observations.
        assert not torch.equal(acts(policy, first["observation"]), first["action"])
    return second


def compare(batches, policy, around):
    with around():
        torch.manual_seed(7)
        batch = next(batches).clone()
        torch.manual_seed(7)
        expected = acts(policy, batch["observation"])
    assert torch.equal(batch["action"], expected)
    return batch


def acts(policy, observations):
    torch.manual_seed(7)
    rows = []
    with torch.no_grad():
        for row in observations.reshape(STEPS, 4):
            td = TensorDict({"observation": row.clone()}, [])
            out = policy(td)
            rows.append((td if out is None else out)["action"].clone())
    return torch.stack(rows).reshape(*observations.shape[:-1], 3)


def net(*middle, out=3):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), *middle, nn.Linear(8, out))
    return Mod(layers, ["observation"], ["action"])


def normal(kind=rl.IndependentNormal, head=NormalParamExtractor, out=6, **options):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, out), head())
    return ProbSeq(
        Mod(layers, ["observation"], ["loc", "scale"]),
        Prob(
            ["loc", "scale"],
            ["action"],
            distribution_class=kind,
            distribution_kwargs=options or None,
            return_log_prob=True,
        ),
    )


def put(path, value):
    """Return a change that sets the attribute at ``path``."""

    def change(policy):
        *way, name = path.split(".")
        for part in way:
            policy = getattr(policy, part)
        setattr(policy, name, value)

    return change


ACTIVATIONS = {
    "ReLU6": (nn.ReLU6, "max_val", 0.25),
    "Hardtanh": (nn.Hardtanh, "min_val", -0.25),
    "LeakyReLU": (nn.LeakyReLU, "negative_slope", 0.5),
    "ELU": (nn.ELU, "alpha", 0.5),
    "CELU": (nn.CELU, "alpha", 0.5),
    "Softplus": (nn.Softplus, "beta", 3.0),
    "GELU": (nn.GELU, "approximate", "tanh"),
    "Softmax": (partial(nn.Softmax, dim=-1), "dim", 0),
    "LayerNorm": (partial(nn.LayerNorm, 8), "eps", 10.0),
    "Dropout": (partial(nn.Dropout, 0.0), "p", 0.9),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_setting_of_a_layer(name):
    make, setting, value = ACTIVATIONS[name]
    batched = name != "Softmax"  # dim 0 of one observation is its last.
    check(net(make()), put(f"module.1.{setting}", value), differs=batched)


def test_a_number_that_is_a_tensor_changes_in_place():
    slope = torch.tensor(0.1)
    policy = net(nn.LeakyReLU(slope))
    check(policy, lambda p: slope.fill_(0.7))


@pytest.mark.parametrize("name", ["bias", "min_val"])
def test_a_setting_of_a_scale_mapping(name):
    check(normal(), put(f"0.module.1.scale_mapping.{name}", 2.0))


def test_a_scale_mapping_and_its_bound():
    check(normal(), put("0.module.1.scale_mapping", biased_softplus(3.0)))
    check(normal(), put("0.module.1.scale_lb", 5.0))
    scale = partial(AddStateIndependentNormalScale, 3)
    check(normal(head=scale, out=3), put("0.module.1.scale_lb", 5.0))


def fill(bound, how):
    return {
        "tensor": lambda p: bound.fill_(3.0),
        "data": lambda p: bound.data.fill_(3.0),
        "array": lambda p: bound.numpy().fill(3.0),
        "replaced": lambda p: setattr(bound, "data", torch.full((3,), 3.0)),
    }[how]


@pytest.mark.parametrize("how", ["tensor", "data", "array", "replaced"])
def test_bounds_changed_in_place(how):
    low, high = torch.full((3,), -2.0), torch.full((3,), 2.0)
    check(normal(rl.TanhNormal, low=low, high=high), fill(high, how))


def test_a_bound_in_a_dict_is_replaced():
    policy = normal(rl.TanhNormal, low=-2.0, high=2.0)
    check(policy, lambda p: p[1].distribution_kwargs.update(high=5.0))


class Own(D.Independent):
    def __init__(self, loc, scale):
        super().__init__(D.Normal(loc, scale), 1)


class Deciding(D.Independent):
    """Equal to `Own` for the first observations only."""

    def __init__(self, loc, scale):
        if loc.mean() > LIMIT[0]:
            scale = scale * 2
        super().__init__(D.Normal(loc, scale), 1)


LIMIT = [1e6]


def test_a_distribution_that_decides_by_its_parameters():
    try:
        check(normal(Deciding), lambda p: LIMIT.__setitem__(0, -1e6))
    finally:
        LIMIT[0] = 1e6


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("owner", [rl.IndependentNormal, rl.TanhNormal, TanhNormal, D.Normal, Own])
def test_a_method_of_a_distribution_is_patched(owner, when):
    policy = normal(rl.IndependentNormal if owner is D.Normal else owner)
    patches = mock.patch.object(owner, "rsample", doubling(owner.rsample))
    others = mock.patch.object(owner, "sample", doubling(owner.sample))
    if when == "before":
        with patches, others:
            check(policy, lambda p: None, differs=False)
        return
    try:
        check(policy, lambda p: (patches.start(), others.start()))
    finally:
        patches.stop()
        others.stop()


@pytest.mark.parametrize("turned", ["data", "view", "swapped"])
def test_a_weight_that_reads_the_same_memory_otherwise(turned):
    policy = Mod(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), ["observation"], ["action"])

    def change(p):
        weight = p.module[0].weight
        if turned == "data":
            weight.data = weight.data.t()
        elif turned == "view":
            weight.data = weight.data.as_strided((4, 4), (0, 1))
        else:
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))

    check(policy, change)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("how", ["in place", "replaced", "taken", "loaded"])
def test_weights_of_agents(how, stored, share):
    torch.manual_seed(0)
    agents = rl.MultiAgentMLP(
        2, 1, 3, centralized=False, share_params=share, use_td_params=stored, depth=0
    )
    layers = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(-1, (3, 2)), agents, nn.Flatten(-2))

    def change(p):
        doubled = {key: value.detach() * 2 for key, value in agents.params.items(True, True)}
        if how == "in place":
            agents.params.data.mul_(2)
        elif how == "replaced":
            agents.params.unlock_()
            for key, value in doubled.items():
                agents.params[key] = nn.Parameter(value)
        elif how == "taken":
            net = agents.get_stateful_net()
            net[0].weight.data.mul_(2)
            agents.from_stateful_net(net)
        else:
            agents.load_state_dict({k: v * 2 for k, v in agents.state_dict().items()})

    check(Mod(layers, ["observation"], ["action"]), change)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_replaced_weights_of_a_layer_that_takes_them_up_in_its_next_call(kind):
    torch.manual_seed(0)
    layer = kind(4, 4, batch_first=True)
    policy = Seq(
        Mod(nn.Sequential(nn.Linear(4, 8), nn.Unflatten(-1, (2, 4))), ["observation"], ["parts"]),
        Mod(layer, ["parts"], ["seen", "_"]),
        Mod(nn.Sequential(nn.Flatten(-2), nn.Linear(8, 3)), ["seen"], ["action"]),
    )

    def change(p):
        layer.weight_hh_l0 = nn.Parameter(layer.weight_hh_l0.detach() * 3)

    check(policy, change)


class Doubled(nn.Linear):
    def forward(self, value):
        return super().forward(value) * 2


class Keen(nn.Linear):
    """Overrides nothing but what reading its weight gives."""

    @property
    def weight(self):
        return self._parameters["weight"] * 2


@pytest.mark.parametrize("kind", [Doubled, Keen])
def test_a_class_is_swapped(kind):
    check(net(nn.Tanh()), lambda p: setattr(p.module[0], "__class__", kind))


def test_keys_change_in_place():
    policy = Seq(
        Mod(nn.Linear(4, 4), ["observation"], ["a"]),
        Mod(nn.Linear(4, 4), ["observation"], ["b"]),
        Mod(nn.Linear(4, 3), ["a"], ["action"]),
    )
    check(policy, lambda p: p[2].in_keys.__setitem__(0, "b"))


def doubling(function):
    def double(*args, **kwargs):
        out = function(*args, **kwargs)
        # What the environment shows stays as it is: it is delivered as the policy leaves it.
        return out.set("action", out["action"] * 2) if isinstance(out, TensorDict) else out * 2

    return double


PATCHED = {
    "a class's forward": (nn.Linear, "forward"),
    "every module's call": (nn.Module, "__call__"),
    "an override that was not there": (nn.Tanh, "__call__"),
    "a function": (torch.nn.functional, "linear"),
}


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("name", PATCHED)
def test_what_modules_call_is_patched(name, when):
    owner, method = PATCHED[name]
    policy = Policy(nn.Linear(4, 3), nn.Tanh()) if owner is nn.Module else net(nn.Tanh())
    new = doubling(getattr(owner, method))
    if when == "between":
        patches = mock.patch.object(owner, method, new)
        try:
            check(policy, lambda p: patches.start())
        finally:
            patches.stop()
    else:
        with mock.patch.object(owner, method, new):
            check(policy, lambda p: None, differs=False)


class Policy(nn.Module):
    """Takes and returns tensors."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, tensordict):
        return tensordict.set("action", self.layers(tensordict["observation"]) * 1)


def on_instance(name, wrap=doubling):
    def change(policy):
        layer = policy.module[0]
        setattr(layer, name, wrap(getattr(layer, name)))

    return change


@pytest.mark.parametrize("name", ["forward", "_call_impl"])
def test_a_method_of_an_instance_is_replaced(name):
    check(net(nn.Tanh()), on_instance(name))


def test_a_method_that_writes_is_replaced():
    def write(self, tensordict, tensors, *args, **kwargs):
        tensors = tuple(2 * one for one in tensors)
        return Mod._write_to_tensordict(self, tensordict, tensors, *args, **kwargs)

    check(net(), lambda p: setattr(p, "_write_to_tensordict", MethodType(write, p)))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.nn.functional.linear else out


def test_a_function_mode_is_in_force():
    check(net(nn.Tanh()), lambda p: None, around=Doubling, differs=False)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("wrap", ["spectral_norm", "weight_norm"])
@pytest.mark.parametrize("style", ["hooks", "parametrizations"])
def test_weights_that_are_computed(wrap, style):
    home = nn.utils if style == "hooks" else nn.utils.parametrizations

    def change(policy):
        getattr(home, wrap)(policy.module[0])
        policy.eval()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.5)

    check(net(nn.Tanh()), change)


def test_a_bound_method_as_distribution_changes_with_what_it_reads():
    class Maker:
        wide = 1.0

        def __call__(self, loc, scale):
            return Own(loc, scale * self.wide)

    maker = Maker()
    check(normal(maker), lambda p: setattr(maker, "wide", 3.0))


@pytest.mark.parametrize("where", ["module", "module.0"])
def test_a_module_that_holds_more_than_is_compared_is_called_as_it_is(where):
    policy = Seq(net(nn.Tanh()))
    policy[0].get_submodule(where).history = list(range(5000))
    policy.history = list(range(5000))
    check(policy, put("0.module.0.bias", nn.Parameter(torch.ones(8))))


# -- settings of torch: what plain calls give is what the fast path gives --------------------------

SETTINGS = {
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "default device": (torch.set_default_device, "cpu", None),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "anomaly": (torch.autograd.set_detect_anomaly, True, False),
    "gradients": (torch.set_grad_enabled, False, True),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    # TorchRL turned it off when it was imported.
    "validation": (D.Distribution.set_default_validate_args, True, False),
}


def recurrent():
    torch.manual_seed(0)
    return Seq(
        Mod(nn.GRUCell(4, 6), ["observation", "h"], [("next", "h")]),
        Mod(nn.Linear(6, 3), [("next", "h")], ["action"]),
    )


def written(batch):
    return {key: batch.get(key) for key in sorted(batch.keys(True, True), key=str)}


@pytest.mark.covering
@pytest.mark.parametrize("make", [normal, recurrent])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_torch_changes_between_batches(name, make):
    turn, on, off = SETTINGS[name]
    found = []
    for fast in (True, False):
        with Collector(Noise, make(), num_envs=2, frames_per_batch=8, fast=fast) as collector:
            collector.set_seed(0)
            found.append([])
            for setting, batch in zip((on, off, off), collector, strict=False):
                found[-1].append(written(batch.clone()))
                turn(setting)
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key])


@pytest.mark.parametrize("make", [normal, recurrent])
def test_autocast_between_batches_changes_dtypes_and_needs_an_open_layout(make):
    for fast in (True, False):
        with Collector(Noise, make(), num_envs=2, frames_per_batch=8, fast=fast) as collector:
            before = collector.rollout()["action"].dtype
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if not fast:
                    assert collector.rollout()["action"].dtype is torch.bfloat16
                    continue
                with pytest.raises(PolicyError, match="as torch.bfloat16.* wrote torch.float32"):
                    collector.rollout()
        assert before is torch.float32


def test_recording_a_draw_leaves_what_other_threads_use_as_it_is():
    seen = set()

    def look(frame, event, argument):
        seen.add((torch.initial_seed(), D.Distribution._validate_args))

    with Collector(Noise, normal(rl.TanhNormal), frames_per_batch=4) as collector:
        batches = iter(collector)
        sys.setprofile(look)
        try:
            next(batches)
        finally:
            sys.setprofile(None)
        assert "ProbabilisticTensorDictModule: tensor calls" in collector.explain()
    assert len(seen) == 1


@pytest.mark.parametrize("kind", [D.Laplace, D.LogNormal])
def test_distributions_of_libraries_need_no_list_to_be_recorded(kind):
    policy = normal(kind)
    check(policy, put("0.module.1.scale_mapping.bias", 2.0))
    with Collector(Noise, policy, frames_per_batch=4) as collector:
        assert "ProbabilisticTensorDictModule: tensor calls" in collector.explain()
