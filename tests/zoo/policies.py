"""The policies of the zoo, by name: factories, with what they fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    AddStateIndependentNormalScale,
    CompositeDistribution,
    EnsembleModule,
    InteractionType,
    NormalParamExtractor,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    WrapModule,
    dispatch,
    set_skip_existing,
)
from tensordict.nn import ProbabilisticTensorDictModule as Prob
from tensordict.nn import ProbabilisticTensorDictSequential as ProbSeq
from tensordict.nn import TensorDictModule as Mod
from tensordict.nn import TensorDictSequential as Seq
from tests.zoo.cases import Action, Environment, Policy
from torch import distributions as D
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from torchrl import data as specs
from torchrl import modules as rl

from gleanrl.modules import TanhNormal

POLICIES: dict[str, Policy] = {}


# -- what fits what -------------------------------------------------------------------------------


def anything(env: Environment) -> bool:
    """Whether `actor` can act: the action is one tensor whose kind is known."""
    return env.action.kind != "other"


def continuous(env: Environment) -> bool:
    return env.action.kind == "continuous" and env.action.dtype.is_floating_point


def floats(env: Environment) -> bool:
    return env.action.kind == "continuous" and env.action.dtype is torch.float32


def pushes(env: Environment) -> bool:
    """Whether the action is a vector of floats."""
    return floats(env) and len(env.action.shape) == 1


def index(env: Environment) -> bool:
    return env.action.kind == "index" and env.action.shape == () and "mask" not in env.tags


def onehot(env: Environment) -> bool:
    return env.action.kind == "onehot" and "mask" not in env.tags


def choice(env: Environment) -> bool:
    return index(env) or onehot(env)


def masked(env: Environment) -> bool:
    return "mask" in env.tags


def vector(env: Environment) -> bool:
    """Whether the observation is a vector of float32."""
    return env.dtype is torch.float32 and len(env.shape) == 1


def batched(env: Environment) -> bool:
    return len(env.batch) == 1


def tensordicts(env: Environment) -> bool:
    return "td" in env.tags


def picture(env: Environment) -> bool:
    return len(env.shape) == 3


def named(env: Environment) -> bool:
    """Whether the observation is at the root, named as an argument can be."""
    return isinstance(env.obs, str)


def both(*tests: Callable[[Environment], bool]) -> Callable[[Environment], bool]:
    return lambda env: all(test(env) for test in tests)


# -- parts ----------------------------------------------------------------------------------------


class Features(nn.Module):
    """Makes float32 vectors of whatever is observed."""

    def __init__(self, shape: Sequence[int]):
        super().__init__()
        self.dims = len(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(-1) if self.dims == 0 else x.flatten(-self.dims)
        return x.float()


class Choose(nn.Module):
    """Makes an action of numbers: the greedy one, or a bounded push."""

    def __init__(self, action: Action):
        super().__init__()
        self.action = action

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return pick(self.action, logits)


def pick(action: Action, logits: torch.Tensor) -> torch.Tensor:
    """Return an action of ``logits``."""
    batch = logits.shape[:-1]
    if action.kind == "continuous":
        value = (torch.tanh(logits) * action.scale).reshape((*batch, *action.shape))
        return value.to(action.dtype)
    if action.kind == "index":
        return logits.argmax(-1).reshape((*batch, *action.shape))
    if action.kind == "onehot":
        return nn.functional.one_hot(logits.argmax(-1), action.n).to(action.dtype)
    if action.kind == "multi":
        return torch.stack([part.argmax(-1) for part in logits.split(action.nvec, -1)], -1)
    return (logits > 0).to(action.dtype)


def body(env: Environment, outs: int | None = None, kind: Any = nn.Tanh, cells: int = 8) -> Any:
    """Return a small network on the observation, the same at every call."""
    torch.manual_seed(0)
    first = [] if vector(env) else [Features(env.shape)]
    outs = env.action.logits if outs is None else outs
    layers = [nn.Linear(max(env.size, 1), cells), kind(), nn.Linear(cells, outs)]
    return nn.Sequential(*first, *layers)


def mod(module: Any, ins: Any, outs: Any, **kwargs: Any) -> Mod:
    ins = ins if isinstance(ins, list) else [ins]
    return Mod(module, in_keys=ins, out_keys=outs if isinstance(outs, list) else [outs], **kwargs)


def logits(env: Environment, name: str = "logits") -> Mod:
    return mod(body(env), env.obs, name)


def chooser(env: Environment, name: str = "logits") -> Mod:
    return mod(Choose(env.action), name, "action")


def actor(env: Environment) -> Seq:
    """Return the plainest policy: logits, and the action of them."""
    return Seq(logits(env), chooser(env))


def spec(env: Environment, batch: tuple[int, ...] | None = None) -> Any:
    """Return TorchRL's spec of the action, for a batch of environments."""
    action, shape = env.action, (*(env.batch if batch is None else batch), *env.action.shape)
    if action.kind == "index":
        return specs.Categorical(action.n, shape, dtype=action.dtype)
    if action.kind == "onehot":
        return specs.OneHot(action.n, shape, dtype=action.dtype)
    if action.kind == "multi":
        return specs.MultiCategorical(action.nvec, shape)
    if action.kind == "binary":
        return specs.Binary(shape[-1], shape, dtype=action.dtype)
    return specs.Bounded(-action.scale, action.scale, shape, dtype=action.dtype)


# -- changes between batches ----------------------------------------------------------------------
# Each is applied to every module of the policy (`nn.Module.apply`).


