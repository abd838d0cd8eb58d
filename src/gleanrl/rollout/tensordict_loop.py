"""The loop on one TensorDict: environment and policy are called as they are.

The TensorDict is carried from step to step, and whatever stands in it stays until somebody replaces
it: what the policy wrote (also under names that nobody declared), what the environment added beside
its specs. What the policy wrote under ``"next"`` replaces the root entry; a reset replaces what the
environment's reset returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from gleanrl.core.episode_returns import mean_rewards
from gleanrl.core.errors import EnvError, note
from gleanrl.core.keys import IS_INIT, NEXT, TRUNCATED, as_key, format_key, is_private, next_key
from gleanrl.core.layout import EnvLayout, Layout
from gleanrl.core.messages import Report
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Stop
from gleanrl.core.window import Array, Window
from gleanrl.envs.tensordict_envs import TensorDictHandle
from gleanrl.memory.tensordicts import stacked, time_named
from gleanrl.policies.env_contract import EnvContract
from gleanrl.policies.policy import Actor
from gleanrl.policies.probe import leaves
from gleanrl.rollout.delivered_fields import DeliveredFields, check_options, end_groups
from gleanrl.rollout.episode_tracker import Tracker
from gleanrl.rollout.finished_steps import DECLARE_TRUNCATED, StepRecorder, expect, shown_entries
from gleanrl.rollout.source import BaseSource, explanation


class TensorDictLoop(BaseSource):
    """The source of environments that are stepped by their TensorDict methods.

    Rollouts of a fixed layout go into the window. Those of an open layout are delivered as
    payloads: step TensorDicts stacked along the last dimension, densely where shapes agree and
    lazily where they do not. One that is stopped keeps its length: beyond its last step tensors are
    zero, and other entries of payloads repeat what that step has.
    """

    def __init__(
        self,
        handle: TensorDictHandle,
        actor: Actor,
        contract: EnvContract,
        options: SourceOptions,
        why: str,
    ) -> None:
        """Collect from the environment of ``handle``, which was reset once; `close` closes it.

        ``why`` says why this is the loop that fits. Errors as of `check_options`.
        """
        env = handle.env
        super().__init__(handle, handle.inner, actor.user, options)
        self._handle, self._actor = handle, actor
        self._why = why
        self._batch = tuple(env.batch_size)
        groups = handle.ends.groups
        written = () if actor.zero_outputs is None else leaves(actor.zero_outputs)
        check_options(options, contract.observed, end_groups(options, groups), written)
        self.num_envs = envs = handle.num_envs
        self.tracker = Tracker(envs, options.max_frames_per_traj)
        self._ages: Array
        """Steps that each environment has taken in its episode."""
        # Steps are kept whole: nothing passes to the next rollout in rows.
        self._no_rows = Window({}, envs, 1)
        self._rewards = list(map(next_key, contract.rewarded))
        self._finite = {*contract.observed, *contract.rewarded}
        expected = expect(env, actor, contract, options) if options.fast else None
        hidden = map(next_key, contract.observed) if expected is None else expected.ignored
        self._hidden = tuple(hidden) if options.compact_obs else ()
        self._fields = (
            DeliveredFields(EnvLayout(self._batch, (), (), (), dones=groups), (), (), options)
            if expected is None
            else expected.fields
        )
        self._has_layout = expected is not None
        shown = shown_entries(contract, handle.ends.keys, actor.after)
        self._recorder = StepRecorder(handle.kind, shown, expected)
        self._zero_states(range(envs))

    def explain(self) -> str:
        """Return the path of every part, with the reasons."""
        policy = self._actor.policy
        with self._exploration(), torch.no_grad():
            parts = ["random actions, drawn by the environment"]
            parts = parts if policy is None else policy.explain()
        fixed = "steps go into rows, if the first one is what was expected"
        loop = f"one TensorDict, carried from step to step ({self._why}); "
        return explanation(
            loop + (fixed if self._has_layout else "steps have no fixed layout"),
            f"{self._handle.kind}, called as it is by its TensorDict methods",
            parts,
        )

    def layout(self) -> Layout | None:
        return self._fields.layout if self._has_layout else None

    def collect(self, window: Window | None, steps: int, stop: Stop, random: bool) -> Report:
        recorder, policy = self._recorder, self._actor.policy
        with self.rolling():
            act = self._act
            if random or policy is None:
                act = self._begin_random()
            if policy is not None:
                policy.begin()
            recorder.begin(window)
            if recorder.steps is None:
                assert window is not None
                self._fields.begin(window, self._no_rows)
            self.tracker.begin(self._no_rows)
            self._ages = self.tracker.ages.copy()
            if self._actor.provided:
                act = self._providing(act)
            self._handle.begin()
            act, step = self._clock.begin(act, self._handle.step)
            taken = self._loop(act, step, steps, stop)
            if policy is not None:
                policy.finish()
            payload = None
            if recorder.steps is None:
                assert window is not None
                self._fields.complete_flags(window, self._handle.ends.keys, taken)
                self._fields.finish(window, self.tracker, taken, self.policy_version)
            else:
                payload = self._assemble(recorder.steps, steps)
        return self._report(taken, self.policy_version, payload=payload)

    # -- one step --------------------------------------------------------------------------------

    def _loop(
        self, act: Callable[[], None], step: Callable[..., Sequence[int]], steps: int, stop: Stop
    ) -> int:
        handle, tracker, recorder = self._handle, self.tracker, self._recorder
        follow = self._follow if self._actor.policy_written_state else None
        before, after = recorder.before, recorder.after
        for t in range(steps):
            try:
                act()
            except Exception as err:
                note(err, f"the policy raised this at step {t} of the rollout")
                raise
            before(handle.root)
            try:
                ended = step(tracker.due(t) if t == tracker.next_due else (), after)
            except Exception as err:
                note(err, f"{handle.kind} raised this at step {t} of the rollout")
                raise
            if follow is not None:
                follow()
            if ended:
                tracker.end(t, ended)
                self._ages[list(ended)] = 0
                self._zero_states(ended)
            if stop[0]:
                return t + 1
        return steps

    def _act(self) -> None:
        root, actor = self._handle.root, self._actor
        policy = actor.policy
        assert policy is not None
        if actor.device is None:
            out = policy(root)
            if out is not root:
                root.update(out)
        else:
            home = root.device or torch.device("cpu")
            root.update(policy(root.to(actor.device)).to(home))
        for key, dtype in actor.casts:
            root.set(key, root.get(key).to(dtype))

    def _providing(self, act: Callable[[], None]) -> Callable[[], None]:
        """Return ``act`` preceded by telling the policy how far episodes are."""
        keys, shape = tuple(self._actor.provided), (*self._batch, 1)

        def provided() -> None:
            for key in keys:
                value = self._ages == 0 if key == IS_INIT else self._ages.copy()
                self._handle.root.set(key, torch.from_numpy(value).view(shape))
            self._ages += 1
            act()

        return provided

    def _begin_random(self) -> Callable[[], None]:
        """Return a random actor; the policy's other entries are zero, and carried as usual."""
        handle, actor, acting = self._handle, self._actor, self.streams.acting
        if actor.zero_outputs is not None:
            handle.root.update(actor.zero_outputs.clone())
        states = [(state.key, next_key(state.key)) for state in actor.states]

        def act() -> None:
            with acting():
                root = handle.root = handle.env.rand_action(handle.root)
            for key, after in states:
                root.set(after, torch.zeros_like(root.get(key)))

        return act

    def _follow(self) -> None:
        """Replace root entries by the policy's entries under ``"next"``."""
        root, after = self._handle.root, self._handle.after
        assert after is not None
        for key in self._actor.policy_written_state:
            value = after.get(key, None)
            if value is not None:
                root.set(key, value)

    def _zero_states(self, envs: Sequence[int]) -> None:
        """Have episodes of ``envs`` begin with states of zeros."""
        root = self._handle.root
        for state in self._actor.states:
            shape, value = (*self._batch, *state.shape), root.get(state.key, None)
            if value is None:
                value = torch.zeros(shape, dtype=state.dtype, device=root.device)
            flat = value.reshape((self.num_envs, *value.shape[len(self._batch) :])).clone()
            flat[list(envs)] = 0
            root.set(state.key, flat.reshape(value.shape))

    # -- a whole rollout -------------------------------------------------------------------------

    def _assemble(self, taken: list[TensorDictBase], steps: int) -> TensorDictBase:
        """Stack the steps, and add the entries that are counted in bulk."""
        fields, valid = self._fields, len(taken)
        self._check_declared(taken)
        if self.options.check_finite:
            for t, step in enumerate(taken):
                self._check_finite(step, t)
        # Each its own: lazy stacks set entries in what they hold.
        never = [taken[-1].apply(torch.zeros_like) for _ in range(valid, steps)]
        stack = stacked([*taken, *never], len(self._batch))
        drop = [*self._hidden, *filter(is_private, leaves(stack))]
        batch = time_named(stack.exclude(*drop) if drop else stack, len(self._batch))
        window = Window.allocate(fields.layout.fields, self.num_envs, steps)
        fields.begin(window, self._no_rows)
        there = leaves(batch)
        given = [key for key in fields.flags if next_key(key) in there]
        for key in given:
            rows = window.tensor(next_key(key))
            rows.copy_(batch.get(next_key(key)).reshape(rows.shape))
        fields.complete_flags(window, given, valid)
        found = [[step.get(key) for key in self._rewards] for step in taken]
        # One per frame, ``[P, T]``; steps need not be alike.
        rewards = np.stack([mean_rewards(own, self._batch).reshape(-1) for own in found], 1)
        fields.finish(window, self.tracker, valid, self.policy_version, rewards)
        flags = {*fields.flags, *map(next_key, fields.flags)}
        written = {*fields.bulk, *(flags - there)}
        if self.options.set_truncated:
            written.update(map(next_key, fields.flags))
        for field in fields.layout.fields:
            if field.key in written:
                value = window.tensor(field.key)
                batch.set(field.key, value.reshape(*batch.batch_size, *field.shape))
        return batch

    def _check_declared(self, steps: list[TensorDictBase]) -> None:
        """Refuse an undeclared ``"truncated"``, which the environment would ignore."""
        for group in self._handle.ends.groups:
            key = (NEXT, *group.prefix, *TRUNCATED)
            if not group.truncated and any(step.get(key, None) is not None for step in steps):
                name = f"{self._handle.kind} returned {format_key(key)}"
                raise EnvError(f"{name}. {DECLARE_TRUNCATED}")

    def _check_finite(self, step: TensorDictBase, t: int) -> None:
        def look(name: Any, value: torch.Tensor) -> None:
            key = as_key(name)
            own = key[1:] if key[0] == NEXT else key
            if own in self._finite and value.is_floating_point() and not value.isfinite().all():
                raise EnvError(
                    f"{format_key(key)} holds NaN or infinity at step {t} of the rollout "
                    "(check_finite=True)"
                )

        step.named_apply(look, nested_keys=True, filter_empty=True)

    # -- between rollouts ------------------------------------------------------------------------

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        handle, before = self._handle, self._handle.root
        handle.reset(envs, options)
        if self._keeps and handle.root is not before:
            handle.root = before.exclude(NEXT).update(handle.root)
        self.tracker.restart(envs)
        self._zero_states(range(self.num_envs) if envs is None else envs)
