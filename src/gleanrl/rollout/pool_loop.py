"""The next-step hot loop: pools whose automatic reset costs a step, without delivering that step.

The pool steps into a log of raw steps. Environments that ended spend their next step on the reset,
so after ``T`` steps some have fewer than ``T`` transitions; the loop steps until every one has as
many. What the others have more is left in the log, with its own policy version, and is delivered
first in the next rollout: the stream of every environment is gapless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gleanrl.core.errors import EnvError, note
from gleanrl.core.keys import DONE, MASK, POLICY_VERSION, STEP_COUNT, TRAJ_IDS, Key, next_key
from gleanrl.core.layout import EnvLayout, Field
from gleanrl.core.messages import Report
from gleanrl.core.options import SourceOptions
from gleanrl.core.protocols import Policy, Stop
from gleanrl.core.window import Array, Window
from gleanrl.envs.vector import NextStepPool
from gleanrl.policies.random import RandomActions
from gleanrl.rollout.delivered_fields import DeliveredFields
from gleanrl.rollout.env_loop import EnvLoop
from gleanrl.rollout.episode_tracker import Tracker
from gleanrl.rollout.policy_inputs import Provided
from gleanrl.rollout.source import BaseSource
from gleanrl.rollout.step_log import StepLog

_KEEP_AT_LEAST = 64
"""Raw steps that may be left over, even if a rollout is shorter."""
_LATER = np.iinfo(np.int64).max // 2


class ResetTracker:
    """Follows the resets of a pool in rollouts that need to know them at once.

    They are needed for what is provided for the policy, and to reset some environments at once
    instead of in the next step: those whose episode reached its limit, and those that fell too far
    behind. Short episodes lose a step to every reset, and the steps that others are ahead wait in
    the log and get stale.
    """

    def __init__(self, pool: NextStepPool, max_frames: int | None, provided: Provided) -> None:
        """Start with every environment at the first step of an episode."""
        envs = pool.layout.num_envs
        self._pool, self._provided = pool, provided
        self._max = max_frames
        self._born = np.zeros(envs, np.int64)
        """The step at which the running episode of each environment began."""
        self._behind = np.zeros(envs, bool)
        self._waiting = np.zeros(0, np.int64)
        self._next_due = -1
        self._log: StepLog

    def begin(self, log: StepLog) -> Callable[[int], None] | None:
        """Start a rollout; return a function to call after every step, or ``None``."""
        self._log = log
        self._provided.begin(log.window, -self._born, log.next_root)
        self._waiting = np.flatnonzero(log.waiting)
        if self._pool.can_cut:
            stock = log.counts(0)
            self._behind = stock.max() - stock > max(1, log.steps // 4)
        self._schedule()
        busy = self._provided or self._max is not None or self._behind.any()
        return self._follow if busy else None

    def _follow(self, t: int) -> None:
        waited, ended = self._waiting, self._log.ended(t)
        self._waiting = ended
        if len(waited):
            self._started(t, waited)
        chosen = self._pick(t, ended)
        if len(chosen):
            self._log.restarted(t, chosen)
            self._pool.restart(t, chosen)
            self._waiting = np.setdiff1d(ended, chosen)
            self._started(t, chosen)

    def _started(self, t: int, envs: Array) -> None:
        self._provided.started(t, envs)
        if self._max is not None:
            self._born[envs] = t + 1
            self._schedule()

    def _pick(self, t: int, ended: Array) -> Array:
        chosen = ended[self._behind[ended]]
        if self._max is None:
            return chosen
        if t == self._next_due:
            chosen = np.union1d(chosen, np.flatnonzero(self._born == t + 1 - self._max))
        self._born[ended] = _LATER
        self._schedule()
        return chosen

    def _schedule(self) -> None:
        if self._max is not None:
            self._next_due = int(self._born.min()) + self._max - 1

    def finish(self, taken: int) -> None:
        """End a rollout of ``taken`` raw steps."""
        self._born -= taken

    def state(self) -> torch.Tensor:
        """Return the step at which each running episode began."""
        return torch.from_numpy(self._born.copy())

    def load_state(self, state: torch.Tensor) -> None:
        self._born = state.numpy().copy()

    def restart(self, envs: Array | slice) -> None:
        """Start a new episode in ``envs``, between rollouts."""
        self._born[envs] = 0


def next_step(
    act: Callable[[int], None],
    step: Callable[[int], None],
    follow: Callable[[int], None] | None,
    first: int,
    last: int,
    stop: Stop,
) -> int:
    """Take raw steps ``first`` to ``last`` into the log that both are bound to; return the end."""
    for t in range(first, last):
        try:
            act(t)
        except Exception as err:
            note(err, f"the policy raised this at step {t} of the rollout")
            raise
        step(t)
        if follow is not None:
            follow(t)
        if stop[0]:
            return t + 1
    return last


class PoolLoop(EnvLoop):
    """The source of pools: fixed layout, only real transitions are delivered."""

    collecting, under_way, wait = BaseSource.collecting, BaseSource.under_way, BaseSource.wait

    def __init__(
        self, pool: NextStepPool, first: Window, policy: Policy, options: SourceOptions
    ) -> None:
        """Learn the layout of ``pool``, whose one reset showed ``first``; see `EnvLoop`."""
        # Raw steps, of which some are no transitions, are followed by `ResetTracker`.
        tracker = Tracker(pool.num_envs, options.max_frames_per_traj)
        super().__init__(pool, first, policy, options, tracker)
        self._pool = pool
        self._resets = ResetTracker(pool, options.max_frames_per_traj, self._provided)
        self._logged = logged_fields(self._fields, pool.layout, policy)
        self._log: StepLog | None = None
        self._discarded = 0

    def collect(self, window: Window, steps: int, stop: Stop, random: bool) -> Report:
        policy = self._random if random else self._policy
        log = self._log = self._ready_log(steps)
        with self.rolling():
            log.begin(self._next_root)
            self._fields.begin(window, self._next_root)
            self.tracker.begin(log.window)
            self._pool.begin(log.window, log.next_root)
            policy.begin(log.window, log.next_root)
            taken, ready = self._fill(policy, log, steps, stop)
            self._pool.finish(taken)
            policy.finish(taken)
            self._resets.finish(taken)
            log.append(taken, self.policy_version)
            self._deliver(window, log, ready)
        discarded, self._discarded = self._discarded, 0
        return self._report(ready, log.oldest_version, discarded)

    def _fill(self, policy: Policy, log: StepLog, steps: int, stop: Stop) -> tuple[int, int]:
        """Step until every environment has ``steps`` transitions, or some once stopped.

        Returns raw steps taken, and transitions every environment has.
        """
        taken, goal, follow = 0, steps, self._resets.begin(log)
        act, step = self._clock.begin(policy.act, self._pool.step)
        ready = int(log.counts(0).min())
        while ready < goal:
            end = taken + goal - ready
            if end > log.window.steps:
                raise EnvError(
                    "an environment returned an end flag also in steps that only reset it "
                    "(NEXT_STEP mode), so it makes no transition; return False there"
                )
            if isinstance(policy, RandomActions):
                policy.ahead = goal - ready
            taken = next_step(act, step, follow, taken, end, stop)
            ready = int(log.counts(taken).min())
            if stop[0]:
                goal = max(1, min(goal, ready))
        return taken, goal

    def _deliver(self, window: Window, log: StepLog, steps: int) -> None:
        versions = log.deliver(window, steps, self.options.track_policy_version)
        cut, discarded = log.trim()
        self._discarded += discarded
        done = window.array(next_key(DONE))[:, :steps, 0]
        # The frames that would follow are lost: the trajectory ends with the last one delivered.
        if len(cut):
            self._fields.truncate(window, steps - 1, cut)
        self.tracker.end_all(done)
        self._fields.finish(window, self.tracker, steps, versions)
        log.root(self._next_root)

    def _ready_log(self, steps: int) -> StepLog:
        old = self._log
        if old is not None and old.steps == steps:
            return old
        # Where laggards are reset at once, this many are never left over and nothing is discarded.
        keep = max(3 * steps if self._pool.can_cut else steps, _KEEP_AT_LEAST)
        if old is None:
            return self._make_log(steps, keep)
        return self._make_log(steps, max(keep, old.left), old.state())

    def _make_log(self, steps: int, keep: int, state: Mapping[str, Any] | None = None) -> StepLog:
        log = StepLog(*self._logged, self._pool.layout.num_envs, steps, keep)
        if state is not None:
            log.load_state(state)
        return log

    def _running(self) -> dict[str, Any]:
        log = None if self._log is None else self._log.state()
        return {**super()._running(), "log": log, "resets": self._resets.state()}

    def _run_on(self, episodes: Mapping[str, Any]) -> None:
        super()._run_on(episodes)
        self._resets.load_state(episodes["resets"])
        log = episodes["log"]
        self._log = None if log is None else self._make_log(log["steps"], log["keep"], log)

    def _reset(self, envs: Sequence[int] | None, options: Mapping[str, Any]) -> None:
        super()._reset(envs, options)
        which = slice(None) if envs is None else np.array(list(envs), np.int64)
        self._resets.restart(which)
        if self._log is not None:
            self._discarded += self._log.reset(which)


def logged_fields(
    delivered: DeliveredFields, env: EnvLayout, policy: Policy
) -> tuple[list[Field], list[Key]]:
    """Return the fields of the log, and the root keys that give ``"next"`` from the next row."""
    fields = delivered.layout.fields
    observed = {field.key for field in env.observations}
    shifted = [key for key in observed if any(f.key == next_key(key) for f in fields)]
    bulk = {TRAJ_IDS, MASK, STEP_COUNT, POLICY_VERSION}
    bulk |= {key for group in env.dones for key in group.keys()}
    bulk -= {*observed, *policy.provided}
    bulk |= {next_key(key) for key in (STEP_COUNT, POLICY_VERSION, *shifted)}
    found = {f.key: f for f in (*delivered.root_fields, *fields) if f.key not in bulk}
    _ = [field.numpy_dtype for field in found.values()]  # missing ones are found now
    return list(found.values()), shifted