def own_weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of this module alone; `TensorDictParams` applies changes to its."""
    given = [module] if isinstance(module, torch.Tensor) else list(module._parameters.values())
    return [value for value in given if value is not None and value.is_floating_point()]


def scale_weights(module: nn.Module) -> None:
    with torch.no_grad():
        for value in own_weights(module):
            value.mul_(1.1)


def replace_weights(module: nn.Module) -> None:
    for value in own_weights(module):
        value.data = value.data + 0.03


def evaluate(module: nn.Module) -> None:
    if isinstance(module, nn.Module):
        module.training = False


def train(module: nn.Module) -> None:
    if isinstance(module, nn.Module):
        module.training = True


def damped(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 0.9


def hook(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.register_forward_hook(damped)


def bent(module: Any, args: tuple[torch.Tensor]) -> Any:
    return (args[0] + 0.01,)


def pre_hook(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.register_forward_pre_hook(bent)


def unhook(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


WEIGHTS = (scale_weights, replace_weights)
GENERIC = (scale_weights, hook, evaluate, replace_weights, train, pre_hook, unhook)


def setting(cls: Any, **values: Any) -> Callable[[nn.Module], None]:
    """Return a change that sets attributes of the modules of one class."""

    def change(module: nn.Module) -> None:
        if isinstance(module, cls):
            for name, value in values.items():
                setattr(module, name, value)

    return change


# -- registering ----------------------------------------------------------------------------------


def add(name: str, make: Callable, fits: Callable, changes: tuple = GENERIC, **more: Any) -> None:
    assert name not in POLICIES, name
    tags = frozenset(more.pop("tags", "").split())
    POLICIES[name] = Policy(name, make, fits, changes=changes, tags=tags, **more)


def policy(name: str, fits: Callable = anything, changes: tuple = GENERIC, **more: Any) -> Callable:
    """Register the decorated factory."""

    def register(make: Callable) -> Callable:
        add(name, make, fits, changes, **more)
        return make

    return register


# -- deterministic modules ------------------------------------------------------------------------

add("actor", actor, anything)
add(
    "actor-one-module",
    lambda env: mod(nn.Sequential(body(env), Choose(env.action)), env.obs, "action"),
    anything,
)
add(
    "rl-Actor",
    lambda env: rl.Actor(nn.Sequential(*body(env), Choose(env.action)), [env.obs]),
    anything,
)
add(
    "rl-Actor-spec",
    lambda env: rl.Actor(nn.Sequential(*body(env), Choose(env.action)), [env.obs], spec=spec(env)),
    anything,
)
add("sequence-nested", lambda env: Seq(Seq(Seq(logits(env))), Seq(chooser(env))), anything)
add(
    "sequence-selected",
    lambda env: Seq(logits(env), chooser(env), selected_out_keys=["action"]),
    anything,
)
add(
    "sequence-partial-tolerant",
    lambda env: Seq(
        logits(env), chooser(env), mod(nn.Identity(), "nowhere", "gone"), partial_tolerant=True
    ),
    anything,
)
add("module-wrapper", lambda env: TensorDictModuleWrapper(actor(env)), anything)
add(
    "select-out-keys",
    lambda env: Seq(mod(Two(env), env.obs, ["action", "spare"]).select_out_keys("action")),
    anything,
)
add("two-outputs", lambda env: mod(Two(env), env.obs, ["action", "spare"]), anything)
add("ignored-output", lambda env: mod(Two(env), env.obs, ["action", "_"]), anything)
add("private-output", lambda env: mod(Two(env), env.obs, ["action", "_spare"]), anything)
add("nested-output", lambda env: mod(Two(env), env.obs, ["action", ("policy", "spare")]), anything)
add("next-output", lambda env: mod(Two(env), env.obs, ["action", ("next", "spare")]), anything)
add(
    "in-keys-by-name",
    lambda env: Mod(ByName(env), in_keys={"x": env.obs}, out_keys=["action"]),
    anything,
)
add("wrap-module", lambda env: WrapModule(functools.partial(set_action, actor(env))), anything, ())
add(
    "SafeModule",
    lambda env: rl.SafeModule(
        nn.Sequential(*body(env), Choose(env.action)),
        [env.obs],
        ["action"],
        spec=spec(env),
        safe=True,
    ),
    both(anything, tensordicts),
)
add(
    "SafeSequential",
    lambda env: rl.SafeSequential(
        rl.SafeModule(body(env), [env.obs], ["logits"]),
        rl.SafeModule(Choose(env.action), ["logits"], ["action"]),
    ),
    anything,
)


class Two(nn.Module):
    """Returns the action and what it was made of."""

    def __init__(self, env: Environment):
        super().__init__()
        self.body, self.choose = body(env), Choose(env.action)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.body(x)
        return self.choose(out), out


class ByName(nn.Module):
    """Takes its input by keyword only."""

    def __init__(self, env: Environment):
        super().__init__()
        self.two = Two(env)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return self.two(x)[0]


def set_action(module: Any, td: TensorDictBase) -> TensorDictBase:
    return module(td)


# -- activations and layers -----------------------------------------------------------------------

ACTIVATIONS: dict[str, tuple[Any, tuple]] = {
    "Tanh": (nn.Tanh, ()),
    "ReLU": (nn.ReLU, ()),
    "ReLU-inplace": (lambda: nn.ReLU(inplace=True), ()),
    "ReLU6": (nn.ReLU6, (setting(nn.ReLU6, max_val=0.2),)),
    "ELU": (nn.ELU, (setting(nn.ELU, alpha=0.3),)),
    "SELU": (nn.SELU, ()),
    "CELU": (nn.CELU, (setting(nn.CELU, alpha=0.3),)),
    "GELU": (nn.GELU, (setting(nn.GELU, approximate="tanh"),)),
    "SiLU": (nn.SiLU, ()),
    "Mish": (nn.Mish, ()),
    "Sigmoid": (nn.Sigmoid, ()),
    "LogSigmoid": (nn.LogSigmoid, ()),
    "Hardtanh": (nn.Hardtanh, (setting(nn.Hardtanh, max_val=0.2),)),
    "Hardswish": (nn.Hardswish, ()),
    "Hardsigmoid": (nn.Hardsigmoid, ()),
    "Softplus": (nn.Softplus, (setting(nn.Softplus, beta=2.0),)),
    "Softsign": (nn.Softsign, ()),
    "Softmax": (lambda: nn.Softmax(-1), (setting(nn.Softmax, dim=0),)),
    "LeakyReLU": (nn.LeakyReLU, (setting(nn.LeakyReLU, negative_slope=0.5),)),
    "PReLU": (nn.PReLU, ()),
    "RReLU": (nn.RReLU, (setting(nn.RReLU, lower=0.3),)),
    "Threshold": (lambda: nn.Threshold(0.1, 0.0), (setting(nn.Threshold, threshold=0.3),)),
    "Softshrink": (nn.Softshrink, (setting(nn.Softshrink, lambd=0.1),)),
    "Hardshrink": (nn.Hardshrink, (setting(nn.Hardshrink, lambd=0.1),)),
    "Tanhshrink": (nn.Tanhshrink, ()),
    "LayerNorm": (lambda: nn.LayerNorm(8), (setting(nn.LayerNorm, eps=0.1),)),
    "RMSNorm": (lambda: nn.RMSNorm(8), ()),
    "Dropout": (lambda: nn.Dropout(0.3), (setting(nn.Dropout, p=0.6),)),
    "AlphaDropout": (lambda: nn.AlphaDropout(0.3), ()),
    "Identity": (nn.Identity, ()),
    "Unflatten": (lambda: nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.Flatten(-2)), ()),
    "Bilinear": (lambda: Squared(8), ()),
}
DRAWING = {"Dropout", "AlphaDropout", "RReLU"}


class Squared(nn.Module):
    """Feeds its input to a bilinear layer twice."""

    def __init__(self, n: int):
        super().__init__()
        self.layer = nn.Bilinear(n, n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


def with_activation(make: Any) -> Callable[[Environment], Any]:
    return lambda env: mod(
        nn.Sequential(*body(env, kind=make), Choose(env.action)), env.obs, "action"
    )


for name, (make, changes) in ACTIVATIONS.items():
    add(
        f"activation-{name}",
        with_activation(make),
        anything,
        (*changes, *GENERIC),
        draws=name in DRAWING,
        mixes=name == "Softmax",
    )


def replaced(change: Callable[[nn.Sequential], nn.Module]) -> Callable[[Environment], Any]:
    """Return a factory of an actor whose body was changed."""
    return lambda env: Seq(mod(change(body(env)), env.obs, "logits"), chooser(env))


def with_norm(cls: Any) -> Callable[[nn.Sequential], nn.Module]:
    return lambda net: nn.Sequential(*net[:-1], cls(8), net[-1])


def each_linear(function: Callable) -> Callable[[nn.Sequential], nn.Module]:
    def change(net: nn.Sequential) -> nn.Module:
        for layer in net:
            if isinstance(layer, nn.Linear):
                function(layer)
        return net

    return change


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def parametrized(layer: nn.Linear) -> None:
    parametrize.register_parametrization(layer, "weight", Doubled())


def hooked(net: nn.Sequential) -> nn.Module:
    net[-1].register_forward_hook(damped)
    net[-1].register_forward_pre_hook(bent)
    return net


def hooked_with_kwargs(net: nn.Sequential) -> nn.Module:
    def louder(module: Any, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * 1.5 + args[0].mean()

    net[-1].register_forward_hook(louder, with_kwargs=True)
    return net


def patched_forward(net: nn.Sequential) -> nn.Module:
    forward = net[-1].forward
    net[-1].forward = lambda x: forward(x) + 1
    return net


class LoudLinear(nn.Linear):
    """Overrides ``forward``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


