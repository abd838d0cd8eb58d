"""From what the user gave to a `Policy`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.options import PolicyOptions
from gleanrl.core.protocols import Window
from gleanrl.memory.window import batch_rows
from gleanrl.policies.adapt import adapt
from gleanrl.policies.carried import Actor, CarriedPolicy
from gleanrl.policies.compiled import Options, accelerate
from gleanrl.policies.exploration import ExplorationType
from gleanrl.policies.learn import Learnt, learn_converted
from gleanrl.policies.loose import learn_loose
from gleanrl.policies.program import ProgramPolicy
from gleanrl.policies.random import RandomActions, RandomPolicy, SpecActions
from gleanrl.policies.structure import modules_of


def make_policy(
    policy: Any,
    *,
    env: EnvLayout,
    random: Callable[[int], None],
    probe: Window,
    exploration: ExplorationType = ExplorationType.RANDOM,
    trust_policy: bool | None = None,
    compile_policy: Options = None,
    cudagraph_policy: Options = None,
    policy_device: torch.device | str | None = None,
    inference: bool = False,
    fast: bool = True,
    one_hot: Collection[Key] = (),
) -> RandomActions | ProgramPolicy:
    """Make a `Policy` of what the user gave.

    The policy is called once, on the observation in ``probe``, without gradient; random streams and
    buffers are as before afterwards.

    Args:
        policy: ``None`` or a `RandomPolicy` to act at random, else a callable on TensorDicts or
            tensors.
        env: What the environment gives and wants.
        random: The environment's ``random``: writes random actions into a row.
        probe: One step long, holds the observation of the first reset.
        exploration: How the policy acts in that call.
        trust_policy: Take the policy to be a callable on TensorDicts without looking.
        compile_policy: Run it through ``torch.compile``: ``True`` or its arguments.
        cudagraph_policy: Capture it as a CUDA graph: ``True`` or ``CudaGraphModule``'s arguments.
        policy_device: Where the policy is; the device of its first weight by default.
        inference: Run under ``inference_mode``; for private copies only.
        fast: Replace what is proven equal to tensor calls by these.
        one_hot: Actions that the environment wants as one-hot vectors.

    Raises:
        PolicyTypeError: the policy cannot be called with what the environment gives.
        PolicyError: what it writes does not fit the environment.
        ConfigError: options that contradict each other or the device.
    """
    accelerated = bool(compile_policy) or bool(cudagraph_policy)
    if acts_at_random(policy):
        if accelerated:
            raise ConfigError(
                "compile_policy and cudagraph_policy need a policy, actions are random"
            )
        if policy is None or policy.action_spec is None:
            return RandomActions(random, env.actions)
        return SpecActions(policy, env)
    device = device_of(policy, policy_device)
    observed = [field.key for field in env.observations]
    acted: list[Key] = [field.key for field in env.actions]
    adapted = adapt(policy, observed, acted, trust=trust_policy)
    root = root_of(env, probe, device)
    adapted, learnt = learn_converted(policy, adapted, env, root, exploration, one_hot=one_hot)
    call = accelerate(adapted.call, compile_policy, cudagraph_policy, device)
    return ProgramPolicy(
        policy,
        call,
        learnt,
        env,
        device=device,
        lower=fast and not accelerated,
        inference=inference,
    )


@dataclass(frozen=True, slots=True)
class Shown:
    """What an environment with TensorDict methods shows and wants."""

    root: TensorDictBase
    """What a policy is called on first. Not changed."""
    observed: Sequence[Key]
    acted: Sequence[Key]
    rewarded: Sequence[Key]
    layout: EnvLayout | None
    """The environment's side of a step; ``None`` if it is not fixed."""
    one_hot: Collection[Key] = ()
    """Actions that it wants as one-hot vectors, and would not take as indices."""
    judges: bool = True
    """Whether the environment takes actions as they are written."""


