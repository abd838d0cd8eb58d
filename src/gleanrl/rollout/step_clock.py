"""Where the seconds of rollouts go, at the cost of two looks at the clock for most of them."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, TypeAlias

_EVERY = 16
"""One rollout of so many is measured step by step."""
_Call: TypeAlias = Callable[..., Any]
Times: TypeAlias = tuple[float, float, float, float]
"""`Report.began_at`, `ended_at`, `env_s` and `policy_s` of a rollout."""


class StepClock:
    """Measures rollouts: each as a whole, and the calls of some of them one by one.

    The shares of environment and policy in the last rollout that was measured so are taken to be
    those of the rollouts that follow.
    """

    def __init__(self) -> None:
        """Start before the first rollout."""
        self._rollouts = 0
        self._seconds: list[float] | None = None
        self._begin = 0.0
        self._env = self._policy = 0.0
        """Shares of environment and policy."""

    def begin(self, act: _Call, step: _Call) -> tuple[_Call, _Call]:
        """Start a rollout; return what its loop calls to have the policy act and environments step.

        The second rollout is measured step by step as well: in the first, much is done for once.
        """
        due = self._rollouts % _EVERY == 0 or self._rollouts == 1
        self._rollouts += 1
        self._seconds = seconds = [0.0, 0.0] if due else None
        if seconds is not None:
            act, step = _timed(act, seconds, 0), _timed(step, seconds, 1)
        self._begin = monotonic()
        return act, step

    def end(self) -> Times:
        """End the rollout; return when it began and ended, seconds of environment and policy."""
        begin, end = self._begin, monotonic()
        duration = end - begin
        if self._seconds is not None:
            self._policy, self._env = (part / (duration or 1.0) for part in self._seconds)
        return begin, end, self._env * duration, self._policy * duration


def _timed(call: _Call, seconds: list[float], place: int) -> _Call:
    def timed(*args: Any) -> Any:
        begin = monotonic()
        result = call(*args)
        seconds[place] += monotonic() - begin
        return result

    return timed