class CallsTwice(nn.Sequential):
    """Overrides ``__call__``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x) + super().__call__(x * 0.5)


def loud(net: nn.Sequential) -> nn.Module:
    net[-1].__class__ = LoudLinear
    return net


def half_frozen(net: nn.Sequential) -> nn.Module:
    net[-1].bias = None
    net[-1].weight.requires_grad_(False)
    return net


def tied(net: nn.Sequential) -> nn.Module:
    more = nn.Linear(8, 8)
    more.weight = nn.Parameter(torch.eye(8) * 0.5)
    twice = nn.Linear(8, 8)
    twice.weight = more.weight
    return nn.Sequential(*net[:-1], more, twice, net[-1])


def transposed(net: nn.Sequential) -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight.data = layer.weight.data.t()
    return nn.Sequential(*net[:-1], layer, net[-1])


LAYERS: dict[str, tuple[Callable, dict[str, Any]]] = {
    "weight-norm": (each_linear(parametrizations.weight_norm), {}),
    "weight-norm-old": (each_linear(weight_norm), {}),
    "spectral-norm": (each_linear(parametrizations.spectral_norm), {"mixes": True}),
    "spectral-norm-old": (each_linear(spectral_norm), {"mixes": True}),
    "orthogonal": (each_linear(parametrizations.orthogonal), {}),
    "parametrized": (each_linear(parametrized), {}),
    "hooked": (hooked, {}),
    "hooked-kwargs": (hooked_with_kwargs, {"mixes": True}),
    "forward-patched": (patched_forward, {}),
    "class-swapped": (loud, {}),
    "frozen": (half_frozen, {}),
    "tied": (tied, {}),
    "transposed": (transposed, {}),
    "call-overridden": (lambda net: CallsTwice(*net), {}),
    "compiled-eager": (lambda net: torch.compile(net, backend="eager"), {"tags": "slow"}),
    "scripted": (torch.jit.script, {"changes": WEIGHTS}),
    "float64": (lambda net: nn.Sequential(*net[:-3], ToDouble(), *net[-3:].double()), {}),
    "residual": (lambda net: Residual(net), {}),
}
for name, (change, more) in LAYERS.items():
    add(f"layer-{name}", replaced(change), anything, **more)
add("BatchNorm", replaced(with_norm(nn.BatchNorm1d)), both(anything, batched), mixes=True)
add("BatchRenorm", replaced(with_norm(rl.BatchRenorm1d)), both(anything, batched), mixes=True)
add(
    "NoisyLinear",
    replaced(lambda net: nn.Sequential(*net[:-1], rl.NoisyLinear(8, net[-1].out_features))),
    anything,
)


class ToDouble(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double() if x.is_floating_point() else x


class Residual(nn.Module):
    """Adds a layer's input to its output."""

    def __init__(self, net: nn.Sequential):
        super().__init__()
        self.net, self.extra = net, nn.Linear(net[-1].out_features, net[-1].out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        return out + self.extra(out).relu_()


@policy("rl-MLP", both(anything, vector))
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    net = rl.MLP(
        env.size,
        env.action.logits,
        depth=2,
        num_cells=8,
        activation_class=nn.ELU,
        norm_class=nn.LayerNorm,
        norm_kwargs={"normalized_shape": 8},
    )
    return Seq(mod(net, env.obs, "logits"), chooser(env))


@policy("rl-ConvNet", both(anything, picture))
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    conv = rl.ConvNet(env.shape[0], depth=2, num_cells=[4, 4], kernel_sizes=2)
    with torch.no_grad():
        size = conv(torch.zeros(env.shape)).shape[-1]
    head = nn.Linear(size, env.action.logits)
    return Seq(mod(nn.Sequential(Scaled(), conv, head), env.obs, "logits"), chooser(env))


@policy("conv-plain", both(anything, picture))
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(env.shape[0], 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(-3))
    with torch.no_grad():
        size = conv(torch.zeros(env.shape)).shape[-1]
    net = nn.Sequential(Scaled(), conv, nn.Linear(size, env.action.logits))
    return Seq(mod(net, env.obs, "logits"), chooser(env))


@policy("rl-DuelingCnn", both(choice, picture))
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    cnn = {
        "in_features": env.shape[0],
        "num_cells": [4, 4],
        "kernel_sizes": [2, 2],
        "strides": [1, 1],
    }
    net = rl.DuelingCnnDQNet(env.action.n, 1, cnn, {"depth": 1, "num_cells": [8]})
    net(torch.zeros(1, *env.shape))
    return rl.QValueActor(nn.Sequential(Scaled(), net), in_keys=[env.obs], spec=spec(env, ()))


class Scaled(nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float() / 255


class FlatLazy(nn.LazyLinear):
    """Starts from the same weights whatever the random stream."""

    def reset_parameters(self) -> None:
        if not self.has_uninitialized_params() and self.in_features != 0:
            with torch.no_grad():
                self.weight.copy_(torch.linspace(-1, 1, self.weight.numel()).view_as(self.weight))
                self.bias.fill_(0.1)


add(
    "lazy",
    lambda env: Seq(
        mod(
            nn.Sequential(Features(env.shape), FlatLazy(8), nn.Tanh(), FlatLazy(env.action.logits)),
            env.obs,
            "logits",
        ),
        chooser(env),
    ),
    anything,
    WEIGHTS,
)


@policy("ensemble")
def _(env: Environment) -> Any:
    return Ensemble(env)


class Ensemble(TensorDictModuleBase):
    """Acts by the mean of three networks."""

    def __init__(self, env: Environment):
        super().__init__()
        one = logits(env)
        self.many, self.choose = EnsembleModule(one, num_copies=3), chooser(env)
        self.in_keys, self.out_keys = [env.obs], ["logits", "action"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        out = self.many(td.select(*self.in_keys))
        return self.choose(td.set("logits", out["logits"].mean(0)))


@policy("functorch", changes=())
def _(env: Environment) -> Any:
    net = body(env)
    params = {name: torch.stack([value, value * 0.5]) for name, value in net.named_parameters()}

    def call(x: torch.Tensor) -> torch.Tensor:
        one = torch.func.functional_call
        return torch.vmap(lambda p: one(net, p, (x,)))(params).mean(0)

    return Seq(mod(call, env.obs, "logits"), chooser(env))


@policy("rl-VmapModule", both(anything, batched))
def _(env: Environment) -> Any:
    return Seq(rl.VmapModule(logits(env), 0), chooser(env))


# -- probabilistic --------------------------------------------------------------------------------


def gaussian(cls: Any, kwargs: dict | None = None, module: Any = Prob, **extra: Any) -> Callable:
    def make(env: Environment) -> Any:
        net = nn.Sequential(*body(env, 2 * env.action.logits), NormalParamExtractor())
        head = module(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=cls,
            distribution_kwargs=kwargs or {},
            **extra,
        )
        return ProbSeq(mod(net, env.obs, ["loc", "scale"]), head)

    return make


class OwnNormal(D.Independent):
    """A distribution of a user's own."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor):
        if loc.mean() > 0:
            scale = scale.clamp(max=0.7)
        super().__init__(D.Normal(loc, scale), 1)


def beta(loc: torch.Tensor, scale: torch.Tensor) -> D.Distribution:
    return D.Independent(D.Beta(loc.abs() + 1, scale + 1), 1)


softer = setting(NormalParamExtractor, scale_lb=0.3)
GAUSSIANS: dict[str, Callable] = {
    "Normal": gaussian(D.Normal),
    "Normal-log-prob": gaussian(D.Normal, return_log_prob=True),
    "IndependentNormal": gaussian(rl.IndependentNormal, return_log_prob=True),
    "IndependentNormal-tanh-loc": gaussian(
        rl.IndependentNormal, {"tanh_loc": True, "upscale": 2.0}
    ),
    "TanhNormal": gaussian(rl.TanhNormal, return_log_prob=True),
    "TanhNormal-no-log-prob": gaussian(rl.TanhNormal),
    "TanhNormal-bounds": gaussian(rl.TanhNormal, {"low": -0.5, "high": 2.0}, return_log_prob=True),
    "TanhNormal-tanh-loc": gaussian(rl.TanhNormal, {"tanh_loc": True, "upscale": 3.0}),
    "TanhNormal-unsafe": gaussian(rl.TanhNormal, {"safe_tanh": False}, return_log_prob=True),
    "TanhNormal-event": gaussian(rl.TanhNormal, {"event_dims": 0}, return_log_prob=True),
    "TanhNormal-ours": gaussian(TanhNormal, {"low": -0.5, "high": 2.0}, return_log_prob=True),
    "TruncatedNormal": gaussian(rl.TruncatedNormal, return_log_prob=True),
    "TruncatedNormal-tanh-loc": gaussian(rl.TruncatedNormal, {"tanh_loc": True}),
    "LogNormal": gaussian(D.LogNormal),
    "Uniform": gaussian(lambda loc, scale: D.Uniform(loc, loc + scale)),
    "Laplace": gaussian(D.Laplace),
    "Gumbel": gaussian(D.Gumbel),
    "StudentT": gaussian(lambda loc, scale: D.StudentT(3.0, loc, scale)),
    "Beta": gaussian(beta),
    "Transformed": gaussian(
        lambda loc, scale: D.TransformedDistribution(D.Normal(loc, scale), [D.TanhTransform()])
    ),
    "OwnNormal": gaussian(OwnNormal, return_log_prob=True),
    "mean": gaussian(rl.IndependentNormal, default_interaction_type=InteractionType.MEAN),
    "deterministic-default": gaussian(
        rl.TanhNormal, default_interaction_type=InteractionType.DETERMINISTIC
    ),
    "cached": gaussian(rl.IndependentNormal, cache_dist=True, return_log_prob=True),
    "Safe": gaussian(rl.TanhNormal, module=rl.SafeProbabilisticModule, return_log_prob=True),
}
for name, make in GAUSSIANS.items():
    add(f"gaussian-{name}", make, pushes, (softer, *GENERIC), draws=True)


def tensor_bounds(env: Environment) -> Any:
    kwargs = {"low": torch.full(env.action.shape, -1.0), "high": torch.full(env.action.shape, 1.0)}
    return gaussian(rl.TanhNormal, kwargs, return_log_prob=True)(env)


def move_bounds(module: nn.Module) -> None:
    if isinstance(module, Prob):
        module.distribution_kwargs["high"].mul_(1.5)


add("gaussian-TanhNormal-tensor-bounds", tensor_bounds, pushes, (move_bounds, *GENERIC), draws=True)


@policy("ProbabilisticActor", pushes, draws=True)
def _(env: Environment) -> Any:
    net = nn.Sequential(*body(env, 2 * env.action.logits), NormalParamExtractor())
    return rl.ProbabilisticActor(
        mod(net, env.obs, ["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=spec(env),
        distribution_class=rl.TanhNormal,
        return_log_prob=True,
    )


@policy("ProbabilisticActor-nested-keys", pushes, draws=True)
def _(env: Environment) -> Any:
    net = nn.Sequential(*body(env, 2 * env.action.logits), NormalParamExtractor())
    keys = [("params", "loc"), ("params", "scale")]
    return rl.ProbabilisticActor(
        mod(net, env.obs, keys),
        in_keys={"loc": keys[0], "scale": keys[1]},
        distribution_class=rl.TanhNormal,
        return_log_prob=True,
        log_prob_key="lp",
    )


@policy("Delta", pushes)
def _(env: Environment) -> Any:
    return rl.ProbabilisticActor(
        mod(body(env), env.obs, "param"), in_keys=["param"], distribution_class=rl.Delta
    )


@policy("TanhDelta", pushes)
def _(env: Environment) -> Any:
    return rl.ProbabilisticActor(
        mod(body(env), env.obs, "param"),
        in_keys=["param"],
        distribution_class=rl.TanhDelta,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )


@policy("state-independent-scale", pushes, draws=True)
def _(env: Environment) -> Any:
    scale = AddStateIndependentNormalScale(env.action.logits)
    return ProbSeq(
        mod(nn.Sequential(body(env), scale), env.obs, ["loc", "scale"]),
        Prob(["loc", "scale"], ["action"], distribution_class=rl.IndependentNormal),
    )


def categorical(cls: Any, **extra: Any) -> Callable[[Environment], Any]:
    def make(env: Environment) -> Any:
        head = Prob(["logits"], ["action"], distribution_class=cls, **extra)
        return ProbSeq(logits(env), head)

    return make


INDICES: dict[str, Callable] = {
    "Categorical": categorical(D.Categorical),
    "Categorical-log-prob": categorical(D.Categorical, return_log_prob=True),
    "Categorical-mode": categorical(D.Categorical, default_interaction_type=InteractionType.MODE),
    "Categorical-partial": categorical(functools.partial(D.Categorical, validate_args=False)),
}
for name, make in INDICES.items():
    add(name, make, index, draws=True)
add(
    "OneHotCategorical", categorical(rl.OneHotCategorical, return_log_prob=True), onehot, draws=True
)
add("torch-OneHotCategorical", categorical(D.OneHotCategorical), onehot, draws=True)


@policy("Categorical-probs", index, draws=True)
def _(env: Environment) -> Any:
    net = nn.Sequential(*body(env), nn.Softmax(-1))
    return ProbSeq(
        mod(net, env.obs, "probs"),
        Prob(["probs"], ["action"], distribution_class=D.Categorical, return_log_prob=True),
    )


def scored(cls: Any) -> Callable[[Environment], Any]:
    return lambda env: ProbSeq(
        logits(env, "scores"),
        Prob(["scores"], ["action"], distribution_class=cls, return_log_prob=True),
    )


add("Ordinal", scored(rl.Ordinal), index, draws=True)
add("OneHotOrdinal", scored(rl.OneHotOrdinal), onehot, draws=True)


def with_mask(cls: Any, fits: Callable) -> tuple[Callable, Callable]:
    def make(env: Environment) -> Any:
        head = Prob(
            {"logits": "logits", "mask": "action_mask"},
            ["action"],
            distribution_class=cls,
            return_log_prob=True,
        )
        return ProbSeq(logits(env), head)

    return make, both(masked, fits)


def kind_is(kind: str) -> Callable[[Environment], bool]:
    return lambda env: env.action.kind == kind


add("MaskedCategorical", *with_mask(rl.MaskedCategorical, kind_is("index")), draws=True)
add(
    "MaskedOneHotCategorical", *with_mask(rl.MaskedOneHotCategorical, kind_is("onehot")), draws=True
)


@policy(
    "multi-Bernoulli",
    lambda env: env.action.kind == "binary" and env.action.dtype is torch.int8,
    draws=True,
)
def _(env: Environment) -> Any:
    return Seq(
        ProbSeq(logits(env), Prob(["logits"], ["bits"], distribution_class=D.Bernoulli)),
        mod(ToInt8(), "bits", "action"),
    )


class ToInt8(nn.Module):
    def forward(self, bits: torch.Tensor) -> torch.Tensor:
        return bits.to(torch.int8)


@policy("Composite", pushes, draws=True)
def _(env: Environment) -> Any:
    net = nn.Sequential(*body(env, 2 * env.action.logits), NormalParamExtractor())
    keys = [("params", "action", "loc"), ("params", "action", "scale")]
    return ProbSeq(
        mod(net, env.obs, keys),
        Prob(
            ["params"],
            ["action"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"action": rl.TanhNormal}},
        ),
    )


@policy("Composite-two", pushes, draws=True)
def _(env: Environment) -> Any:
    parts = mod(
        TwoHeads(env),
        env.obs,
        [("params", "action", "loc"), ("params", "action", "scale"), ("params", "side", "logits")],
    )
    maps = {"action": rl.IndependentNormal, "side": D.Categorical}
    return ProbSeq(
        parts,
        Prob(
            ["params"],
            ["action", "side"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": maps},
            return_log_prob=False,
        ),
    )


class TwoHeads(nn.Module):
    def __init__(self, env: Environment):
        super().__init__()
        self.net = nn.Sequential(*body(env, 2 * env.action.logits), NormalParamExtractor())
        self.side = body(env, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (*self.net(x), self.side(x))


@policy("two-samples", index, draws=True)
def _(env: Environment) -> Any:
    one = Prob(
        ["logits"],
        ["guess"],
        distribution_class=D.Categorical,
        return_log_prob=True,
        log_prob_key="g",
    )
    two = Prob(["logits"], ["action"], distribution_class=D.Categorical)
    return Seq(logits(env), one, two)


# -- values ---------------------------------------------------------------------------------------


def value(env: Environment) -> Any:
    return rl.ValueOperator(body(env, 1), in_keys=[env.obs])


add("ValueOperator-beside", lambda env: Seq(actor(env), value(env)), anything)
add("ActorCriticWrapper", lambda env: rl.ActorCriticWrapper(actor(env), value(env)), anything)


@policy("ActorValueOperator")
def _(env: Environment) -> Any:
    common = mod(body(env, 8), env.obs, "hidden")
    torch.manual_seed(1)
    head = Seq(mod(nn.Linear(8, env.action.logits), "hidden", "logits"), chooser(env))
    return rl.ActorValueOperator(
        common, head, rl.ValueOperator(nn.Linear(8, 1), in_keys=["hidden"])
    )


@policy("ActorCriticOperator", pushes)
def _(env: Environment) -> Any:
    common = mod(body(env, 8), env.obs, "hidden")
    torch.manual_seed(1)
    head = Seq(mod(nn.Linear(8, env.action.logits), "hidden", "action"))
    critic = rl.ValueOperator(
        rl.MLP(8 + env.action.logits, 1, depth=0), in_keys=["hidden", "action"]
    )
    return rl.ActorCriticOperator(common, head, critic)


@policy("QValueActor", choice)
def _(env: Environment) -> Any:
    return rl.QValueActor(body(env), in_keys=[env.obs], spec=spec(env, ()))


@policy("QValueModule", choice)
def _(env: Environment) -> Any:
    kind = {"index": "categorical", "onehot": "one_hot"}[env.action.kind]
    return Seq(mod(body(env), env.obs, "action_value"), rl.QValueModule(action_space=kind))


@policy("QValueActor-masked", masked)
def _(env: Environment) -> Any:
    return rl.QValueActor(
        body(env), in_keys=[env.obs], spec=spec(env, ()), action_mask_key="action_mask"
    )


@policy("DistributionalQValueActor", both(choice, vector))
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    net = rl.MLP(env.size, (5, env.action.n), depth=1, num_cells=8)
    return rl.DistributionalQValueActor(
        net, support=torch.linspace(-1, 1, 5), in_keys=[env.obs], spec=spec(env, ())
    )


# -- exploration ----------------------------------------------------------------------------------


def count_down(module: nn.Module) -> None:
    if isinstance(
        module, (rl.EGreedyModule, rl.AdditiveGaussianModule, rl.OrnsteinUhlenbeckProcessModule)
    ):
        module.step(3)


def exploring(make: Callable[[Environment], Any]) -> Callable[[Environment], Any]:
    return lambda env: Seq(actor(env), make(env))


add(
    "EGreedy",
    exploring(lambda env: rl.EGreedyModule(spec(env), 0.5, 0.1, 10)),
    lambda env: choice(env) or env.action.kind == "multi",
    (count_down, *GENERIC),
    draws=True,
)
add(
    "EGreedy-masked",
    lambda env: Seq(
        rl.QValueActor(
            body(env), in_keys=[env.obs], spec=spec(env, ()), action_mask_key="action_mask"
        ),
        rl.EGreedyModule(spec(env), 0.5, 0.1, 10, action_mask_key="action_mask"),
    ),
    masked,
    (count_down, *GENERIC),
    draws=True,
)
add(
    "AdditiveGaussian",
    exploring(lambda env: rl.AdditiveGaussianModule(spec(env), 0.5, 0.1, 10)),
    pushes,
    (count_down, *GENERIC),
    draws=True,
)
add(
    "AdditiveGaussian-safe",
    exploring(lambda env: rl.AdditiveGaussianModule(spec(env), 0.5, safe=True)),
    pushes,
    (count_down, *GENERIC),
    draws=True,
)
add(
    "OrnsteinUhlenbeck",
    exploring(lambda env: rl.OrnsteinUhlenbeckProcessModule(spec(env), annealing_num_steps=10)),
    pushes,
    (count_down, *GENERIC),
    draws=True,
    mixes=True,
)
add(
    "OrnsteinUhlenbeck-unsafe",
    exploring(lambda env: rl.OrnsteinUhlenbeckProcessModule(spec(env), sigma=1.0, safe=False)),
    pushes,
    (count_down, *GENERIC),
    draws=True,
    mixes=True,
)


@policy("gSDE", both(pushes, vector), draws=True, is_init=True, mixes=True)
def _(env: Environment) -> Any:
    return Seq(GSDE(env))


class GSDE(TensorDictModuleBase):
    """State-dependent exploration: a noise matrix kept at the root and redrawn at resets."""

    def __init__(self, env: Environment):
        super().__init__()
        self.net, self.size = body(env), (env.size, env.action.logits)
        self.obs, self.choose = env.obs, Choose(env.action)
        self.in_keys, self.out_keys = [env.obs, "is_init", "_eps"], ["action", "_eps"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        x, first = td[self.obs], td["is_init"]
        fresh = torch.randn(*td.batch_size, *self.size)
        held = td.get("_eps", None)
        eps = fresh if held is None else torch.where(first.unsqueeze(-1), fresh, held)
        noise = (x.unsqueeze(-2) @ eps).squeeze(-2)
        return td.set("_eps", eps).set("action", self.choose(self.net(x) + 0.1 * noise))


@policy("MultiStepActor", both(pushes, batched), is_init=True, mixes=True)
def _(env: Environment) -> Any:
    n = env.action.logits
    net = nn.Sequential(*body(env, 3 * n), nn.Unflatten(-1, (3, n)))
    return rl.MultiStepActorWrapper(mod(net, env.obs, "action"), n_steps=3)


add(
    "RandomPolicy",
    lambda env: rl.RandomPolicy(spec(env)),
    both(tensordicts, anything),
    (),
    draws=True,
)


# -- recurrent ------------------------------------------------------------------------------------


def recurrent(env: Environment) -> bool:
    return anything(env) and vector(env)


@policy("GRUModule", recurrent, WEIGHTS, states={"recurrent_state": (1, 8)}, is_init=True)
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    gru = rl.GRUModule(env.size, 8, in_key=env.obs, out_key="embed")
    return Seq(gru, mod(nn.Linear(8, env.action.logits), "embed", "logits"), chooser(env))


@policy(
    "LSTMModule",
    recurrent,
    WEIGHTS,
    states={"recurrent_state_h": (1, 8), "recurrent_state_c": (1, 8)},
    is_init=True,
)
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    lstm = rl.LSTMModule(env.size, 8, in_key=env.obs, out_key="embed")
    return Seq(lstm, mod(nn.Linear(8, env.action.logits), "embed", "logits"), chooser(env))


class Cell(nn.Module):
    def __init__(self, env: Environment):
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.GRUCell(max(env.size, 1), 8)
        self.features = Features(env.shape)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        flat = self.cell(x.reshape(-1, x.shape[-1]), h.reshape(-1, 8))
        return flat.reshape(*x.shape[:-1], 8)


@policy("own-GRU", states={"hidden": (8,)})
def _(env: Environment) -> Any:
    cell = Mod(Cell(env), in_keys=[env.obs, "hidden"], out_keys=[("next", "hidden")])
    return Seq(
        cell, mod(nn.Linear(8, env.action.logits), ("next", "hidden"), "logits"), chooser(env)
    )


@policy("own-GRU-at-root", mixes=True)
def _(env: Environment) -> Any:
    return RootState(env)


class RootState(TensorDictModuleBase):
    """Keeps its state at the root, where it begins with ones of its own."""

    def __init__(self, env: Environment):
        super().__init__()
        self.cell, self.obs = Cell(env), env.obs
        self.out, self.choose = nn.Linear(8, env.action.logits), Choose(env.action)
        self.in_keys, self.out_keys = [env.obs], ["action", "state_value"]

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        before = td.get("memory", None)
        before = torch.ones(*td.batch_size, 8) if before is None else before
        after = self.cell(td[self.obs], before)
        return td.set("memory", after).set("action", self.choose(self.out(after)))


# -- functions and classes ------------------------------------------------------------------------


def function(env: Environment) -> Any:
    net, action = body(env), env.action

    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", pick(action, net(td[env.obs])))

    return act


def returns_none(env: Environment) -> Any:
    act = function(env)

    def policy(td: TensorDictBase) -> None:
        act(td)

    return policy


def returns_new(env: Environment) -> Any:
    net, action = body(env), env.action

    def policy(td: TensorDictBase) -> TensorDictBase:
        out = pick(action, net(td[env.obs]))
        return TensorDict({"action": out, "note": out.float() * 2}, batch_size=td.batch_size)

    return policy


def returns_copy(env: Environment) -> Any:
    act = function(env)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return act(td.copy())

    return policy


def returns_clone(env: Environment) -> Any:
    act = function(env)

    def policy(td: TensorDictBase) -> TensorDictBase:
        return act(td.clone())

    return policy


def on_tensors(env: Environment) -> Any:
    net, action = body(env), env.action

    def act(observation: torch.Tensor) -> torch.Tensor:
        return pick(action, net(observation))

    return act


class OnTensors(nn.Module):
    def __init__(self, env: Environment):
        super().__init__()
        self.two = Two(env)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.two(observation)[0]


class Callable_:
    """Not a module; holds one."""

    def __init__(self, env: Environment):
        self.act = function(env)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        return self.act(td)

    def method(self, td: TensorDictBase) -> TensorDictBase:
        return self.act(td)


ON_TD: dict[str, Callable] = {
    "function": function,
    "function-none": returns_none,
    "function-new": returns_new,
    "function-copy": returns_copy,
    "function-clone": returns_clone,
    "callable-object": Callable_,
    "bound-method": lambda env: Callable_(env).method,
    "partial": lambda env: functools.partial(lambda module, td: module(td), actor(env)),
    "lambda": lambda env: (lambda module: lambda td: module(td))(actor(env)),
}


for name, make in ON_TD.items():
    add(name, make, anything, ())


def observed(env: Environment) -> bool:
    return anything(env) and env.obs == "observation"


add("function-tensors", on_tensors, observed, (), outs=("action",))
add("module-tensors", OnTensors, observed, outs=("action",))
add(
    "lambda-tensors",
    lambda env: (lambda act: lambda observation: act(observation))(on_tensors(env)),
    observed,
    (),
    outs=("action",),
)
add(
    "sequential-tensors",
    lambda env: nn.Sequential(*body(env), Choose(env.action)),
    observed,
    outs=("action",),
)


class Undeclared(TensorDictModuleBase):
    """Declares neither inputs nor outputs."""

    def __init__(self, env: Environment):
        super().__init__()
        self.two, self.obs = Two(env), env.obs

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        action, out = self.two(td.get(self.obs))
        return td.set("action", action).set("note", out)


add("undeclared", Undeclared, anything)


class ModuleOnTD(nn.Module):
    """A module that takes a TensorDict, of no TensorDict class."""

    def __init__(self, env: Environment):
        super().__init__()
        self.two, self.obs = Two(env), env.obs

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"], tensordict["note"] = self.two(tensordict[self.obs])
        return tensordict


add("module-on-td", ModuleOnTD, anything)


class Dispatched(TensorDictModuleBase):
    """Uses ``@dispatch`` and ``@set_skip_existing``."""

    def __init__(self, env: Environment):
        super().__init__()
        self.two, self.obs = Two(env), env.obs
        self.in_keys, self.out_keys = [env.obs], ["action", "note"]

    @dispatch
    @set_skip_existing(None)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["action"], tensordict["note"] = self.two(tensordict[self.obs])
        return tensordict


add("dispatched", Dispatched, anything)


# -- odd writers ----------------------------------------------------------------------------------


class Odd(TensorDictModuleBase):
    """A policy of which ``after`` changes the TensorDict once the action is in it."""

    def __init__(
        self, env: Environment, after: Callable[[Any, TensorDictBase], Any], before: Any = None
    ):
        super().__init__()
        self.two, self.env_obs, self.after, self.before = Two(env), env.obs, after, before
        self.in_keys, self.out_keys = [env.obs], ["action"]
        self.calls = 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        if self.before is not None:
            self.before(self, td)
        action, out = self.two(td[self.env_obs])
        td["action"], td["note"] = action, out
        result = self.after(self, td)
        return td if result is None else result


class After(TensorDictModuleBase):
    """A member of a sequence with one function; declares what it is told to."""

    def __init__(self, function: Callable, ins: Sequence[Any], outs: Sequence[Any]):
        super().__init__()
        self.function, self.in_keys, self.out_keys = function, list(ins), list(outs)
        self.calls = 0

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        self.function(self, td)
        return td


def clamp_action(self: Any, td: TensorDictBase) -> None:
    td["action"].clamp_(-0.05, 0.05)


def zero_some(self: Any, td: TensorDictBase) -> None:
    action = td["action"]
    action[td["note"].sum(-1) > 0] = 0


def count(self: Any, td: TensorDictBase) -> None:
    before = td.get("n", None)
    td["n"] = torch.zeros(td.batch_size) if before is None else before + 1


def count_private(self: Any, td: TensorDictBase) -> None:
    before = td.get("_n", None)
    td["_n"] = torch.zeros(td.batch_size) if before is None else before + 1
    td["counted"] = td["_n"] * 2


def count_itself(self: Any, td: TensorDictBase) -> None:
    td["call"] = torch.full(td.batch_size, float(self.calls))


def sometimes(self: Any, td: TensorDictBase) -> None:
    if self.calls > 4:
        td["late"] = td["note"] + 1


def sometimes_over(self: Any, td: TensorDictBase) -> None:
    if self.calls % 3 == 0:
        td["note"] = td["note"] * 0


def expanded(self: Any, td: TensorDictBase) -> None:
    td["wide"] = torch.full((1,), float(self.calls)).expand(*td.batch_size, 5)


def strided(self: Any, td: TensorDictBase) -> None:
    wide = torch.stack([td["note"], td["note"] + 1], -1)
    td["strided"] = wide[..., 0]


def wrong_dtype(dtype: torch.dtype) -> Callable[[Any, TensorDictBase], None]:
    def after(self: Any, td: TensorDictBase) -> None:
        td["action"] = td["action"].to(dtype)

    return after


def needs_grad(self: Any, td: TensorDictBase) -> None:
    with torch.enable_grad():
        td["graph"] = self.two.body(td[self.env_obs]) * 2


def inference(self: Any, td: TensorDictBase) -> None:
    with torch.inference_mode():
        td["inferred"] = td["note"] * 3


def remembers(self: Any, td: TensorDictBase) -> None:
    old = getattr(self, "held", None)
    td["before"] = td["note"] if old is None else old["note"].reshape(td["note"].shape)
    self.held = td.clone(False)


def keeps_observation(self: Any, td: TensorDictBase) -> None:
    old = getattr(self, "kept", None)
    seen = td[self.env_obs]
    td["was"] = (seen if old is None else old).clone()
    self.kept = seen


def replaces_observation(self: Any, td: TensorDictBase) -> None:
    td[self.env_obs] = td[self.env_obs] * 2


def clamps_observation(self: Any, td: TensorDictBase) -> None:
    td[self.env_obs].clamp_(max=0)


def alias(self: Any, td: TensorDictBase) -> None:
    td["same"], td["view"] = td[self.env_obs], td["note"][..., :1]


def reads_last_action(self: Any, td: TensorDictBase) -> None:
    last = td.get("action", None)
    td["previous"] = torch.zeros(td.batch_size) if last is None else flat_sum(td, last)


def reads_done(self: Any, td: TensorDictBase) -> None:
    td["was_done"] = td["done"].float() + td["terminated"].float()


def flat_sum(td: TensorDictBase, value: torch.Tensor) -> torch.Tensor:
    return value.detach().float().reshape(*td.batch_size, -1).sum(-1)


def deletes(self: Any, td: TensorDictBase) -> None:
    td.pop("note")


def nested_write(self: Any, td: TensorDictBase) -> None:
    td["info"] = TensorDict({"a": td["note"], "b": {"c": td["note"] * 2}}, td.batch_size)


def non_tensor(self: Any, td: TensorDictBase) -> None:
    td.set_non_tensor("comment", f"call {self.calls}")


def global_random(self: Any, td: TensorDictBase) -> None:
    td["noise"] = torch.rand(td.batch_size)


def grows(self: Any, td: TensorDictBase) -> None:
    td["growing"] = torch.ones(*td.batch_size, self.calls)


def smaller_dtype(self: Any, td: TensorDictBase) -> None:
    td["narrow"] = td["note"].to([torch.float32, torch.float64][self.calls > 3])


ODD: dict[str, tuple[Callable, Callable, dict[str, Any]]] = {
    "clamps-action": (clamp_action, continuous, {}),
    "zeroes-some": (zero_some, both(anything, batched), {}),
    "counts": (count, anything, {"mixes": True}),
    "counts-privately": (count_private, anything, {"mixes": True}),
    "counts-itself": (count_itself, anything, {"mixes": True}),
    "sometimes": (sometimes, anything, {"mixes": True}),
    "sometimes-over": (sometimes_over, anything, {"mixes": True}),
    "expanded": (expanded, anything, {"mixes": True}),
    "strided": (strided, anything, {}),
    "float64-action": (wrong_dtype(torch.float64), both(floats, tensordicts), {}),
    "float16-action": (wrong_dtype(torch.float16), both(floats, tensordicts), {}),
    "int32-action": (wrong_dtype(torch.int32), both(index, tensordicts), {}),
    "bool-as-int64": (wrong_dtype(torch.int64), both(onehot, tensordicts), {}),
    "needs-grad": (needs_grad, anything, {}),
    "inference": (inference, anything, {}),
    "remembers": (remembers, anything, {"mixes": True}),
    "keeps-observation": (keeps_observation, anything, {"mixes": True}),
    "replaces-observation": (replaces_observation, vector, {}),
    "clamps-observation": (clamps_observation, vector, {}),
    "alias": (alias, anything, {}),
    "reads-done": (reads_done, anything, {}),
    "deletes": (deletes, anything, {}),
    "nested": (nested_write, anything, {}),
    "non-tensor": (non_tensor, anything, {"mixes": True}),
    "random": (global_random, anything, {"draws": True}),
    "grows": (grows, anything, {"mixes": True}),
    "changes-dtype": (smaller_dtype, anything, {"mixes": True}),
}


def odd(after: Callable) -> Callable[[Environment], Any]:
    return lambda env: Odd(env, after)


for name, (after, fits, more) in ODD.items():
    add(f"odd-{name}", odd(after), both(anything, fits), **more)
add(
    "odd-previous",
    lambda env: Odd(env, lambda self, td: None, reads_last_action),
    anything,
    mixes=True,
)


def member(after: Callable, ins: Sequence[Any] = (), outs: Sequence[Any] = ()) -> Callable:
    """Return a factory of a sequence that ends with a member that does ``after``."""
    return lambda env: Seq(mod(Two(env), env.obs, ["action", "note"]), After(after, ins, outs))


add("member-clamps-action", member(clamp_action, ["action"]), continuous)
add("member-zeroes-some", member(zero_some, ["action", "note"]), both(anything, batched))
add("member-counts", member(count, (), ["n"]), anything, mixes=True)
add("member-counts-undeclared", member(count), anything, mixes=True)
add("member-sometimes", member(sometimes, ["note"]), anything, mixes=True)
add("member-sometimes-over", member(sometimes_over, ["note"], ["note"]), anything, mixes=True)
add("member-deletes", member(deletes), anything)


@policy("member-clamps-observation", both(anything, vector))
def _(env: Environment) -> Any:
    def clamp(self: Any, td: TensorDictBase) -> None:
        td[env.obs].clamp_(max=0)

    return Seq(After(clamp, [env.obs], []), logits(env), chooser(env))


@policy("inplace-layer-on-observation", both(anything, vector))
def _(env: Environment) -> Any:
    return mod(
        nn.Sequential(nn.ReLU(inplace=True), *body(env), Choose(env.action)), env.obs, "action"
    )


# -- groups and compound actions ------------------------------------------------------------------


def agents(env: Environment) -> bool:
    return "agents" in env.tags and "different" not in env.tags


@policy("agents-shared", agents)
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    return mod(net, ("agents", "observation"), ("agents", "action"))


@policy("MultiAgentMLP", agents)
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    net = rl.MultiAgentMLP(3, 2, 3, centralized=True, share_params=False, depth=1, num_cells=8)
    return mod(net, ("agents", "observation"), ("agents", "action"))


@policy("agents-probabilistic", agents, draws=True)
def _(env: Environment) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), NormalParamExtractor())
    keys = [("agents", "loc"), ("agents", "scale")]
    return rl.ProbabilisticActor(
        mod(net, ("agents", "observation"), keys),
        in_keys=keys,
        out_keys=[("agents", "action")],
        distribution_class=rl.TanhNormal,
        return_log_prob=True,
    )


@policy("agents-different", lambda env: "different" in env.tags, ())
def _(env: Environment) -> Any:
    def act(td: TensorDictBase) -> TensorDictBase:
        parts = td["agents"].unbind(len(env.batch))
        for part in parts:
            part["action"] = part["observation"][..., :2] * 0.5
        return td

    return act


@policy("parts", lambda env: "parts" in env.tags)
def _(env: Environment) -> Any:
    move = mod(body(env, 2), env.obs, ("action", "move"))
    return Seq(
        move, mod(body(env, 3), env.obs, "turns"), mod(Greedy(), "turns", ("action", "turn"))
    )


@policy("pair", lambda env: "pair" in env.tags)
def _(env: Environment) -> Any:
    move = mod(body(env, 2), env.obs, ("action", "0"))
    return Seq(move, mod(body(env, 3), env.obs, "turns"), mod(Greedy(), "turns", ("action", "1")))


class Greedy(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1)


@policy("multi-onehot", lambda env: env.action.kind == "other" and env.action.dtype is torch.bool)
def _(env: Environment) -> Any:
    return mod(nn.Sequential(*body(env, 5), HotParts()), env.obs, "action")


class HotParts(nn.Module):
    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        parts = [nn.functional.one_hot(p.argmax(-1), p.shape[-1]) for p in logits.split([2, 3], -1)]
        return torch.cat(parts, -1).bool()


# -- settings that change inside a rollout, and caches --------------------------------------------


class SetsSlope(nn.Module):
    """Sets the slope of another module at every call, to one of three in turns."""

    def __init__(self, layer: nn.LeakyReLU):
        super().__init__()
        self.layer, self.calls = [layer], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer[0].negative_slope = (0.1, 0.5, 0.9)[self.calls % 3]
        self.calls += 1
        return x.clone()


@policy("sets-slope", anything, mixes=True)
def _(env: Environment) -> Any:
    net = body(env, kind=nn.LeakyReLU)
    slope = next(layer for layer in net if isinstance(layer, nn.LeakyReLU))
    sets = mod(SetsSlope(slope), env.obs, "seen")
    return Seq(sets, mod(net, "seen", "logits"), chooser(env))


class WritesWeight(nn.Module):
    """Makes another layer's weight of what is observed: a hypernetwork."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = [layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer[0].weight
        weight.data = x.mean() * torch.ones_like(weight)
        return x.clone()


@policy("hypernetwork", vector, mixes=True)
def _(env: Environment) -> Any:
    net = body(env)
    writes = mod(WritesWeight(net[0]), env.obs, "seen")
    return Seq(writes, mod(net, "seen", "logits"), chooser(env))


class KeepsWeight(nn.Module):
    """Uses a tensor made of its weight, made anew when that changed."""

    def __init__(self, env: Environment):
        super().__init__()
        self.net = body(env)
        self.kept: torch.Tensor | None = None
        self.version = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.net[-1].weight
        if self.kept is None or (id(weight), weight._version) != self.version:
            self.kept = weight.detach() * 0.5
            self.version = (id(weight), weight._version)
        return nn.functional.linear(self.net[:-1](x), self.kept)


@policy("keeps-derived-weight")
def _(env: Environment) -> Any:
    return Seq(mod(KeepsWeight(env), env.obs, "logits"), chooser(env))


class CachedParts(nn.Module):
    """Reads its parametrized weights within ``parametrize.cached()``."""

    def __init__(self, env: Environment):
        super().__init__()
        self.net = body(env)
        parametrizations.weight_norm(self.net[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.net(x) + self.net(x)


@policy("parametrize-cached", changes=(scale_weights, hook, evaluate, train, pre_hook, unhook))
def _(env: Environment) -> Any:
    return Seq(mod(CachedParts(env), env.obs, "logits"), chooser(env))
