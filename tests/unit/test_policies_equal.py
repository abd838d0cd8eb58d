"""Every kind of policy gives what the plain call gives, and draws the same random numbers."""

from functools import partial

import pytest
import torch
from policies_rig import DETERMINISTIC, MEAN, MODE, RANDOM, layout, same, seed
from tensordict.nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModuleBase,
    WrapModule,
)
from tensordict.nn import OneHotCategorical as TensorDictOneHot
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from tests.covering import ALL
from torch import distributions as D
from torch import nn
from torchrl import modules as rl
from torchrl.data import Bounded, OneHot
from torchrl.data import Categorical as CategoricalSpec

from gleanrl import Collector, modules
from gleanrl.envs import GymEnv

ROWS = [(), (1,), (5,), (16,)]
# Environments with several batch dimensions are stepped on TensorDicts. What else reads an entry is
# not known there: functions of the user's, outputs that are selected, and results that share the
# memory of what was read are left as they are, and so is all that follows them. These parts become
# tensor calls all the same.
ON_TENSORDICTS = {
    "categorical-probs": 0,
    "categorical-grid": 0,
    "lambda-module": 0,
    "two-outputs": 0,
    "thrown-away": 0,
    "dict-out": 0,
    "selected": 0,
    "identity": 0,
}
# Their most likely action is ``loc``, in the same memory.
ACTS_BY_LOC = {
    "normal",
    "independent",
    "independent-safe",
    "normal-fixed-scale",
    "independent-free-scale",
}


def tensor_calls(name, lowered, batch, kind=RANDOM):
    """Return how many parts become tensor calls, ``lowered`` where steps lie in rows."""
    if len(batch) < 2:
        return lowered
    if kind is not RANDOM and name in ACTS_BY_LOC:
        return lowered - 1
    return ON_TENSORDICTS.get(name, lowered)


INT, PAIR = ((), torch.int64), ((2,), torch.int64)
FLOATS = ((3,), torch.float32)


def net(outs, *, ins=4, cells=8, kind=nn.Tanh):
    seed(0)
    return nn.Sequential(
        nn.Linear(ins, cells), kind(), nn.Linear(cells, cells), kind(), nn.Linear(cells, outs)
    )


def actor(params, cls, keys=("logits",), kwargs=None, log_prob=True, module=Prob, **extra):
    last = module(
        in_keys=list(keys),
        out_keys=["action"],
        distribution_class=cls,
        distribution_kwargs=kwargs or {},
        return_log_prob=log_prob,
        **extra,
    )
    return ProbSeq(Mod(params, in_keys=["observation"], out_keys=list(keys)), last)


def gaussian(cls, kwargs=None, **extra):
    params = nn.Sequential(*net(6), NormalParamExtractor())
    return actor(params, cls, ("loc", "scale"), kwargs, **extra)


class OwnNormal(D.Independent):
    def __init__(self, loc, scale):
        super().__init__(D.Normal(loc, scale), 1)


class Probs(nn.Module):
    def __init__(self, outs):
        super().__init__()
        self.net = net(outs)

    def forward(self, observation):
        return self.net(observation).exp()


class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(6)

    def forward(self, observation):
        return self.net(observation).unflatten(-1, (2, 3))


SAFE = rl.SafeProbabilisticModule


def noisy(low, *, clamp=False, **options):
    """Return a policy whose actions leave their bounds until they are clamped."""
    spec = Bounded(low, 2.0, (3,))
    tanh = rl.TanhModule(in_keys=["param"], out_keys=["action"], spec=spec, clamp=clamp)
    noise = rl.AdditiveGaussianModule(spec, 3.0, std=0.7, mean=0.1, **options)
    return Seq(Mod(net(3), ["observation"], ["param"]), tanh, noise)


