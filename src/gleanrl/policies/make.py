"""From what the user gave to a `Policy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key
from gleanrl.core.layout import EnvLayout
from gleanrl.core.protocols import Window
from gleanrl.policies.adapt import adapt
from gleanrl.policies.compiled import Options, accelerate
from gleanrl.policies.exploration import ExplorationType
from gleanrl.policies.learn import learn
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

    Raises:
        PolicyTypeError: the policy cannot be called with what the environment gives.
        PolicyError: what it writes does not fit the environment.
        ConfigError: options that contradict each other or the device.
    """
    accelerated = bool(compile_policy) or bool(cudagraph_policy)
    if policy is None or isinstance(policy, RandomPolicy):
        if accelerated:
            raise ConfigError(
                "compile_policy and cudagraph_policy need a policy, actions are random"
            )
        if policy is None or policy.action_spec is None:
            return RandomActions(random, env.actions)
        return SpecActions(policy, env)
    device = _device(policy, policy_device)
    observed = [field.key for field in env.observations]
    acted: list[Key] = [field.key for field in env.actions]
    adapted = adapt(policy, observed, acted, trust=trust_policy)
    fast = accelerate(adapted.call, compile_policy, cudagraph_policy, device)
    learnt = learn(policy, adapted, env, probe, exploration, device)
    if accelerated:
        whole = learnt.probed.whole
        whole.module = fast
        learnt.probed.units = [whole]
    return ProgramPolicy(
        policy, learnt, env, device=device, lower=not accelerated, inference=inference
    )


def _device(policy: Any, given: torch.device | str | None) -> torch.device:
    if given is not None:
        return torch.device(given)
    for module in modules_of(policy):
        for parameter in module.parameters(recurse=False):
            return parameter.device
    return torch.device("cpu")
