"""Environments that make one real transition per step, and their hot loop."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError, note
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Report
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import JointAct, Policy, Stop
from gleanrl.core.window import Array, Window
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.tensor_vector import TensorVectorEnv
from gleanrl.policies.random import RandomActions
from gleanrl.rollout.delivered_fields import DeliveredFields
from gleanrl.rollout.episode_tracker import Tracker
from gleanrl.rollout.policy_inputs import Provided
from gleanrl.rollout.source import BaseSource, explanation


def dense(
    act: Callable[[int], None],
    step: Callable[[int, Sequence[int]], Sequence[int]],
    tracker: Tracker,
    steps: int,
    stop: Stop,
) -> int:
    """Take ``steps`` steps into the window that all are bound to; return the steps taken."""
    for t in range(steps):
        try:
            act(t)
        except Exception as err:
            note(err, f"the policy raised this at step {t} of the rollout")
            raise
        ended = step(t, tracker.due(t) if t == tracker.next_due else ())
        if ended:
            tracker.end(t, ended)
        if stop[0]:
            return t + 1
    return steps


class EnvLoop(BaseSource):
    """The source of dense environments: fixed layout, one real transition per step."""

    def __init__(
        self,
        env: EnvRows,
        first: Window,
        policy: Policy,
        options: SourceOptions,
        tracker: Tracker | None = None,
    ) -> None:
        """Learn the layout of ``env``, whose one reset showed ``first``, one step long.

        By default, the ``tracker`` also follows what is provided for ``policy``.
        """
        self._env = env
        super().__init__(env, env.inner, policy.inner, options)
        self.num_envs = env.layout.num_envs
        self._policy = policy
        self._random = RandomActions(env.action_specs, env.layout, policy)
        for one in (policy, self._random):
            if isinstance(one, RandomActions):
                one.streams = self.streams
        self._fields = DeliveredFields.of(env.layout, policy, options)
        self._next_root = Window.allocate(self._fields.root_fields, self.num_envs, 1)
        for key in first.keys():
            self._next_root.tensor(key).copy_(first.tensor(key))
        self._provided = Provided(policy.states, policy.provided, self._next_root)
        self.tracker = tracker or Tracker(
            self.num_envs, options.max_frames_per_traj, self._provided
        )
        if env.only_rows:
            # Bound to a proxy, as a cycle would keep memory and descriptors.
            env.on_rebuilt = MethodType(type(self)._rebuilt, weakref.proxy(self))
            self.failures, self._gone = env.failures, env.gone
        self._by_masks = env if isinstance(env, TensorVectorEnv) else None
        """Environments whose ends are known at the end of a rollout."""
        if self._by_masks is not None and self._provided:
            self._by_masks.on_ended = self._provided.started_where

    def layout(self) -> Layout:
        layout = self._fields.layout
        shape = layout.batch_shape[1:] if self.options.drop_batch else layout.batch_shape
        return replace(layout, batch_shape=shape)

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        with self.rolling():
            policy = self._begin(window, random)
            act, step = self._clock.begin(policy.act, self._env.step)
            taken = dense(act, step, self.tracker, steps, stop)
            self._end(window, policy, taken, self.policy_version)
        return self._report(taken, self.policy_version)

    @property
    def under_way(self) -> bool:
        return self._env.under_way

    def wait(self, seconds: float | None = None) -> None:
        self._env.wait(seconds)

    def settle(self) -> None:
        """Wait for a reset that goes on in another process."""
        before, self.inconsistent = self.inconsistent, True
        self._env.settle()
        self.inconsistent = before

    def collecting(
        self, window: Window, steps: int, stop: Stop, random: bool
    ) -> Generator[JointAct | None, None, Report]:
        tracker, env = self.tracker, self._env
        with self.acting():
            self.make_consistent()
            self._env.settle()
            policy = self._begin(window, random)
        act, post, complete = self._clock.begin_apart(policy.act, env.post, env.complete)
        taken, versions = 0, list[int]()
        while taken < steps and not (taken and stop[0]):
            try:
                with self.acting():
                    act(taken)
            except Exception as err:
                note(err, f"the policy raised this at step {taken} of the rollout")
                raise
            yield policy.requested
            versions.append(self.policy_version)  # weights may have changed before the act
            post(taken, tracker.due(taken) if taken == tracker.next_due else ())
            yield None
            ended = complete(taken)
            if ended:
                tracker.end(taken, ended)
            taken += 1
        with self.acting():
            self._end(window, policy, taken, np.array(versions))
        if policy.requested is not None:
            self._clock.add_policy(policy.requested.seconds)
        self.inconsistent = False
        return self._report(taken, versions[0])

    def _begin(self, window: Window, random: bool) -> Policy:
        policy, self._window = self._random if random else self._policy, window
        self._fields.begin(window, self._next_root)
        self.tracker.begin(window)
        self._env.begin(window, self._next_root)
        policy.begin(window, self._next_root)
        return policy

    def _end(self, window: Window, policy: Policy, taken: int, version: int | Array) -> None:
        self._env.finish(taken)
        if self._by_masks is not None:
            self.tracker.end_all(self._by_masks.done)
        policy.finish(taken)
        if taken < window.steps:
            for field in self._fields.root_fields:
                last = window.tensor(field.key)[:, taken : taken + 1]
                self._next_root.tensor(field.key).copy_(last)
        self._fields.finish(window, self.tracker, taken, version)

    def _rebuilt(self, t: int, env: int) -> None:
        """Note that an environment was built anew in step ``t``, or is lost since it."""
        self.env = self._env.inner
        self._fields.void(self._window, t, env, self.tracker)
        self.tracker.void(t, env, env in self._gone)

    def explain(self) -> str:
        with self._exploration(), torch.no_grad():
            parts = self._policy.explain()
        rows = "rows: each field of a step is written to its place in the batch"
        return explanation(rows, self._env.explain(), parts)

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        self._env.reset(self._next_root, envs, **options)
        if envs is None and not self._keeps:
            self._policy.forget()
        self.tracker.restart(envs)
        self._provided.restart(envs)

    def _running(self) -> dict[str, Any]:
        row = self._next_root
        return {
            "root": {key: row.tensor(key).to("cpu", copy=True) for key in row.keys()},
            "policy": self._policy.memory,
        }

    def _run_on(self, episodes: Mapping[str, Any]) -> None:
        for key, value in episodes["root"].items():
            self._next_root.tensor(key).copy_(value)
        self._policy.forget()
        self._policy.memory = episodes["policy"]


def check_can_cut(env: EnvRows, options: SourceOptions) -> None:
    """Check that single environments can be reset if that is needed."""
    if options.max_frames_per_traj is not None and not env.can_cut:
        raise ConfigError(
            f"max_frames_per_traj ({options.max_frames_per_traj}) needs to reset environments "
            f"one by one, which {type(env.inner).__name__} cannot do; set the limit where it "
            "is made (max_episode_steps), or vectorise single environments with num_envs="
        )