def normals(library):
    """Return policies with the Gaussians of TorchRL or of GleanRL, which have the same names."""
    return {
        "independent": (
            lambda: gaussian(library.IndependentNormal),
            FLOATS,
            2,
            (RANDOM, MODE, MEAN, DETERMINISTIC),
        ),
        "independent-safe": (
            lambda: gaussian(library.IndependentNormal, module=SAFE),
            FLOATS,
            2,
            (RANDOM, DETERMINISTIC),
        ),
        "tanh-fixed-scale": (
            lambda: actor(net(3), library.TanhNormal, ("loc",), {"scale": 0.3}, module=SAFE),
            FLOATS,
            2,
            (RANDOM, DETERMINISTIC),
        ),
        "independent-free-scale": (
            lambda: actor(
                nn.Sequential(*net(3), AddStateIndependentNormalScale(3)),
                library.IndependentNormal,
                ("loc", "scale"),
            ),
            FLOATS,
            2,
            (RANDOM, MEAN),
        ),
        "tanh": (lambda: gaussian(library.TanhNormal), FLOATS, 2, (RANDOM, DETERMINISTIC)),
        "tanh-no-log-prob": (
            lambda: gaussian(library.TanhNormal, log_prob=False),
            FLOATS,
            2,
            (RANDOM,),
        ),
        "tanh-bounds": (
            lambda: gaussian(library.TanhNormal, {"low": -2.0, "high": 2.0}),
            FLOATS,
            2,
            (RANDOM, DETERMINISTIC),
        ),
        "tanh-tensor-bounds": (
            lambda: gaussian(
                library.TanhNormal, {"low": -torch.ones(3), "high": torch.arange(1.0, 4)}
            ),
            FLOATS,
            2,
            (RANDOM, DETERMINISTIC),
        ),
        "tanh-safe": (
            lambda: gaussian(library.TanhNormal, module=SAFE),
            FLOATS,
            2,
            (RANDOM, DETERMINISTIC),
        ),
        "tanh-safe-bounds": (
            lambda: gaussian(library.TanhNormal, {"low": -2.0, "high": 2.0}, module=SAFE),
            FLOATS,
            2,
            (RANDOM, DETERMINISTIC),
        ),
        "tanh-unsafe": (
            lambda: gaussian(library.TanhNormal, {"safe_tanh": False}),
            FLOATS,
            2,
            (RANDOM,),
        ),
        "tanh-located": (
            lambda: gaussian(library.TanhNormal, {"tanh_loc": True}),
            FLOATS,
            2,
            (RANDOM,),
        ),
    }


STOCHASTIC = {
    "categorical": (lambda: actor(net(3), D.Categorical), INT, 2, (RANDOM, MODE, DETERMINISTIC)),
    "categorical-no-log-prob": (
        lambda: actor(net(3), D.Categorical, log_prob=False),
        INT,
        2,
        (RANDOM,),
    ),
    "categorical-unchecked": (
        lambda: actor(net(3), D.Categorical, kwargs={"validate_args": False}),
        INT,
        2,
        (RANDOM,),
    ),
    "categorical-probs": (
        lambda: actor(Probs(3), D.Categorical, ("probs",)),
        INT,
        2,
        (RANDOM, MODE, DETERMINISTIC),
    ),
    "categorical-safe": (lambda: actor(net(3), D.Categorical, module=SAFE), INT, 2, (RANDOM, MODE)),
    "categorical-grid": (lambda: actor(Grid(), D.Categorical), PAIR, 2, (RANDOM, MODE)),
    "categorical-torchrl-actor": (
        lambda: rl.ProbabilisticActor(
            Mod(rl.MLP(in_features=4, out_features=3, num_cells=[8]), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=D.Categorical,
            return_log_prob=True,
        ),
        INT,
        2,
        (RANDOM, DETERMINISTIC),
    ),
    "one-hot-torch": (
        lambda: actor(net(3), D.OneHotCategorical),
        FLOATS,
        2,
        (RANDOM, MODE, DETERMINISTIC),
    ),
    "one-hot-tensordict": (
        lambda: actor(net(3), TensorDictOneHot),
        ((3,), torch.int64),
        2,
        (RANDOM, MODE, DETERMINISTIC),
    ),
    "one-hot-torchrl": (
        lambda: actor(net(3), rl.OneHotCategorical, module=SAFE),
        ((3,), torch.int64),
        2,
        (RANDOM, MODE, DETERMINISTIC),
    ),
    "normal": (lambda: gaussian(D.Normal), FLOATS, 2, (RANDOM, MODE, MEAN, DETERMINISTIC)),
    "independent-own": (lambda: gaussian(OwnNormal), FLOATS, 1, (RANDOM, DETERMINISTIC)),
    "normal-fixed-scale": (
        lambda: actor(net(3), D.Normal, ("loc",), {"scale": 0.3}),
        FLOATS,
        2,
        (RANDOM, MEAN),
    ),
    "function-distribution": (
        lambda: gaussian(lambda loc, scale: D.Independent(D.Normal(loc, scale), 1)),
        FLOATS,
        1,
        (RANDOM, MEAN),
    ),
    "truncated": (lambda: gaussian(rl.TruncatedNormal), FLOATS, 1, (RANDOM, DETERMINISTIC)),
    "noisy": (lambda: noisy(-0.5), FLOATS, 3, (RANDOM, MODE)),
    "noisy-clamped": (lambda: noisy(-0.5, clamp=True), FLOATS, 3, (RANDOM,)),
    "noisy-from-zero": (lambda: noisy(0.0), FLOATS, 2, (RANDOM,)),
    "noisy-with-hook": (lambda: noisy(-0.5, safe=True), FLOATS, 2, (RANDOM,)),
    "bernoulli": (lambda: actor(net(3), D.Bernoulli), FLOATS, 1, (RANDOM, MODE)),
}
STOCHASTIC |= normals(rl) | {f"{name}-ours": case for name, case in normals(modules).items()}
CASES = [
    pytest.param(name, kind, id=f"{name}-{kind.name}")
    for name, (_, _, _, kinds) in STOCHASTIC.items()
    for kind in kinds
]


@pytest.mark.covering
@pytest.mark.parametrize("batch", ROWS, ids=str)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_stochastic_policies_draw_what_the_plain_call_draws(name, kind, batch):
    draws_what_the_plain_call_draws(name, kind, batch)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        case
        for case in CASES
        if ALL or case.values[1] is RANDOM or case.values[0].removesuffix("-ours") in ACTS_BY_LOC
    ],
)
def test_so_do_they_on_several_batch_dimensions(name, kind):
    draws_what_the_plain_call_draws(name, kind, (2, 3))


