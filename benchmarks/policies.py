"""Networks and policies: one set of weights, in the form each system wants."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, Independent, Normal

HIDDEN = 64


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Return a 64-64 Tanh network, the same weights at every call.

    The last layer starts small, as it does for PPO: actions are close to uniform, episodes as long
    as those of a random policy.
    """
    with torch.random.fork_rng(()):
        torch.manual_seed(0)
        last = nn.Linear(HIDDEN, outputs)
        nn.init.orthogonal_(last.weight, 0.01)
        nn.init.zeros_(last.bias)
        hidden = (nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        return nn.Sequential(*hidden, last)


class IndependentNormal(Independent):  # type: ignore[type-arg]
    """A diagonal normal with one log-probability per action vector."""

    def __init__(self, loc: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)


def categorical_policy(net: nn.Module) -> ProbabilisticTensorDictSequential:
    """Return the TensorDict policy over two or more discrete actions."""
    return _policy(net, ["logits"], Categorical)


def normal_module(net: nn.Module) -> nn.Sequential:
    """Return ``net`` with its output split into location and positive scale."""
    return nn.Sequential(net, NormalParamExtractor())


def normal_policy(module: nn.Module, distribution: type[Any]) -> ProbabilisticTensorDictSequential:
    """Return the TensorDict policy over continuous actions; ``module`` gives ``loc, scale``."""
    return _policy(module, ["loc", "scale"], distribution)


def _policy(
    module: nn.Module, keys: list[str], distribution: type[Any]
) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(module, in_keys=["observation"], out_keys=keys),
        ProbabilisticTensorDictModule(
            in_keys=keys,
            out_keys=["action"],
            distribution_class=distribution,
            return_log_prob=True,
        ),
    )


def atari_net() -> nn.Module:
    """Return the network of TorchRL's ``dqn_atari``, for stacks of four 84x84 images."""
    from torchrl.modules import MLP, ConvNet

    seen = ConvNet(4, None, [32, 64, 64], [8, 4, 3], [4, 2, 1], activation_class=nn.ReLU)
    return nn.Sequential(seen, MLP(3136, 6, num_cells=[512], activation_class=nn.ReLU))


def values_of_pixels(net: nn.Module) -> Any:
    """Return the policy of TorchRL's ``dqn_atari``: the action with the largest value."""
    from torchrl.data import Categorical, Composite
    from torchrl.modules import QValueActor

    return QValueActor(net, in_keys=["pixels"], spec=Composite(action=Categorical(6)))


def distribution(kind: str) -> type[Any]:
    """Return a diagonal normal: TorchRL's (``normal``, ``tanh``) or one of the user's (``own``)."""
    if kind == "own":
        return IndependentNormal
    from torchrl import modules

    found: type[Any] = {"normal": modules.IndependentNormal, "tanh": modules.TanhNormal}[kind]
    return found


NET = mlp(4, 2)
"""For CartPole."""
POLICY = categorical_policy(NET)
