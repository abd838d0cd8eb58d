"""The time of environments and policy, at next to no cost in most rollouts."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, TypeAlias

from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.tensordict_envs import TensorDictHandle

_EVERY = 16
"""One rollout of so many is measured."""
_Call: TypeAlias = Callable[..., Any]


class StepClock:
    """Measures the calls of some rollouts one by one."""

    def __init__(self, envs: EnvRows | TensorDictHandle) -> None:
        self._envs, self._rollouts = envs, 0
        self.seconds: list[float] | None = None
        """The seconds of environment and policy in the last rollout, if they were measured, and
        those of earlier resets."""

    def measured(self) -> tuple[float, float, float] | None:
        """Return the seconds of environment, policy and resets in the last rollout, if measured."""
        if self.seconds is None:
            return None
        env, policy, earlier = self.seconds
        return env, policy, self._envs.reset_s - earlier

    def begin_apart(self, act: _Call, post: _Call, complete: _Call) -> tuple[_Call, _Call, _Call]:
        """Start a rollout whose steps have two halves; all between them counts as the step."""
        act, _ = self.begin(act, complete)
        if self.seconds is None:
            return act, post, complete
        seconds = self.seconds

        def posting(*args: Any) -> None:
            seconds[0] -= monotonic()
            post(*args)

        def completing(*args: Any) -> Any:
            result = complete(*args)
            seconds[0] += monotonic()
            return result

        return act, posting, completing

    def add_policy(self, seconds: float) -> None:
        """Add time in which the policy acted for this rollout outside of its calls."""
        if self.seconds is not None:
            self.seconds[1] += seconds

    def begin(self, act: _Call, step: _Call) -> tuple[_Call, _Call]:
        """Start a rollout; return the functions with which its loop acts and steps.

        The second rollout is measured as well: in the first, much is done for once.
        """
        due = self._rollouts % _EVERY == 0 or self._rollouts == 1
        self._rollouts += 1
        if not due:
            self.seconds = None
            return act, step
        self.seconds = seconds = [0.0, 0.0, self._envs.reset_s]
        return _timed(act, seconds, 1), _timed(step, seconds, 0)


def _timed(call: _Call, seconds: list[float], place: int) -> _Call:
    def timed(*args: Any) -> Any:
        begin = monotonic()
        result = call(*args)
        seconds[place] += monotonic() - begin
        return result

    return timed