def draws_what_the_plain_call_draws(name, kind, batch):
    build, action, lowered, _ = STOCHASTIC[name]
    _, count = same(build(), layout(batch, action), kind)
    assert count == tensor_calls(name.removesuffix("-ours"), lowered, batch, kind)


class Custom(TensorDictModuleBase):
    in_keys = ["observation"]
    out_keys = ["action", "extra"]

    def __init__(self, out_of_place=False):
        super().__init__()
        self.net = net(3)
        self.out_of_place = out_of_place

    def forward(self, tensordict):
        value = self.net(tensordict["observation"])
        out = tensordict.empty() if self.out_of_place else tensordict
        return out.set("action", value.argmax(-1)).set(("info", "extra"), value)


def in_place_function():
    inner = net(3)

    def policy(tensordict):
        tensordict["action"] = inner(tensordict["observation"]).argmax(-1)

    return policy


def out_of_place_function():
    inner = net(3)
    return lambda td: td.empty().set("action", inner(td["observation"]).argmax(-1))


def q_actor(spec, greedy=False):
    module = rl.QValueActor(net(3), in_keys=["observation"], spec=spec)
    if not greedy:
        return module
    return Seq(module, rl.EGreedyModule(spec=spec, eps_init=0.5))


def values():
    trunk = Mod(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), ["observation"], ["hidden"])
    head = SAFE(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=D.Categorical,
        return_log_prob=True,
    )
    policy = rl.SafeProbabilisticTensorDictSequential(
        Mod(nn.Linear(8, 3), ["hidden"], ["logits"]), head
    )
    return rl.ActorValueOperator(trunk, policy, rl.ValueOperator(nn.Linear(8, 1), ["hidden"]))


def composite():
    return ProbSeq(
        Mod(net(6), ["observation"], [("params", "action", "logits")]),
        Prob(
            in_keys=["params"],
            out_keys=["action"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"action": D.Categorical}},
            return_log_prob=True,
        ),
    )


def agents(share, centralized=False):
    """Return a policy whose three agents each give one number."""
    torch.manual_seed(0)
    of_agents = rl.MultiAgentMLP(
        2, 1, 3, centralized=centralized, share_params=share, depth=1, num_cells=8
    )
    layers = (nn.Linear(4, 6), nn.Unflatten(-1, (3, 2)), of_agents, nn.Flatten(-2))
    return Mod(nn.Sequential(*layers), ["observation"], ["action"])