def make_actor(
    policy: Any,
    shown: Shown,
    options: PolicyOptions,
    exploration: ExplorationType = ExplorationType.RANDOM,
) -> tuple[Actor, TensorDictBase]:
    """Make what acts on the TensorDict of an environment, by calling ``policy`` once on it.

    Returns:
        The actor, and the root as the environment would have been given it.

    Raises:
        PolicyTypeError: the policy cannot be called with what the environment gives.
        PolicyError: what it writes does not fit the environment.
        ConfigError: options that contradict each other or the device.
    """
    root, device = shown.root, device_of(policy, options.device)
    adapted = adapt(policy, shown.observed, shown.acted, trust=options.trust_policy)
    away = _away(root, options.device, device)
    named = options.device is not None or root.device is None
    given = root if named else root.copy().clear_device_()
    given = given if away is None else given.to(away)
    if shown.layout is None:
        kept = (*shown.observed, *shown.rewarded)
        loose = learn_loose(policy, adapted, given, shown.acted, kept, exploration)
        fed = tuple(state.key for state in loose.states)
        call = accelerate(adapted.call, options.compile_policy, options.cudagraph_policy, device)
        carried = CarriedPolicy(call, shows_device=named)
        actor = Actor(policy, carried, loose.states, fed, loose.needs_is_init, loose.silence, away)
        return actor, root
    adapted, learnt = learn_converted(
        policy,
        adapted,
        shown.layout,
        given,
        exploration,
        as_written=shown.judges,
        one_hot=shown.one_hot,
    )
    call = accelerate(adapted.call, options.compile_policy, options.cudagraph_policy, device)
    taken_apart = options.fast and call is adapted.call
    carried = CarriedPolicy(
        call, learnt if taken_apart else None, shown.layout.batch_shape, device, shows_device=named
    )
    return actor_of(policy, carried, learnt, shown, away), learnt.after


def _away(
    root: TensorDictBase, given: torch.device | str | None, device: torch.device
) -> torch.device | None:
    """Return the device that the TensorDict is moved to for the policy, ``None`` for no move.

    A policy for which the user named a device is shown that device.
    """
    if given is not None:
        return None if root.device == device else device
    return None if device.type == (root.device or torch.device("cpu")).type else device


def actor_of(
    user: Any,
    policy: CarriedPolicy,
    learnt: Learnt,
    shown: Shown,
    away: torch.device | None = None,
) -> Actor:
    """Return what acts by ``policy``, of which one call showed ``learnt``."""
    outputs = learnt.probed.outputs
    after = {key: outputs[next_key(key)] for key in learnt.states}
    size, wanted = shown.root.ndim, () if shown.layout is None else shown.layout.actions
    return Actor(
        user=user,
        policy=policy,
        states=tuple(Field(key, tuple(v.shape[size:]), v.dtype) for key, v in after.items()),
        fed=learnt.fed,
        needs_is_init=learnt.needs_is_init,
        silence=_silence(learnt, shown).to(shown.root.device or torch.device("cpu")),
        device=away,
        casts=tuple(
            (field.key, field.dtype)
            for field in wanted
            if not shown.judges and outputs[field.key].dtype is not field.dtype
        ),
    )


def _silence(learnt: Learnt, shown: Shown) -> TensorDictBase:
    """Return zeros in place of what the policy wrote beside actions and states."""
    taken = {*shown.acted, *map(next_key, learnt.fed)}
    silence = TensorDict({}, batch_size=shown.root.batch_size)
    for field in learnt.outputs:
        if field.key not in taken:
            silence.set(field.key, torch.zeros_like(learnt.probed.outputs[field.key]))
    return silence


def acts_at_random(policy: Any) -> bool:
    """Tell whether ``policy`` stands for random actions."""
    return policy is None or isinstance(policy, RandomPolicy)


def root_of(env: EnvLayout, probe: Window, device: torch.device | None = None) -> TensorDict:
    """Return the first row of ``probe`` as the TensorDict that a reset of ``env`` returns."""
    root = TensorDict({}, batch_size=env.batch_shape)
    for group in env.dones:
        for key in group.keys():
            root.set(key, torch.zeros((*env.batch_shape, *group.shape), dtype=torch.bool))
    for field in env.observations:
        root.set(field.key, batch_rows(probe, field.key, env.batch_shape)[0].clone())
    return root if device is None or device.type == "cpu" else root.to(device)


def device_of(policy: Any, given: torch.device | str | None) -> torch.device:
    """Return where ``policy`` runs: where it is ``given``, else where its first weight is."""
    if given is not None:
        return torch.device(given)
    for module in modules_of(policy):
        for parameter in module.parameters(recurse=False):
            return parameter.device
    return torch.device("cpu")
