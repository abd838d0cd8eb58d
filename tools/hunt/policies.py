"""Policies whose actions tell the weights and the observation that they were computed from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import nn
from torch.nn.utils import parametrize

from tools.hunt.worlds import GROUP, NUMBER, STEP, at_reset

MODES = {mode: float(at) for at, mode in enumerate(InteractionType)}


class Acting(nn.Module):
    """Acts with its tag, and with a function of the observation; both are one linear layer.

    Args:
        extra: The kind of the policy, where that asks for another output: see `make_policy`.
    """

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.extra = extra
        with torch.no_grad():
            self.layer.weight.zero_()
            self.layer.weight[1, NUMBER], self.layer.weight[1, STEP] = 1.0, 16.0
            self.layer.bias.zero_()
        if extra == "cached":
            nn.utils.parametrizations.weight_norm(self.layer, "bias", dim=-1)
            length, direction = self._bias()
            with torch.no_grad():
                length.zero_()
                direction.copy_(torch.tensor([1.0, 0.0]))

    def tag(self, version: int) -> None:
        """Make weights of ``version``."""
        with torch.no_grad():
            if self.extra == "cached":
                self._bias()[0].fill_(float(version))
            else:
                self.layer.bias[0] = float(version)

    def _bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return length and direction of a parametrized bias."""
        layer: Any = self.layer
        parts = layer.parametrizations.bias
        return parts.original0, parts.original1

    def forward(
        self,
        observation: torch.Tensor,
        hidden: torch.Tensor | None = None,
        is_init: torch.Tensor | None = None,
    ) -> Any:
        """Return the action; with memory also the steps since the reset, else perhaps a draw."""
        action = self.layer(observation)
        if hidden is not None:
            # Where it is asked for, the state is zeroed by the policy itself.
            begun = 0.0 if is_init is None else hidden * is_init
            return action, hidden - begun + 1
        if self.extra == "drawing":
            return action, torch.rand(observation.shape[:-1], device=observation.device)
        if self.extra == "typed":
            kind = interaction_type() or InteractionType.RANDOM
            return action, observation.new_full(observation.shape[:-1], MODES[kind])
        return action


class _Carrying(nn.Module):
    """Counts its calls in a root entry that it finds again at the next step."""

    in_keys = ("observation",)
    out_keys = ("action", "carried")

    def __init__(self, acting: Acting) -> None:
        super().__init__()
        self.acting = acting

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act, and count one more."""
        shown = tensordict["observation"]
        before = tensordict.get("carried", None)
        before = shown.new_zeros(shown.shape[:-1]) if before is None else before
        tensordict["action"], tensordict["carried"] = self.acting(shown), before + 1
        return tensordict


class _Numpy(nn.Module):
    """A policy that is called with a tensor and returns an array."""

    def __init__(self, acting: Acting) -> None:
        super().__init__()
        self.acting = acting

    def forward(self, observation: torch.Tensor) -> Any:
        """Return the action as an array."""
        return self.acting(observation).detach().cpu().numpy()


def make_policy(kind: str, env: str = "fresh") -> tuple[Any, Acting]:
    """Return a policy, and the module in it that has the weights.

    Args:
        kind: Of the policy.
        env: The kind of the environment, which decides the names of entries.
    """
    acting = Acting(kind)
    at_reset.clear()
    group: tuple[str, ...] = (GROUP,) if env == "agents" else ()
    observation, action = (*group, "observation"), (*group, "action")
    if kind == "random":
        return None, acting
    if kind == "module":
        return acting, acting
    if kind == "carrying":
        return _Carrying(acting), acting
    if kind == "numpy":
        return _Numpy(acting), acting
    if kind in ("recurrent", "initial"):
        asked = ["is_init"] if kind == "initial" else []
        keys = ["observation", "hidden", *asked], ["action", ("next", "hidden")]
        policy = TensorDictModule(acting, *keys)
        policy.state_shapes = {"hidden": (1,)}
        return policy, acting
    if kind == "perturbed":
        acting.tag(-1)
    # Library layers only, which the fast path records.
    inner: nn.Module = nn.Sequential(acting.layer) if kind in ("linear", "cached") else acting
    if kind == "perturbed":
        # The environment changes a setting at each reset, behind the collector's back.
        slope = nn.LeakyReLU(1.0)
        inner = nn.Sequential(acting.layer, slope)
        at_reset.append(lambda episode: setattr(slope, "negative_slope", 1.0 + episode))
    extra = {"drawing": ["drawn"], "typed": ["mode"]}.get(kind, [])
    return TensorDictModule(inner, [observation], [action, *extra]), acting


@contextlib.contextmanager
def around_beginning(kind: str, policy: Any) -> Iterator[None]:
    """Hold until the first batch: a ``"cached"`` policy has a filled cache until then."""
    if kind != "cached":
        yield
        return
    with parametrize.cached():
        policy(TensorDict({policy.in_keys[0]: torch.zeros(1, 6)}, [1]))
        yield
