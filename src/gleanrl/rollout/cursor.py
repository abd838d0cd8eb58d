"""The cursor hot loop: pools whose automatic reset costs a step, without delivering that step.

The pool steps into a log of raw steps. Environments that ended spend their next step on the reset,
so after ``T`` steps some have fewer than ``T`` transitions; the loop goes on until every one has as
many. What the others have more is left in the log, with its own policy version, and is delivered
first in the next rollout: the stream of every environment is gapless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import (
    DONE,
    MASK,
    POLICY_VERSION,
    STEP_COUNT,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    next_key,
)
from gleanrl.core.layout import EnvLayout, Field, Layout
from gleanrl.core.messages import Report
from gleanrl.core.options import RolloutOptions
from gleanrl.core.protocols import Array, Policy, Pool, Stop
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.rollout import MakePolicies, Rollout
from gleanrl.rollout.spool import Spool

_NOBODY: Array = np.zeros(0, np.int64)
_KEEP_AT_LEAST = 64
"""Raw steps that may be left over however short a rollout is."""
_LATER = np.iinfo(np.int64).max // 2


class Turns:
    """Which environments are reset at once instead of in the next step.

    Those whose episode reached its limit, and those that fell too far behind: an environment whose
    episodes are short loses a step to every reset, and what the others are ahead of it has to wait
    in the log and gets stale.
    """

    def __init__(self, envs: int, max_frames: int | None, can_cut: bool) -> None:
        """Start with every environment at the first step of an episode."""
        self._max = max_frames
        self._can_cut = can_cut
        self._born = np.zeros(envs, np.int64)
        """The step at which the running episode of each environment began."""
        self._behind = np.zeros(envs, bool)
        self._next_cut = -1
        self.active = False
        """Whether `pick` has anything to decide in this rollout."""

    def begin(self, waiting: Array, steps: int) -> None:
        """Start a rollout of ``steps`` steps; ``waiting`` of each environment are left over."""
        if self._can_cut:
            self._behind = waiting.max() - waiting > max(1, steps // 4)
        self.active = self._max is not None or bool(self._behind.any())
        self._schedule()

    def _schedule(self) -> None:
        if self._max is not None:
            self._next_cut = int(self._born.min()) + self._max - 1

    def pick(self, t: int, waited: Array, ended: Array) -> Array:
        """Return the environments to reset after step ``t``, and count their episode from there."""
        chosen = ended[self._behind[ended]]
        if self._max is None:
            return chosen
        if t == self._next_cut:
            due = (self._born == t + 1 - self._max).nonzero()[0]
            chosen = np.union1d(chosen, due)
        self._born[ended] = _LATER
        self._born[waited] = t + 1
        self._born[chosen] = t + 1
        self._schedule()
        return chosen

    def finish(self, taken: int) -> None:
        """End a rollout of ``taken`` raw steps."""
        self._born -= taken

    def restart(self, envs: Array | slice) -> None:
        """Start a new episode in ``envs``."""
        self._born[envs] = 0


def cursor(
    pool: Pool, policy: Policy, spool: Spool, turns: Turns, first: int, last: int, stop: Stop
) -> int:
    """Take raw steps ``first`` to ``last`` into the log all four are bound to; return the end."""
    act, step = policy.act, pool.step
    stateful = bool(policy.states) or spool.marks_init
    for t in range(first, last):
        act(t)
        waited, ended = step(t)
        if stateful and len(waited):
            spool.started(t, waited)
            policy.reset(t, waited.tolist())
        if turns.active:
            chosen = turns.pick(t, waited, ended)
            if len(chosen):
                spool.restarted(t, chosen)
                pool.restart(t, chosen)
                spool.started(t, chosen)
                policy.reset(t, chosen.tolist())
        if stop[0]:
            return t + 1
    return last


class CursorRollout(Rollout):
    """The source of pools: fixed layout, only real transitions are delivered."""

    def __init__(self, pool: Pool, make_policies: MakePolicies, options: RolloutOptions) -> None:
        """Reset ``pool`` once, learn the layout, build the policy on that first observation.

        Raises:
            ConfigError: ``max_frames_per_traj`` with a pool that cannot reset single environments.
        """
        if options.max_frames_per_traj is not None and not pool.can_cut:
            raise ConfigError(
                f"max_frames_per_traj ({options.max_frames_per_traj}) needs to reset environments "
                f"one by one, which {type(pool.inner).__name__} cannot do; set the limit where it "
                "is made (max_episode_steps)"
            )
        super().__init__(pool, make_policies, options)  # type: ignore[arg-type]  # steps differently
        self._pool = pool
        self._turns = Turns(pool.layout.num_envs, options.max_frames_per_traj, pool.can_cut)
        self._spool: Spool | None = None
        self._discarded = 0

    def collect(self, window: RolloutWindow, steps: int, stop: Stop, random: bool) -> Report:
        """Fill ``window`` with ``steps`` real steps, fewer if ``stop`` is raised."""
        policy = self._random if random else self._policy
        spool = self._spool = self._ready_spool(steps)
        with self.streams.active(), torch.no_grad(), self._exploration():
            if self.options.reset_at_each_iter and not self._fresh:
                self._reset(None, {})
            self._fresh = False
            spool.begin(self._carry)
            self._plan.begin(window, self._carry)
            self._tracker.begin(window, self._carry)
            self._turns.begin(spool.counts(0), steps)
            self._pool.begin(spool.window, spool.carry)
            policy.begin(spool.window, spool.carry)
            taken, ready = self._fill(policy, spool, steps, stop)
            self._pool.finish(taken)
            policy.finish(taken)
        self._turns.finish(taken)
        spool.append(taken, self.policy_version)
        self._deliver(window, spool, ready)
        discarded, self._discarded = self._discarded, 0
        return Report(ready, ready * window.envs, self.policy_version, discarded)

    def _fill(self, policy: Policy, spool: Spool, steps: int, stop: Stop) -> tuple[int, int]:
        """Step until every environment has ``steps`` transitions, or some once stopped.

        Returns:
            Raw steps taken, and transitions every environment has.
        """
        taken, goal = 0, steps
        ready = int(spool.counts(0).min())
        while ready < goal:
            end = taken + goal - ready
            taken = cursor(self._pool, policy, spool, self._turns, taken, end, stop)
            ready = int(spool.counts(taken).min())
            if stop[0]:
                goal = max(1, min(goal, ready))
        return taken, goal

    def _deliver(self, window: RolloutWindow, spool: Spool, steps: int) -> None:
        versions = spool.deliver(window, steps, self.options.track_policy_version)
        cut, discarded = spool.trim()
        self._discarded += discarded
        done = window.array(next_key(DONE))[:, :steps, 0]
        # The frames that would follow are lost: the trajectory ends with the last one delivered.
        window.array(next_key(TRUNCATED))[cut, steps - 1, 0] |= ~done[cut, -1]
        done[cut, -1] = True
        self._tracker.end_all(done)
        self._plan.finish(window, self._tracker, steps, self.policy_version)
        spool.root(self._carry)
        if versions is not None:
            for key in (POLICY_VERSION, next_key(POLICY_VERSION)):
                window.array(key)[:, :steps] = versions

    def _ready_spool(self, steps: int) -> Spool:
        old = self._spool
        if old is not None and old.steps == steps:
            return old
        # Where laggards are reset at once, this many are never left over and nothing is discarded.
        keep = max(3 * steps if self._pool.can_cut else steps, _KEEP_AT_LEAST)
        if old is not None:
            keep = max(keep, old.left)
        layout = self._pool.layout
        fields, shifted = _logged(self._plan.layout, self._plan.carried, layout)
        fresh = Spool(fields, shifted, layout.num_envs, steps, keep)
        if old is not None:
            fresh.adopt(old)
        return fresh

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        super()._reset(envs, options)
        which = slice(None) if envs is None else np.array(list(envs), np.int64)
        self._turns.restart(which)
        if self._spool is not None:
            self._discarded += self._spool.reset(which)


def _logged(
    layout: Layout, carried: Sequence[Field], env: EnvLayout
) -> tuple[list[Field], list[Key]]:
    """Return what the log holds, and which root keys give ``"next"`` from the following row."""
    observed = {field.key for field in env.observations}
    shifted = [key for key in observed if any(f.key == next_key(key) for f in layout.fields)]
    bulk = {TRAJ_IDS, MASK, STEP_COUNT, POLICY_VERSION}
    bulk |= {key for group in env.dones for key in group.keys()}
    bulk -= observed
    bulk |= {next_key(key) for key in (STEP_COUNT, POLICY_VERSION, *shifted)}
    found = {f.key: f for f in (*carried, *layout.fields) if f.key not in bulk}
    return list(found.values()), shifted