DETERMINED = {
    "linear": (lambda: Mod(nn.Linear(4, 3), ["observation"], ["action"]), FLOATS, 1),
    "no-bias": (lambda: Mod(nn.Linear(4, 3, bias=False), ["observation"], ["action"]), FLOATS, 1),
    "torchrl-mlp": (
        lambda: Mod(
            rl.MLP(in_features=4, out_features=3, num_cells=[8]), ["observation"], ["action"]
        ),
        FLOATS,
        1,
    ),
    "torchrl-agents-shared": (partial(agents, True), FLOATS, 1),
    "torchrl-agents-apart": (partial(agents, False), FLOATS, 1),
    "torchrl-agents-centralized": (partial(agents, False, centralized=True), FLOATS, 1),
    "torchrl-agents-as-one": (partial(agents, True, centralized=True), FLOATS, 1),
    "activation-first": (
        lambda: Mod(nn.Sequential(nn.Tanh(), nn.Linear(4, 3)), ["observation"], ["action"]),
        FLOATS,
        1,
    ),
    "layer-norm": (
        lambda: Mod(
            nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.SiLU(), nn.Linear(8, 3), nn.GELU()),
            ["observation"],
            ["action"],
        ),
        FLOATS,
        1,
    ),
    "lambda-module": (
        lambda: Mod(lambda x: x[..., :3] * 2, ["observation"], ["action"]),
        FLOATS,
        1,
    ),
    "by-keyword": (
        lambda: Mod(nn.Linear(4, 3), in_keys={"input": "observation"}, out_keys=["action"]),
        FLOATS,
        1,
    ),
    "two-outputs": (
        lambda: Mod(
            lambda x: (x[..., :3], x.sum(-1)), ["observation"], ["action", ("info", "sum")]
        ),
        FLOATS,
        1,
    ),
    "thrown-away": (
        lambda: Mod(lambda x: (x, x[..., :3]), ["observation"], ["_", "action"]),
        FLOATS,
        1,
    ),
    "dict-out": (
        lambda: Mod(lambda x: {"action": x[..., :3]}, ["observation"], ["action"]),
        FLOATS,
        1,
    ),
    "out-of-place-module": (
        lambda: Mod(nn.Linear(4, 3), ["observation"], ["action"], inplace=False),
        FLOATS,
        1,
    ),
    "method": (
        lambda: Mod(nn.Linear(4, 3), ["observation"], ["action"], method="forward"),
        FLOATS,
        0,
    ),
    "private": (
        lambda: Seq(
            Mod(nn.Linear(4, 8), ["observation"], ["_hidden"]),
            Mod(nn.Linear(8, 3), ["_hidden"], ["action"]),
        ),
        FLOATS,
        2,
    ),
    "selected": (
        lambda: Seq(
            Mod(nn.Linear(4, 8), ["observation"], ["hidden"]),
            Mod(nn.Linear(8, 3), ["hidden"], ["action"]),
        ).select_out_keys("action"),
        FLOATS,
        2,
    ),
    "selected-inside": (
        lambda: Seq(
            Seq(
                Mod(nn.Linear(4, 8), ["observation"], ["hidden"]),
                Mod(nn.Linear(8, 8), ["hidden"], ["deep"]),
            ).select_out_keys("deep"),
            Mod(nn.Linear(8, 3), ["deep"], ["action"]),
        ),
        FLOATS,
        0,
    ),
    "selected-module": (
        lambda: Mod(lambda x: (x[..., :3], x), ["observation"], ["action", "all"]).select_out_keys(
            "action"
        ),
        FLOATS,
        0,
    ),
    "shared-activation": (
        lambda: Mod(
            (lambda act: nn.Sequential(nn.Linear(4, 8), act, nn.Linear(8, 3), act))(nn.Tanh()),
            ["observation"],
            ["action"],
        ),
        FLOATS,
        1,
    ),
    "inplace-relu-on-an-output": (
        lambda: Seq(
            Mod(nn.Linear(4, 8), ["observation"], ["hidden"]),
            Mod(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 3)), ["hidden"], ["action"]),
        ),
        FLOATS,
        1,
    ),
    "inplace-function-on-an-output": (
        lambda: Seq(
            Mod(nn.Linear(4, 8), ["observation"], ["hidden"]),
            Mod(lambda x: x.relu_()[..., :3] + 1, ["hidden"], ["action"]),
        ),
        FLOATS,
        1,
    ),
    "identity": (
        lambda: Seq(
            Mod(nn.Identity(), ["observation"], ["copy"]),
            Mod(nn.Linear(4, 3), ["copy"], ["action"]),
        ),
        FLOATS,
        2,
    ),
    "wrapped-function": (
        lambda: Seq(
            WrapModule(lambda td: td.set("scaled", td["observation"] * 2)),
            Mod(nn.Linear(4, 3), ["scaled"], ["action"]),
        ),
        FLOATS,
        0,
    ),
    "custom": (Custom, INT, 0),
    "custom-out-of-place": (lambda: Custom(out_of_place=True), INT, 0),
    "function-in-place": (in_place_function, INT, 0),
    "function-out-of-place": (out_of_place_function, INT, 0),
    "q-values": (lambda: q_actor(CategoricalSpec(3)), INT, 2),
    "q-values-one-hot": (lambda: q_actor(OneHot(3)), ((3,), torch.int64), 2),
    "actor-value": (values, INT, 4),
    "composite": (composite, INT, 1),
    "convolution": (
        lambda: Seq(
            Mod(lambda x: x.unflatten(-1, (1, 2, 2)), ["observation"], ["_pixels"]),
            Mod(
                nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Flatten(-3)),
                ["_pixels"],
                ["features"],
            ),
            Mod(nn.Linear(2, 3), ["features"], ["action"]),
        ),
        FLOATS,
        3,
    ),
    "float64": (
        lambda: Mod(net(3).double(), ["observation"], ["action"]),
        ((3,), torch.float64),
        1,
    ),
}


