"""Build a source where it will run: environment, policy, and the loop that fits them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gleanrl.core.errors import PolicyError
from gleanrl.core.keys import IS_INIT, Key, show
from gleanrl.core.options import EnvOptions, PolicyOptions, RolloutOptions
from gleanrl.core.protocols import Env, Pool, Source, SourceFactory, Window
from gleanrl.core.streams import preserved
from gleanrl.envs.make import Carried, Made, make_env
from gleanrl.envs.pool import NextStepPool
from gleanrl.envs.tensordict_env import TensorDictEnv
from gleanrl.envs.tensordict_layout import spec_leaves
from gleanrl.policies.adapt import adapt
from gleanrl.policies.exploration import complete_exploration
from gleanrl.policies.loose import learn_loose
from gleanrl.policies.make import make_policy
from gleanrl.policies.random import RandomActions, RandomPolicy
from gleanrl.rollout.carrier import CarrierRollout
from gleanrl.rollout.cursor import CursorRollout
from gleanrl.rollout.rollout import Policies, Rollout
from gleanrl.rollout.streams import Streams


@dataclass(frozen=True, slots=True)
class Initialised:
    """A `SourceFactory` that calls something of the user's first."""

    init_fn: Callable[[], Any]
    factory: SourceFactory

    def __call__(self, worker: int) -> Source:
        """Call ``init_fn``, then build the source."""
        self.init_fn()
        return self.factory(worker)


@dataclass(frozen=True, slots=True)
class SourceBuilder:
    """A `SourceFactory`: everything a worker needs to build its source, in picklable groups."""

    env: EnvOptions
    policy: PolicyOptions
    rollout: RolloutOptions

    def __call__(self, worker: int) -> Source:
        """Build the source. Random states are as before afterwards.

        Raises:
            ConfigError: options the environment cannot honour.
        """
        streams = Streams()
        streams.begin(self.rollout.stream)
        with preserved(), streams.active():
            made = make_env(self.env)
            try:
                return self._serve(made)
            except BaseException:
                made.close()
                raise

    def _serve(self, made: Made) -> Source:
        if isinstance(made, Carried):
            return self._carry(made)
        if isinstance(made, NextStepPool):
            return CursorRollout(made, self._policies, self.rollout)
        return Rollout(made, self._policies, self.rollout)

    def _carry(self, made: Carried) -> Source:
        user = complete_exploration(self._user_policy(), made.env)
        if user is None or (isinstance(user, RandomPolicy) and user.action_spec is None):
            return CarrierRollout(made.env, None, self.rollout, first=made.first)
        env, first = made.env, made.first
        observed = [key for key, _ in spec_leaves(env.full_observation_spec)]
        acted = [key for key, _ in spec_leaves(env.full_action_spec)]
        rewarded = [key for key, _ in spec_leaves(env.full_reward_spec)]
        adapted = adapt(user, observed, acted, trust=self.policy.trust_policy)
        learnt = learn_loose(
            user, adapted, first, acted, (*observed, *rewarded), self.rollout.exploration
        )
        self._check_inputs((state.key for state in learnt.states), learnt.needs_is_init)
        source = CarrierRollout(
            env,
            adapted.call,
            self.rollout,
            first=first,
            states=learnt.states,
            is_init=learnt.needs_is_init,
            silence=learnt.silence,
        )
        source.policy = user
        return source

    def _policies(self, env: Env | Pool, probe: Window, own: bool = False) -> Policies:
        user = complete_exploration(self._user_policy(own), env.inner)
        policy = make_policy(
            user,
            env=env.layout,
            random=env.random,
            probe=probe,
            exploration=self.rollout.exploration,
            trust_policy=self.policy.trust_policy,
            compile_policy=self.policy.compile_policy,
            cudagraph_policy=self.policy.cudagraph_policy,
            policy_device=self.policy.device,
        )
        self._check_inputs(policy.states, policy.needs_is_init)
        if isinstance(env, TensorDictEnv):
            env.feed(field.key for field in policy.outputs)
        stand_in = RandomActions(env.random, env.layout.actions, policy)
        return Policies(policy, stand_in, policy.needs_is_init, user)

    def _check_inputs(self, states: Iterable[Key], needs_is_init: bool) -> None:
        wanted = [*states, *([IS_INIT] if needs_is_init else [])]
        if wanted and not self.policy.provide_inputs:
            raise PolicyError(
                f"the policy reads {', '.join(map(show, wanted))}, which the environment does not "
                "give; add them to the environment, or drop auto_register_policy_transforms=False"
            )

    def _user_policy(self, own: bool = False) -> Any:
        """Return the policy that runs: the user's own object, or a copy.

        It is a copy if told to ``own`` it, or if the user's lives on another device.
        """
        given = self.policy
        policy = given.policy if given.policy_factory is None else given.policy_factory()
        if not isinstance(policy, nn.Module):
            return policy
        tensors = [*policy.parameters(), *policy.buffers()]
        if given.device is not None and any(t.device != given.device for t in tensors):
            return copy.deepcopy(policy).to(given.device)
        return copy.deepcopy(policy) if own else policy
