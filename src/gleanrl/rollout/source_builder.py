"""Build a source in its process: environment, policy, and the loop that fits them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

from gleanrl.core.errors import ConfigError, PolicyError
from gleanrl.core.keys import IS_INIT, Key, format_key, next_key
from gleanrl.core.layout import EnvLayout
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Policy, Source
from gleanrl.core.streams import Streams, preserved
from gleanrl.core.window import Window
from gleanrl.envs.async_pool import AsyncPool
from gleanrl.envs.base import EnvBase
from gleanrl.envs.recorded_or_called_transforms import Unproven
from gleanrl.envs.row_env import EnvRows, RowEnv
from gleanrl.envs.rows_or_tensordict import Made, make_env
from gleanrl.envs.serial import rows_of
from gleanrl.envs.specs import OneHot
from gleanrl.envs.tensordict_envs import TensorDictHandle, learn_layout, needs_carrier, spec_leaves
from gleanrl.envs.torchrl_rows import TransformedRows
from gleanrl.envs.vector import NextStepPool, VectorAdapter
from gleanrl.policies.central_policy_calls import JointPolicy
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.policy import (
    Actor,
    acts_at_random,
    complete_exploration,
    make_actor,
    make_policy,
    signed_actor,
)
from gleanrl.policies.recorded_or_called_policy import ProgramPolicy
from gleanrl.rollout.async_pool_loop import AsyncPoolLoop
from gleanrl.rollout.env_loop import EnvLoop, check_can_cut
from gleanrl.rollout.pool_loop import PoolLoop
from gleanrl.rollout.tensordict_loop import TensorDictLoop

_LOOPS = ((NextStepPool, PoolLoop), (AsyncPool, AsyncPoolLoop))
_ONLY_KNOWN = (
    "vector environments do not deliver; vectorise single environments with num_envs= instead"
)


@dataclass(frozen=True, slots=True)
class SourceBuilder:
    """A `SourceFactory`: all settings of a worker's source, which can be pickled."""

    options: SourceOptions

    def __call__(self, worker: int) -> Source:
        """Call ``init_fn``, then build the source. Random states are restored."""
        if self.options.init_fn is not None:
            self.options.init_fn()
        streams = Streams()
        streams.begin(self.options.stream)
        with preserved(), streams.active():
            made = make_env(self.options)
            try:
                return self._serve(made)
            except BaseException:
                made.close()
                raise

    def _serve(self, made: Made) -> Source:
        joint = isinstance(self.options.policy, JointPolicy)
        if isinstance(made, TensorDictHandle):
            if joint:
                raise ConfigError(
                    f"{made.kind} in workers has data without one fixed layout, or workers whose "
                    "environments differ; asynchronous central inference needs one layout for "
                    "all: use inference='workers'"
                )
            return self._serve_tensordicts(made)
        if isinstance(made, TransformedRows):
            return self._serve_transformed(made)
        members = None if isinstance(made, VectorAdapter) else made
        why_rows = made.only_rows
        if why_rows and not self.options.fast:
            raise ConfigError(f"{why_rows} and fast=False exclude each other")
        if members is not None and not self.options.fast and not joint:
            handle = TensorDictHandle(_with_tensordicts(members), inner=made.inner)
            return self._serve_tensordicts(handle, env_checks_actions=False, why="fast=False")
        check_can_cut(made, self.options)
        first = Window.allocate(made.layout.observations, made.layout.num_envs, 1)
        made.reset(first)
        contract = EnvContract.of_rows(
            made.layout, first, _one_hot(made.action_specs), made.checks_actions
        )
        policy = self._policy(made, contract)
        if isinstance(policy, ProgramPolicy) and (why := policy.signature.why_no_rows):
            if why_rows:
                raise ConfigError(f"{why_rows} needs a policy that takes rows: {why}")
            if members is not None:
                # Rows in workers reset by themselves, so their `ParallelEnv` is stepped.
                env: Any = RowEnv(members) if members.memory is None else members.face
                handle = TensorDictHandle(env, contract.root, inner=made.inner)
                return self._serve_tensordicts(handle, policy, env_checks_actions=False, why=why)
            if unfit := policy.signature.why_unfit:
                raise PolicyError(f"{unfit}, which {_ONLY_KNOWN}")
        _check_random(policy, made.layout, self.options)
        kind: Any = next((loop for rows, loop in _LOOPS if isinstance(made, rows)), EnvLoop)
        options = replace(self.options, mask=True) if why_rows else self.options
        source: Source = kind(made, first, policy, options)
        return source

    def _serve_transformed(self, made: TransformedRows) -> Source:
        """Serve by rows if the policy takes them; else by the environment's own methods."""
        handle, layout, given = made.handle, made.layout, self.options.policy
        if self.options.max_frames_per_traj and not made.can_cut:
            return self._serve_tensordicts(handle, why="max_frames_per_traj")
        check_can_cut(made, self.options)
        primed = made.parts.primed
        if primed and isinstance(given, JointPolicy):
            return self._serve(handle)
        if not self.options.compact_obs:  # which leaves no rows for these
            layout = replace(layout, passed=[key for key, zero in primed.items() if zero])
        contract = _contract_of(handle.env, handle.root.clone(), layout, True)
        policy = self._policy(made, contract)
        if isinstance(policy, ProgramPolicy):
            written = [key for key in primed if next_key(key) in policy.signature.trace.outputs]
            unlike = _unlike(policy, layout) or policy.signature.why_no_rows
            why = unlike or _why_not_passed(made, layout, written)
            if why:
                return self._serve_tensordicts(handle, policy, why=why)
        first = Window.allocate(layout.observations, layout.num_envs, 1)
        made.reset(first)
        if isinstance(policy, ProgramPolicy) and not isinstance(handle.env, EnvBase):
            if made.drops_root:
                policy.called.gets_back = [field.key for field in layout.actions]
            else:
                made.on_partial_reset = policy.zero_memory
        return EnvLoop(made, first, policy, self.options)

    def _policy(self, env: EnvRows, contract: EnvContract) -> Policy:
        chosen, joint = complete_exploration(self._user_policy(), env.inner), self.options.policy
        make = joint.seat if isinstance(joint, JointPolicy) else make_policy
        options = self.options
        if any(isinstance(env, rows) for rows, _ in _LOOPS):  # their rows pass through numpy
            options = replace(options, device_rows=False)
        policy = make(chosen, contract, env.action_specs, options)
        self._check_inputs(policy.states, IS_INIT in policy.provided)
        return policy

    # -- environments with TensorDict methods ------------------------------------------------------

    def _serve_tensordicts(
        self,
        handle: TensorDictHandle,
        known: ProgramPolicy | None = None,
        *,
        env_checks_actions: bool = True,
        why: str | None = None,
    ) -> Source:
        """Serve the environment of ``handle``; ``known``: a policy after its first call."""
        env, ragged = handle.env, needs_carrier(handle.env, handle.root)
        layout = None if ragged else learn_layout(env, handle.root)
        root = handle.root.clone()
        contract = _contract_of(env, root, layout, env_checks_actions)
        if known is not None:
            away = None if known.device.type == "cpu" else known.device
            actor = signed_actor(known.inner, known.on_tensordict, known.signature, contract, away)
        else:
            actor = self._actor(env, contract)
        self._check_inputs((state.key for state in actor.states), IS_INIT in actor.provided)
        return TensorDictLoop(handle, actor, contract, self.options, why or handle.why)

    def _actor(self, env: Any, contract: EnvContract) -> Actor:
        chosen = complete_exploration(self._user_policy(), env)
        if acts_at_random(chosen) and (chosen is None or chosen.action_spec is None):
            return Actor(contract.root)
        return make_actor(chosen, contract, self.options)

    def _check_inputs(self, states: Iterable[Key], needs_is_init: bool) -> None:
        wanted = [*states, *([IS_INIT] if needs_is_init else [])]
        if wanted and self.options.auto_register_policy_transforms is False:
            raise PolicyError(
                f"the policy reads {', '.join(map(format_key, wanted))}, which the environment "
                "does not give; add them to the environment, or drop "
                "auto_register_policy_transforms=False"
            )

    def _user_policy(self) -> Any:
        """Return the policy that runs: the user's own object, or a copy on another device."""
        given = self.options
        if isinstance(given.policy, JointPolicy):
            return given.policy.inner
        policy = given.policy if given.policy_factory is None else given.policy_factory()
        return on_device(policy, given.policy_device)


