"""A policy in an environment, served as a `Source`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tensordict.nn import set_interaction_type
from torch import nn

from gleanrl.core import paths
from gleanrl.core.errors import ConfigError, UnknownModelError, WeightsError
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Report, Snapshot
from gleanrl.core.options import RolloutOptions
from gleanrl.core.protocols import Env, Policy, Pool, Stop, Window
from gleanrl.core.streams import preserved
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.dense import dense
from gleanrl.rollout.plan import RolloutPlan
from gleanrl.rollout.streams import Streams
from gleanrl.rollout.tracker import Tracker
from gleanrl.weights.snapshot import Shapes, check_weights, cloned, load_weights, shapes_of


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy, its stand-in for random frames, and the user's own object."""

    policy: Policy
    random: Policy
    needs_is_init: bool
    user: Any
    """The callable that runs, as `getattr_policy` sees it."""


class MakePolicies(Protocol):
    """Builds the policies, once the environment is known."""

    def __call__(self, env: Env | Pool, probe: Window, own: bool = False) -> Policies:
        """Build them; ``probe`` is one step long and holds an observation.

        With ``own``, of a copy of the user's module: nobody else changes its weights.
        """
        ...


class Keeper(Protocol):
    """What holds the environments: is seeded, saved and closed."""

    def seed(self, seed: int, static: bool = False) -> int:
        """Seed every environment; return the last seed used."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what must be kept across a restart."""
        ...

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state` returned."""
        ...

    def close(self) -> None:
        """Release the environments. Idempotent."""
        ...


class Served:
    """What every source shares: random streams, weights, remote access."""

    tracker: Tracker

    def __init__(
        self, keeper: Keeper, inner: Any, user_policy: Any, options: RolloutOptions
    ) -> None:
        """Remember whom seeds, states, weights and remote access go to."""
        self._keeper = keeper
        self.options = options
        self.env = inner
        self.policy = user_policy
        self.streams = Streams()
        self.streams.begin(options.stream)
        self.policy_version = 0
        self.torn = False
        """Whether something failed half-way: environments and counters no longer agree."""
        self._fresh = True
        self._keeps = False
        """Whether what the policy wrote at earlier steps outlives the reset under way."""

    def place(self, base: int, stride: int) -> None:
        """Number the environments among those of all workers."""
        self.tracker.place(base, stride)

    def load(self, snapshot: Snapshot) -> None:
        """Load weights of one or more models; the next rollout is made with them."""
        models = {name: self._module(name) for name in snapshot.models}
        for name, weights in snapshot.models.items():
            check_weights(models[name], weights)
        for name, weights in snapshot.models.items():
            load_weights(models[name], weights)
        self.policy_version = snapshot.version

    def describe_weights(self, model_id: str) -> Shapes:
        """Return the shape of every parameter (``True``) and buffer (``False``) of a model.

        Raises:
            UnknownModelError: there is none of that id.
            WeightsError: it is no module.
        """
        return shapes_of(self._module(model_id))

    def policy_state(self) -> dict[str, Any]:
        """Return the policy's state dict, cloned; empty if it has none."""
        if not isinstance(self.policy, nn.Module):
            return {}
        return cloned(self.policy.state_dict())

    def _module(self, model_id: str) -> nn.Module:
        try:
            module = paths.resolve(self, model_id)
        except (AttributeError, LookupError, ValueError) as err:
            raise UnknownModelError(f"no model {model_id!r} in this collector: {err}") from err
        if isinstance(module, nn.Module):
            return module
        raise WeightsError(
            f"{model_id!r} is a {type(module).__name__}, not an nn.Module: it has no weights"
        )

    def call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve ``path`` (from ``env``, ``policy`` and so on) and call what it names."""
        return paths.call(self, path, args, kwargs)

    def get(self, path: str) -> Any:
        """Return what ``path`` names."""
        return paths.resolve(self, path)

    # -- what environments and counters have in common -------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Mark the source as torn unless the body comes to its end."""
        self.torn = True
        yield
        self.torn = False

    def start_over(self, torn: bool) -> None:
        """Reset everything if that is asked for before each rollout, or if the last one failed."""
        if torn or (self.options.reset_at_each_iter and not self._fresh):
            self._keeps = not torn
            self._reset(None, {})
            self._keeps = False
        self._fresh = False

    def reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        """Reset environments; they start new trajectories."""
        chosen = None if self.torn else envs
        with self.whole(), self.streams.active():
            self._reset(chosen, options)
        self._fresh = chosen is None

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def seed(self, seed: int, static: bool, stream: int | None = None) -> int:
        """Seed everything and reset; returns the last seed an environment got."""
        with preserved():  # some environments seed torch's global generator as well
            last = self._keeper.seed(seed, static)
        self.streams.seed(seed if stream is None else stream)
        self.reset(None, {})
        return last

    def state(self) -> dict[str, Any]:
        """Return counters, streams, version and what the environment keeps."""
        return {
            "env": self._keeper.state(),
            "tracker": self.tracker.state(),
            "streams": self.streams.state(),
            "policy_version": self.policy_version,
        }

    def load_state(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state` returned; environments restart on fresh resets.

        Raises:
            ConfigError: the state is that of another number of environments.
        """
        self.tracker.check_state(state["tracker"])
        self._keeper.load_state(state["env"], strict)
        self.policy_version = int(state["policy_version"])
        self.streams.load_state(state["streams"])
        self.tracker.load_state(state["tracker"])
        self.reset(None, {})

    def close(self) -> None:
        """Close the environments."""
        self._keeper.close()


def explanation(loop: str, env: str, policy: Sequence[str]) -> str:
    """Lay out what `explain` answers."""
    return "\n".join(
        [f"loop: {loop}", f"environment: {env}", "policy:", *(f"  {p}" for p in policy)]
    )


def check_can_cut(env: Env | Pool, options: RolloutOptions) -> None:
    """Check that environments can be reset one by one where that is needed.

    Raises:
        ConfigError: they cannot.
    """
    if options.max_frames_per_traj is not None and not env.can_cut:
        raise ConfigError(
            f"max_frames_per_traj ({options.max_frames_per_traj}) needs to reset environments "
            f"one by one, which {type(env.inner).__name__} cannot do; set the limit where it "
            "is made (max_episode_steps), or vectorise single environments with num_envs="
        )


class Rollout(Served):
    """The source of dense environments: fixed layout, one real transition per step."""

    def __init__(
        self,
        env: Env,
        first: Window,
        policies: Policies,
        make_policies: MakePolicies,
        options: RolloutOptions,
    ) -> None:
        """Learn the layout.

        Args:
            env: Was reset once.
            first: One step long: what that reset showed.
            policies: What acts.
            make_policies: How to make the same again.
            options: What the user asked for.
        """
        self._env = env
        self._make_policies = make_policies
        super().__init__(env, env.inner, policies.user, options)
        self._policy, self._random = policies.policy, policies.random
        self._plan = RolloutPlan.of(
            env.layout,
            policies.policy.outputs,
            policies.policy.states,
            options,
            policies.needs_is_init,
        )
        self._carry = self._plan.make_carry()
        for key in first.keys():
            self._carry.tensor(key).copy_(first.tensor(key))
        self.tracker = Tracker(env.layout.num_envs, options.max_frames_per_traj)
        self._mark_init(None)

    def layout(self) -> Layout:
        """Describe one step."""
        return self._plan.layout

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Fill ``window`` with ``steps`` steps, fewer if ``stop`` is raised."""
        policy, torn = self._random if random else self._policy, self.torn
        with self.whole(), self.streams.active(), policy.context(), self._exploration():
            self.start_over(torn)
            self._plan.begin(window, self._carry)
            self.tracker.begin(window, self._carry)
            self._env.begin(window, self._carry)
            policy.begin(window, self._carry)
            taken = dense(self._env, policy, self.tracker, steps, stop)
            self._env.finish(taken)
            policy.finish(taken)
            if taken < window.steps:
                self._carry_from(window, taken)
            self._plan.finish(window, self.tracker, taken, self.policy_version)
        return Report(taken, taken * window.envs, self.policy_version)

    def explain(self) -> str:
        """Say which path every part takes, and why."""
        with self._exploration(), torch.no_grad():
            parts = self._policy.explain()
        inner = self._env.inner
        kind = type(inner[0] if isinstance(inner, list) else inner).__name__
        return explanation(
            "rows: each field of a step is written to its place in the batch",
            f"{self._env.layout.num_envs} x {kind}, stepped by its own methods without TensorDicts",
            parts,
        )

    def own_policy(self) -> None:
        """Act with a copy of the policy from now on: the learner trains the original meanwhile."""
        probe = RolloutWindow.allocate(self._env.layout.observations, self._env.layout.num_envs, 1)
        for key in probe.keys():
            probe.tensor(key).copy_(self._carry.tensor(key))
        with preserved():
            made = self._make_policies(self._env, probe, own=True)
        self._policy, self._random, self.policy = made.policy, made.random, made.user

    def _exploration(self) -> Any:
        return set_interaction_type(self.options.exploration)

    def _carry_from(self, window: Window, step: int) -> None:
        for field in self._plan.carried:
            self._carry.tensor(field.key).copy_(window.tensor(field.key)[:, step : step + 1])

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        self._env.reset(self._carry, envs, **options)
        if envs is None and not self._keeps:
            self._policy.forget()
        self.tracker.restart(envs)
        self._mark_init(envs)

    def _mark_init(self, envs: Sequence[int] | None) -> None:
        """Zero recurrent states and raise ``is_init`` of ``envs`` in the carried row."""
        observed = {field.key for field in self._env.layout.observations}
        rows = slice(None) if envs is None else list(envs)
        for field in self._plan.carried:
            if field.key not in observed:
                self._carry.tensor(field.key)[rows] = int(field.dtype == torch.bool)
