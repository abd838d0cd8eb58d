"""The loop for data without fixed layout: everything travels on one TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import set_interaction_type

from gleanrl.core.errors import EnvError
from gleanrl.core.keys import (
    IS_INIT,
    MASK,
    NEXT,
    POLICY_VERSION,
    STEP_COUNT,
    TIME,
    TRAJ_IDS,
    as_key,
    is_private,
    next_key,
    show,
)
from gleanrl.core.layout import Field
from gleanrl.core.messages import Payload, Report
from gleanrl.core.options import RolloutOptions
from gleanrl.core.protocols import Array, Stop, Window
from gleanrl.envs.tensordict_handle import TensorDictHandle
from gleanrl.envs.tensordict_layout import spec_leaves
from gleanrl.memory.window import RolloutWindow
from gleanrl.policies.loose import leaves
from gleanrl.rollout.plan import check_options, end_groups
from gleanrl.rollout.rollout import Served
from gleanrl.rollout.tracker import Tracker

CarrierPolicy: TypeAlias = Callable[[TensorDictBase], Any]
"""Sets its outputs in the TensorDict it is given, or returns another one that holds them."""


class CarrierRollout(Served):
    """The source of environments whose data are ragged, lazy or not tensors.

    Rollouts are delivered as payloads: step TensorDicts stacked along the last dimension, densely
    where shapes agree and lazily where they do not. One that is stopped keeps its length: beyond
    its last step tensors are zero, and other entries repeat what that step has.
    """

    def __init__(
        self,
        env: Any,
        policy: CarrierPolicy | None,
        options: RolloutOptions,
        *,
        first: TensorDictBase | None = None,
        states: Sequence[Field] = (),
        is_init: bool = False,
        silence: TensorDictBase | None = None,
    ) -> None:
        """Reset ``env`` once, unless ``first`` is given.

        Args:
            env: A built TensorDict environment. Closed by `close`.
            policy: What acts; ``None`` acts at random.
            options: What the user asked for.
            first: What ``env.reset()`` returned, if it was called already. Taken over.
            states: Root entries of the policy's recurrent state: its ``("next", ...)`` outputs feed
                them, and they are zero where an episode begins.
            is_init: Whether to tell the policy, as ``"is_init"``, where an episode begins.
            silence: What random frames hold in place of what the policy writes beside actions.

        Raises:
            ConfigError: ``max_frames_per_traj`` with an environment that counts steps itself.
            EnvError: ``set_truncated`` with an environment that cannot tell truncation.
        """
        self._handle = TensorDictHandle(env, first)
        super().__init__(self._handle, env, policy, options)
        self._policy: CarrierPolicy | None = policy
        self._batch = tuple(env.batch_size)
        groups = self._handle.ends.groups
        self._mute = tuple(group.prefix for group in groups if not group.truncated)
        """Prefixes of end flags among which the environment has no ``"truncated"``."""
        self._groups = end_groups(options, groups)
        observed = [key for key, _ in spec_leaves(env.full_observation_spec)]
        check_options(options, observed, self._groups)
        self.num_envs = envs = self._handle.num_envs
        """Asked for by name: without a layout nothing else tells."""
        self.tracker = Tracker(envs, options.max_frames_per_traj)
        # The tracker looks for "is_init" rows, of which a window without fields has none.
        self._no_rows = RolloutWindow({}, envs, 1)
        self._states = tuple(states)
        self._tells_init = is_init
        self._silence = silence
        self._finite = {
            key
            for spec in (env.full_observation_spec, env.full_reward_spec)
            for key, _ in spec_leaves(spec)
        }
        self._hidden = set(map(next_key, observed))
        self._begin_episodes(list(range(envs)))

    def own_policy(self) -> None:
        """Act with a copy of the policy.

        Raises:
            NotImplementedError: not here.
        """
        raise NotImplementedError(
            "data without a fixed layout cannot be collected in the background in one process with "
            "a module that is trained meanwhile; use MultiAsyncCollector with num_workers=1"
        )

    def layout(self) -> None:
        """Return ``None``: steps have no fixed layout, rollouts travel as payloads."""

    def collect(self, window: Window | None, steps: int, stop: Stop, random: bool) -> Report:
        """Take ``steps`` steps, fewer if ``stop`` is raised; ``window`` is not used."""
        act = self._act_randomly if random or self._policy is None else self._act
        exploration = set_interaction_type(self.options.exploration)
        torn = self.torn
        with self.whole(), self.streams.active(), torch.no_grad(), exploration:
            self.start_over(torn)
            self.tracker.begin(self._no_rows, self._no_rows)
            taken = [self._step(0, act)]
            while len(taken) < steps and not stop[0]:
                taken.append(self._step(len(taken), act))
            batch = self._assemble(taken, steps)
        frames = len(taken) * self._handle.num_envs
        return Report(len(taken), frames, self.policy_version, payload=Payload(batch))

    # -- one step --------------------------------------------------------------------------------

    def _step(self, t: int, act: Callable[[], None]) -> TensorDictBase:
        act()
        tracker, handle = self.tracker, self._handle
        finished, after, ended = handle.step(tracker.due(t) if t == tracker.next_cut else ())
        # A copy: the environment may use its buffers again, and lazy stacks keep what they get.
        step = finished.clone()
        for state in self._states:
            handle.root.set(state.key, after.get(state.key))
        if self._tells_init:
            handle.root.set(IS_INIT, torch.zeros((*self._batch, 1), dtype=torch.bool))
        if ended:
            tracker.end(t, ended)
            self._begin_episodes(ended)
        if self.options.check_finite:
            self._check_finite(step, t)
        return step

    def _act(self) -> None:
        root = self._handle.root
        out = self._policy(root)  # type: ignore[misc]  # chosen only if there is a policy
        if out is not None and out is not root:
            root.update(out)

    def _act_randomly(self) -> None:
        handle = self._handle
        handle.root = handle.env.rand_action(handle.root)
        if self._silence is not None:
            handle.root.update(self._silence.clone())
        for state in self._states:
            handle.root.set(next_key(state.key), torch.zeros_like(handle.root.get(state.key)))

    def _begin_episodes(self, envs: Sequence[int]) -> None:
        """Zero the policy's state and raise ``"is_init"`` in ``envs``."""
        root = self._handle.root
        for state in self._states:
            value = root.get(state.key, None)
            if value is None:
                value = torch.zeros((*self._batch, *state.shape), dtype=state.dtype)
            root.set(state.key, self._fill(value, envs, 0))
        if self._tells_init:
            value = root.get(IS_INIT, torch.zeros((*self._batch, 1), dtype=torch.bool))
            root.set(IS_INIT, self._fill(value, envs, 1))

    def _fill(self, value: torch.Tensor, envs: Sequence[int], with_: int) -> torch.Tensor:
        flat = value.reshape(self._handle.num_envs, *value.shape[len(self._batch) :]).clone()
        flat[list(envs)] = with_
        return flat.reshape(value.shape)

    def _delivered(self, batch: TensorDictBase) -> TensorDictBase:
        drop = [key for key in leaves(batch) if is_private(key)]
        if self.options.compact:
            drop += self._hidden
        return batch.exclude(*drop) if drop else batch

    def _check_finite(self, step: TensorDictBase, t: int) -> None:
        def look(name: Any, value: torch.Tensor) -> None:
            key = as_key(name)
            own = key[1:] if key[0] == NEXT else key
            if own in self._finite and value.is_floating_point() and not value.isfinite().all():
                raise EnvError(
                    f"{show(key)} holds NaN or infinity at step {t} of the rollout "
                    "(check_finite=True)"
                )

        step.named_apply(look, nested_keys=True, filter_empty=True)

    # -- a whole rollout -------------------------------------------------------------------------

    def _assemble(self, taken: list[TensorDictBase], steps: int) -> TensorDictBase:
        options, valid, envs = self.options, len(taken), self._handle.num_envs
        # Each its own: lazy stacks set entries in what they hold.
        never = [taken[-1].apply(torch.zeros_like) for _ in range(valid, steps)]
        stack = LazyStackedTensorDict.maybe_dense_stack([*taken, *never], len(self._batch))
        batch = self._delivered(stack)
        batch.names = [None] * len(self._batch) + [TIME]
        ids, counts = np.zeros((envs, steps), np.int64), np.zeros((envs, steps + 1), np.int64)
        self.tracker.finish(valid, ids, counts)
        if options.track_traj_ids:
            batch.set(TRAJ_IDS, self._shaped(ids))
        if options.max_frames_per_traj is not None:
            self._add_truncated(batch)
            after = counts[:, :-1] + 1
            counts[:, valid:], after[:, valid:] = 0, 0
            batch.set(STEP_COUNT, self._shaped(counts[:, :-1]).unsqueeze(-1))
            batch.set(next_key(STEP_COUNT), self._shaped(after).unsqueeze(-1))
        made = torch.arange(steps).expand(batch.batch_size) < valid
        if options.track_policy_version:
            batch.set(POLICY_VERSION, made * self.policy_version)
            batch.set(next_key(POLICY_VERSION), made * self.policy_version)
        if options.mask:
            batch.set(MASK, made)
        if options.set_truncated:
            self._truncate(batch, valid - 1)
        return batch

    def _add_truncated(self, batch: TensorDictBase) -> None:
        """Give the flag to groups whose environment has none: done without having terminated."""
        for prefix in self._mute:
            done, dead = (batch.get((NEXT, *prefix, name)) for name in ("done", "terminated"))
            batch.set((NEXT, *prefix, "truncated"), done & ~dead)
            batch.set((*prefix, "truncated"), torch.zeros_like(done))

    def _shaped(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values.copy()).reshape(*self._batch, -1)

    def _truncate(self, batch: TensorDictBase, step: int) -> None:
        """Mark ``step`` as truncated where the episode did not end by itself."""
        dim = len(self._batch)
        for group in self._groups:
            if group.truncated:
                late, done = (
                    batch.get((NEXT, *group.prefix, name)).clone() for name in ("truncated", "done")
                )
                last = done.select(dim, step)
                late.select(dim, step).logical_or_(~last)
                last.fill_(True)
                batch.set((NEXT, *group.prefix, "truncated"), late)
                batch.set((NEXT, *group.prefix, "done"), done)

    # -- between rollouts ------------------------------------------------------------------------

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        self._handle.reset(envs, options)
        self.tracker.restart(envs)
        self._begin_episodes(range(self._handle.num_envs) if envs is None else envs)
