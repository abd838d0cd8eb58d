"""The loop of asynchronous pools: the policy acts for the environments that answer first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gleanrl.core.episode_returns import episodes_that_ended
from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import DONE, IS_INIT, Key, next_key
from gleanrl.core.layout import Layout
from gleanrl.core.messages import Report
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Policy, Stop
from gleanrl.core.window import Array, Window
from gleanrl.envs.async_pool import AsyncPool
from gleanrl.policies.random import RandomActions
from gleanrl.policies.recorded_or_called_policy import ProgramPolicy
from gleanrl.rollout.chunks import Chunks
from gleanrl.rollout.env_loop import EnvLoop
from gleanrl.rollout.episode_tracker import Tracker
from gleanrl.rollout.pool_loop import logged_fields, next_step
from gleanrl.rollout.source import BaseSource

_NEVER = bytearray(1)
"""A stop byte that nobody raises: a rollout ends when enough environments have all of its steps."""


class AsyncPoolLoop(EnvLoop):
    """The source of pools that answer for ``M`` of ``N`` environments at a time.

    A rollout has ``M`` rows, each with consecutive transitions of one environment: of those that
    were first, so that one that is slow holds up no other. Trajectory ids tell which they are.
    """

    collecting, under_way, wait = BaseSource.collecting, BaseSource.under_way, BaseSource.wait
    tracker: _RowsTracker

    def __init__(
        self, pool: AsyncPool, first: Window, policy: Policy, options: SourceOptions
    ) -> None:
        """Learn the layout of ``pool``, whose one reset showed ``first``; see `EnvLoop`."""
        if options.reset_at_each_iter:
            raise ConfigError(
                "reset_at_each_iter would discard the steps of environments that are not first; "
                "leave out batch_size where the pool is made"
            )
        self._pool = pool
        super().__init__(pool, first, policy, options, _RowsTracker(pool.all_envs))
        self.num_envs, self._width = pool.all_envs, pool.num_envs
        if isinstance(policy, ProgramPolicy):
            policy.signature.check_needs_nothing_back()
            policy.called.gets_back = ()  # each row is of other environments than the row before
        self._logged = logged_fields(self._fields, pool.layout, policy)
        self._arriving = [next_key(field.key) for field in pool.layout.rewards]
        self._arriving += [next_key(key) for group in pool.layout.dones for key in group.keys()]
        self._chunks: Chunks | None = None
        self._states = _States(policy, pool.all_envs)
        self._states.restart(pool.at_hand)
        self._discarded = 0

    def layout(self) -> Layout:
        """Describe one step; a rollout has rows of some of the environments."""
        return replace(super().layout(), environments=self._pool.all_envs)

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        """Fill ``window`` with ``steps`` steps of the environments that are first."""
        policy = self._random if random else self._policy
        chunks = self._ready_chunks(steps)
        with self.rolling():
            chunks.begin(self._next_root)
            act, step = self._clock.begin(lambda t: policy.act(t), self._pool.step)
            while (missing := self._width - len(chunks.full)) > 0:
                count = chunks.rows_needed(missing)
                self._pool.begin(chunks.window, chunks.next_root)
                if isinstance(policy, RandomActions):
                    policy.ahead = count
                policy.begin(chunks.window, chunks.next_root)
                follow = self._states.begin(chunks, self._pool.ids)
                next_step(act, step, follow, 0, count, _NEVER)
                self._pool.finish(count)
                policy.finish(count)
                chunks.take(count, self._pool.ids, self.policy_version)
            chunks.root(self._next_root)
            self._fields.begin(window, self._next_root)
            self.tracker.rows, versions = chunks.deliver(window)
            self.tracker.done = window.array(next_key(DONE))[..., 0]
            self._fields.finish(window, self.tracker, steps, versions)
        discarded, self._discarded = self._discarded, 0
        report = self._report(steps, int(versions.min()), discarded)
        return replace(report, frames=steps * self._width)

    def _ready_chunks(self, steps: int) -> Chunks:
        """Return the chunks of rollouts of ``steps`` steps."""
        if self._chunks is None:
            size = self.num_envs, self._width, steps
            self._chunks = Chunks(*self._logged, self._arriving, size)
        elif self._chunks.steps != steps:
            raise ConfigError(
                f"all rollouts of an asynchronous pool must be of one length, not of "
                f"{self._chunks.steps} and of {steps} steps"
            )
        return self._chunks

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        super()._reset(envs, options)
        self._states.restart(self._pool.at_hand)
        if self._chunks is not None:
            self._discarded += self._chunks.reset()


class _States:
    """Recurrent states and ``"is_init"`` of each environment between its rows."""

    def __init__(self, policy: Policy, envs: int) -> None:
        self._states, self._init = policy.states, IS_INIT in policy.provided
        self._kept: dict[Key, Array] = {}
        self._over = np.ones(envs, bool)
        """Environments whose next answer begins an episode."""

    def begin(self, chunks: Chunks, ids: Array) -> Callable[[int], None] | None:
        """Return a function to call after every step, or ``None`` if there is nothing to do."""
        if not self._states and not self._init:
            return None
        rows, over = chunks.rows, self._over
        for key in self._states:
            if key not in self._kept:
                self._kept[key] = np.zeros((len(over), *rows[key].shape[2:]), rows[key].dtype)

        def follow(t: int) -> None:
            before, now = ids[t], ids[t + 1]
            first = over[now]
            for key, kept in self._kept.items():
                kept[before] = rows[key][t + 1]
                kept[now[first]] = 0
                rows[key][t + 1] = kept[now]
            if self._init:
                rows[IS_INIT][t + 1, :, 0] = first
            over[now] = rows[next_key(DONE)][t, :, 0]

        return follow

    def restart(self, at_hand: Array) -> None:
        """Have every environment begin an episode; those ``at_hand`` have begun it."""
        self._over[:] = True
        self._over[at_hand] = False


class _RowsTracker(Tracker):
    """Counts episodes and steps of ``N`` environments; a rollout has rows of some of them."""

    rows: Array
    """The environment of each row of the rollout, and"""
    done: Array
    """whether an episode ends with each step, ``[M, T]``."""

    def __init__(self, envs: int) -> None:
        super().__init__(envs, None)
        self._returns = np.zeros(envs)
        """What each running episode has returned."""

    def finish(self, steps: int, rewards: Array, ids: Array | None, counts: Array | None) -> None:
        # The rows of an environment, which follow each other in time, are one sequence here.
        order = np.argsort(self.rows, kind="stable")
        envs, done = self.rows[order], self.done[order]
        lead = np.diff(envs, prepend=-1) != 0
        begins = np.zeros(done.shape, bool)
        begins[:, 0] = lead
        begins.reshape(-1)[1:] |= done.reshape(-1)[:-1]
        run = (begins.cumsum() - 1).reshape(done.shape)
        """Which run of frames of one episode each frame is part of."""
        runs = run.reshape(-1)
        totals = np.array((np.bincount(runs, rewards[order].reshape(-1)), np.bincount(runs)))
        own, first, tail = envs[lead], run[lead, 0], np.roll(lead, -1)
        last, over = run[tail, -1], done[tail, -1]
        self._returns[self._begun], self._begun = 0.0, self._begun[:0]
        totals[:, first] += self._returns[own], self.ages[own]
        self.ended = episodes_that_ended(totals[:, run[done]].T)
        if ids is not None:
            number = self._episode[envs] - first[lead.cumsum() - 1]
            ids[order] = (run + number[:, None]) * self._stride + self._index[envs, None]
        self._episode[own] += last - first + over
        self._returns[own], self.ages[own] = np.where(over, 0, totals[:, last])
