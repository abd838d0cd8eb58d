"""The time of environments and policy, at next to no cost in most rollouts."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, TypeAlias

_EVERY = 16
"""One rollout of so many is measured."""
_Call: TypeAlias = Callable[..., Any]


class StepClock:
    """Measures the calls of some rollouts one by one."""

    def __init__(self) -> None:
        """Start before the first rollout."""
        self._rollouts = 0
        self.seconds: list[float] | None = None
        """The seconds of environment and policy in the last rollout, if they were measured."""

    def begin(self, act: _Call, step: _Call) -> tuple[_Call, _Call]:
        """Start a rollout; return the functions with which its loop acts and steps.

        The second rollout is measured as well: in the first, much is done for once.
        """
        due = self._rollouts % _EVERY == 0 or self._rollouts == 1
        self._rollouts += 1
        if not due:
            self.seconds = None
            return act, step
        self.seconds = seconds = [0.0, 0.0]
        return _timed(act, seconds, 1), _timed(step, seconds, 0)


def _timed(call: _Call, seconds: list[float], place: int) -> _Call:
    def timed(*args: Any) -> Any:
        begin = monotonic()
        result = call(*args)
        seconds[place] += monotonic() - begin
        return result

    return timed