def _why_not_passed(made: TransformedRows, layout: EnvLayout, written: list[Key]) -> str | None:
    """Have ``made`` pass on the policy's outputs for the next step; return why it does not."""
    if lost := [format_key(key) for key in written if key not in layout.passed]:
        return (
            f"the policy writes {', '.join(lost)}, which compact_obs leaves out, or whose first "
            "values need not be zeros"
        )
    try:
        made.pass_on(written)
    except Unproven as err:
        return str(err)
    return None


def _unlike(policy: Policy, layout: EnvLayout) -> str:
    """Return how the policy's actions differ from the specs of the environment, if they do."""
    written = {field.key: field for field in policy.outputs}
    for field in layout.actions:
        if (own := written[field.key]) != field:
            return (
                f"the policy writes {format_key(field.key)} as {own.dtype} of shape {own.shape}, "
                f"its spec has {field.dtype} of shape {field.shape}"
            )
    return ""


def _check_random(policy: Policy, layout: EnvLayout, options: SourceOptions) -> None:
    if options.random_frames and (unlike := _unlike(policy, layout)):
        raise PolicyError(
            f"{unlike}: with central inference, random frames (init_random_frames) and the "
            "policy's have one dtype and shape; write actions as in the spec, or use "
            "inference='workers'"
        )


def on_device(policy: Any, device: torch.device | None) -> Any:
    """Return ``policy``, or a copy on ``device`` if that is another one."""
    if device is None or not isinstance(policy, nn.Module):
        return policy
    tensors = [*policy.parameters(), *policy.buffers()]
    if any(tensor.device != device for tensor in tensors):
        return copy.deepcopy(policy).to(device)
    return policy


def _with_tensordicts(rows: EnvRows) -> Any:
    """Return the user's object around ``rows``, unless their data are to be stored otherwise."""
    inside = rows_of(rows.face)
    same = inside is not None and inside.options == rows.options
    return rows.face if same else RowEnv(rows)


def _contract_of(
    env: Any, root: TensorDictBase, layout: EnvLayout | None, env_checks_actions: bool
) -> EnvContract:
    return EnvContract(
        root,
        observed=[key for key, _ in spec_leaves(env.full_observation_spec)],
        acted=[key for key, _ in spec_leaves(env.full_action_spec)],
        rewarded=[key for key, _ in spec_leaves(env.full_reward_spec)],
        layout=layout,
        one_hot=() if env_checks_actions else _one_hot(dict(spec_leaves(env.full_action_spec))),
        env_checks_actions=env_checks_actions,
        infos=env.info_entries if isinstance(env, EnvBase) else (),
    )


def _one_hot(specs: Mapping[Key, Any]) -> list[Key]:
    return [key for key, spec in specs.items() if isinstance(spec, OneHot)]
