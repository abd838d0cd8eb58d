"""Turns the user's policy into one that acts on rows or on TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as default
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CudaGraphModule
from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from gleanrl.core.errors import ConfigError, PolicyError
from gleanrl.core.keys import Key, next_key
from gleanrl.core.layout import Field
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Spec
from gleanrl.operations.proofs import qualified
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.probe import PolicySignature, learn, learn_dynamic
from gleanrl.policies.random import RandomActions, RandomPolicy
from gleanrl.policies.recorded_or_called_policy import ProgramPolicy, TensorDictPolicy
from gleanrl.policies.submodules import modules_of

__all__ = [
    "Actor",
    "ExplorationType",
    "acts_at_random",
    "complete_exploration",
    "exploration_type",
    "make_actor",
    "make_policy",
    "parse_exploration_mode",
    "set_exploration_type",
    "signed_actor",
]

# -- for environments whose data lie in rows -------------------------------------------------------


def make_policy(
    policy: Any, contract: EnvContract, specs: Mapping[Key, Spec], options: SourceOptions
) -> RandomActions | ProgramPolicy:
    """Make a `Policy` of the user's policy; ``contract`` has a layout.

    The policy is called once, on the observation of the first reset, without gradient; random
    streams and buffers are as before afterwards. Random actions are drawn from ``specs``.
    """
    env = contract.layout
    assert env is not None
    accelerated = bool(options.compile_policy) or bool(options.cudagraph_policy)
    if acts_at_random(policy):
        if accelerated:
            raise ConfigError(
                "compile_policy and cudagraph_policy need a policy, actions are random"
            )
        if policy is None or policy.action_spec is None:
            drawn = RandomActions(specs, env)
            drawn.inner = policy
            return drawn
    device = _device_of(policy, options.policy_device, env.device)
    on_host = device.type == "cpu" and env.device is None
    root = contract.root if on_host else contract.root.to(device)
    adapted, signature = learn(policy, contract, root, options)
    call, lower = _accelerate(adapted.call, options, device)
    stays = options.device_rows and options.storing_device == device
    outputs = device if stays else None
    return ProgramPolicy(
        policy, call, signature, env, device=device, output_device=outputs, lower=lower
    )


def acts_at_random(policy: Any) -> bool:
    """Tell whether ``policy`` stands for random actions."""
    return policy is None or isinstance(policy, RandomPolicy)


def _device_of(
    policy: Any, given: torch.device | str | None, home: torch.device | None = None
) -> torch.device:
    """Return where ``policy`` runs: where it is ``given``, else where its first weight is.

    Without weights it is ``home``, where the environment's data are.
    """
    if given is not None:
        return torch.device(given)
    for module in modules_of(policy):
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                raise PolicyError(
                    f"the policy's {type(module).__name__} has weights on the 'meta' device, which "
                    "hold no numbers: make them with policy.to_empty(device=...) and load them"
                )
            return parameter.device
    return home or torch.device("cpu")


# -- for environments with TensorDict methods ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Actor:
    """A policy that acts on a TensorDict, and the results of one call of it."""

    after: TensorDictBase
    """The root TensorDict as the environment would have been given it after that call."""
    user: Any = None
    """What the user gave, or a copy of it."""
    policy: TensorDictPolicy | None = None
    """What acts; ``None`` acts at random."""
    states: tuple[Field, ...] = ()
    """Root entries that are provided: zero where an episode begins."""
    policy_written_state: tuple[Key, ...] = ()
    """Root entries that the policy's ``("next", ...)`` outputs replace."""
    provided: Mapping[Key, torch.dtype] = default(default_factory=dict)
    """What to tell the policy: where an episode begins, as ``"is_init"``, and how many steps it has
    taken, as ``"step_count"``."""
    zero_outputs: TensorDictBase | None = None
    """Values that random frames have for outputs of the policy other than actions."""
    device: torch.device | None = None
    """Where the policy runs, if that is not where the environment's data are."""
    casts: tuple[tuple[Key, torch.dtype], ...] = ()
    """Actions that the environment wants in another dtype, which holds every value."""


def make_actor(policy: Any, contract: EnvContract, options: SourceOptions) -> Actor:
    """Make the actor on an environment's TensorDict, by calling ``policy`` once on it."""
    root = contract.root
    device = _device_of(policy, options.policy_device, root.device)
    away = _away(root, options.policy_device, device)
    # A policy for which the user named a device is shown that device.
    named = options.policy_device is not None or root.device is None
    given = root if named else root.copy().clear_device_()
    given = given if away is None else given.to(away)
    if contract.layout is None:
        adapted, zeros, states, provided = learn_dynamic(policy, contract, given, options)
        call, _ = _accelerate(adapted.call, options, device)
        acting, keys = TensorDictPolicy(call, shows_device=named), tuple(s.key for s in states)
        return Actor(root, policy, acting, states, keys, provided, zeros, away)
    adapted, signature = learn(policy, contract, given, options)
    call, lower = _accelerate(adapted.call, options, device)
    on_tensordict = TensorDictPolicy(
        call, signature if lower else None, contract.layout.batch_shape, device, shows_device=named
    )
    return signed_actor(policy, on_tensordict, signature, contract, away)


