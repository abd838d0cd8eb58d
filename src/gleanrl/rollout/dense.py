"""The dense hot loop: every environment makes one real transition per step."""

from __future__ import annotations

from gleanrl.core.protocols import Env, Policy, Stop
from gleanrl.rollout.tracker import Tracker


def dense(env: Env, policy: Policy, tracker: Tracker, steps: int, stop: Stop) -> int:
    """Take ``steps`` steps into the window all three are bound to; return the steps taken."""
    act, step = policy.act, env.step
    for t in range(steps):
        act(t)
        ended = step(t, tracker.due(t) if t == tracker.next_cut else ())
        if ended:
            tracker.end(t, ended)
            policy.reset(t, ended)
        if stop[0]:
            return t + 1
    return steps