@pytest.mark.parametrize("name", DETERMINED)
def test_other_policies_give_what_the_plain_call_gives_on_several_batch_dimensions(name):
    if name == "convolution":
        pytest.skip("torch's convolutions take one batch dimension")
    gives_what_the_plain_call_gives(name, (2, 3))


@pytest.mark.covering
@pytest.mark.parametrize("batch", ROWS, ids=str)
@pytest.mark.parametrize("name", DETERMINED)
def test_other_policies_give_what_the_plain_call_gives(name, batch):
    if name == "convolution" and len(batch) != 1:
        batch = (5,)
    gives_what_the_plain_call_gives(name, batch)


def gives_what_the_plain_call_gives(name, batch):
    build, action, lowered = DETERMINED[name]
    dtype = torch.float64 if name == "float64" else torch.float32
    collected, count = same(build(), layout(batch, action, dtype=dtype))
    assert count == tensor_calls(name, lowered, batch)
    paths = [(key,) if isinstance(key, str) else key for key in collected.keys(True)]
    assert not any(part.startswith("_") for path in paths for part in path)


@pytest.mark.parametrize("batch", [(5,), ()], ids=str)
def test_exploration_modules_draw_what_the_plain_call_draws(batch):
    same(q_actor(CategoricalSpec(3), greedy=True), layout(batch, INT))


CHANGING = {
    "inplace-function": lambda: Seq(
        Mod(lambda x: x.mul_(2), ["observation"], ["observation"]),
        Mod(nn.Linear(3, 1), ["observation"], ["action"]),
    ),
    "inplace-tensordict": lambda: Seq(
        WrapModule(lambda td: (td["observation"].mul_(2), td)[1]),
        Mod(nn.Linear(3, 1), ["observation"], ["action"]),
    ),
    "overwritten": lambda: Seq(
        Mod(nn.Linear(3, 3), ["observation"], ["observation"]),
        Mod(nn.Linear(3, 1), ["observation"], ["action"]),
    ),
}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", CHANGING)
def test_policies_that_change_the_observation_give_what_a_plain_loop_gives(name, fast):
    policy, steps, env = CHANGING[name](), [], GymEnv("Pendulum-v1")
    env.set_seed(3)
    root = env.reset()
    for _ in range(6):
        with torch.no_grad():
            step, root = env.step_and_maybe_reset(policy(root))
        steps.append(step.clone())
    expected, env = torch.stack(steps), GymEnv("Pendulum-v1")
    env.set_seed(3)
    with Collector(env, policy, frames_per_batch=6, fast=fast) as collector:
        batch = next(iter(collector)).clone()
    assert set(batch.exclude("collector").keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert torch.equal(batch[key], expected[key]), key