def _away(
    root: TensorDictBase, given: torch.device | str | None, device: torch.device
) -> torch.device | None:
    """Return the device that the TensorDict is moved to for the policy, ``None`` for no move."""
    if given is not None:
        return None if root.device == device else device
    return None if device.type == (root.device or torch.device("cpu")).type else device


def signed_actor(
    user: Any,
    policy: TensorDictPolicy,
    signature: PolicySignature,
    contract: EnvContract,
    away: torch.device | None = None,
) -> Actor:
    """Return the actor that uses ``policy``, of which one call showed ``signature``."""
    outputs, ndim = signature.trace.outputs, contract.root.ndim
    wanted = () if contract.layout is None else contract.layout.actions
    taken = {*contract.acted, *map(next_key, signature.policy_written_state)}
    zero_outputs = TensorDict({}, batch_size=contract.root.batch_size)
    for field in signature.outputs:
        if field.key not in taken:
            zero_outputs.set(field.key, torch.zeros_like(outputs[field.key]))
    after = {key: outputs[next_key(key)] for key in signature.states}
    return Actor(
        signature.after,
        user=user,
        policy=policy,
        states=tuple(Field(key, tuple(v.shape[ndim:]), v.dtype) for key, v in after.items()),
        policy_written_state=signature.policy_written_state,
        provided=signature.provided,
        zero_outputs=zero_outputs.to(contract.root.device or torch.device("cpu")),
        device=away,
        casts=tuple(
            (field.key, field.dtype)
            for field in wanted
            if not contract.env_checks_actions and outputs[field.key].dtype is not field.dtype
        ),
    )


# -- compiled by torch, or captured as a CUDA graph ------------------------------------------------


def _accelerate(
    policy: Callable[[Any], Any], options: SourceOptions, device: torch.device
) -> tuple[Callable[[Any], Any], bool]:
    """Compile ``policy``, capture it, or both; what the result returns its next call overwrites.

    Also returns whether it may be lowered: what is compiled is called as it is.
    """
    compile_kwargs = _arguments("compile_policy", options.compile_policy)
    capture_kwargs = _arguments("cudagraph_policy", options.cudagraph_policy)
    if capture_kwargs is not None and device.type != "cuda":
        raise ConfigError(
            f"cudagraph_policy needs a policy on a CUDA device, this one is on {device}; drop it, "
            "or pass policy_device='cuda'"
        )
    if compile_kwargs is not None:
        policy = torch.compile(policy, **compile_kwargs)
        if capture_kwargs is None and device.type == "cuda":
            policy = _marking(policy)
    if capture_kwargs is not None:
        given = {"in_keys": [], "out_keys": [], "device": device, **capture_kwargs}
        policy = CudaGraphModule(policy, **given)
    return policy, options.fast and compile_kwargs is None and capture_kwargs is None


def _arguments(name: str, value: bool | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    return {} if value is True else dict(value)


def _marking(policy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Tell torch where a step begins: graphs it captured reuse their memory from there."""

    def call(tensordict: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]  # torch's
        return policy(tensordict)

    return call


# -- how a policy chooses among the actions it thinks good -----------------------------------------
#
# The words are TensorDict's own, so that every module made with it listens to them.

_MODES = ("random", "mode", "mean", "deterministic")
_RANDOM = "torchrl.modules.tensordict_module.exploration.RandomPolicy"
_ENV = "torchrl.envs.common.EnvBase"
_NOISE = "torchrl.modules.tensordict_module.exploration.AdditiveGaussianModule"


def complete_exploration(policy: Any, env: Any) -> Any:
    """Return ``policy``, completed from the specs of ``env``, as TorchRL's collectors do.

    Its Gaussian noise modules that were made without spec get the action's, its ``RandomPolicy``
    the specs of all actions. Environments other than TorchRL's have no specs that these could use:
    a noise module says what it lacks when it is called, random actions are drawn by ``env``.
    """
    if _is_a(policy, _RANDOM):
        if _is_a(env, _ENV) and policy.action_spec is None:
            policy.set_action_spec_from_env(env)
        return RandomPolicy() if policy.action_spec is None else policy
    spec = getattr(env, "action_spec_unbatched", None)
    for module in modules_of(policy) if spec is not None else ():
        noise: Any = module
        if _is_a(noise, _NOISE) and noise.spec is None:
            noise.spec = spec
    return policy


def _is_a(value: Any, name: str) -> bool:
    return any(qualified(kind) == name for kind in type(value).__mro__)


def parse_exploration_mode(mode: str) -> ExplorationType:
    """Read the older spelling: ``"random"``, ``"mode"``, ``"mean"`` or ``"deterministic"``.

    >>> parse_exploration_mode("mean") is ExplorationType.MEAN
    True
    """
    name = str(mode).lower()
    if name not in _MODES:
        raise ConfigError(
            f"exploration_mode ({mode!r}) must be one of {', '.join(map(repr, _MODES))}"
        )
    return ExplorationType[name.upper()]
