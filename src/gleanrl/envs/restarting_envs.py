"""Single environments that are built anew, each alone, when they raise."""

from __future__ import annotations

import contextlib
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import gymnasium as gym

from gleanrl.core.errors import ConfigError, note
from gleanrl.core.options import GymOptions
from gleanrl.core.retry_limits import RetryLimit
from gleanrl.core.window import Window
from gleanrl.envs.gymnasium import GymnasiumEnv

Make: TypeAlias = Callable[[], gym.Env[Any, Any]]
T = TypeVar("T")


class Restarts:
    """How often each of some environments may be built anew, and the errors after which it was."""

    def __init__(self, envs: int, allowed: tuple[int, float | None]) -> None:
        """Allow each of ``envs`` environments so many attempts, within some seconds."""
        self._allowed = [RetryLimit(*allowed) for _ in range(envs)]
        self.failures: list[str] = []

    def count(self, env: int, error: Exception) -> None:
        """Note ``error``, after which ``env`` is to be built anew; raise it if it may not be."""
        allowed = self._allowed[env]
        if not allowed.take():
            note(error, f"environment {env} is not built anew again (max_env_restarts={allowed})")
            raise error
        text = "".join(traceback.format_exception(error)).rstrip()
        self.failures.append(f"environment {env} was built anew, because it raised:\n{text}")

    def built(self, env: int, build: Callable[[], T]) -> T:
        """Return the result of ``build``, which is called again after an error, without delay."""
        while True:
            try:
                return build()
            except ConfigError:  # which another attempt does not change
                raise
            except Exception as err:
                self.count(env, err)


class RestartingEnv(GymnasiumEnv):
    """Environments of which one that raises in `step` or `reset` is closed and built anew.

    The frame of a step that raised is no transition: it shows the new environment's first
    observation as the next one, and the reward is 0. `on_rebuilt` is told of it.
    """

    only_rows = "on_env_error='restart'"

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        makers: Sequence[Make],
        batch_shape: tuple[int, ...],
        options: GymOptions,
        restarts: Restarts,
    ) -> None:
        """Take over ``envs``; each of ``makers`` builds another one like that of ``envs``."""
        super().__init__(envs, batch_shape, options)
        self._spaces = envs[0].observation_space, envs[0].action_space
        self._makers = list(makers)
        self._restarts = restarts
        self._guarded: list[Callable[[Any], Any]] = []
        self._row = 0
        self._failed: list[int] = []
        """The environments whose step raised in the present row."""
        self.failures = restarts.failures

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        self._guarded = self._steps
        self._steps = [partial(self._step_one, env) for env in range(len(self.envs))]

    def step(self, t: int, cut: Sequence[int], resets: bool = True) -> Sequence[int]:
        self._row, self._failed = t, []
        ended = super().step(t, cut, resets)
        for env in self._failed:
            self.on_rebuilt(t, env)
        return [env for env in ended if env not in self._failed] if self._failed else ended

    def _step_one(self, env: int, action: Any) -> Any:
        try:
            return self._guarded[env](action)
        except Exception as err:
            note(err, f"environment {env} raised this; its action was {action!r:.200}")
            observation, info = self._rebuilt(env, err, {})
            self._failed.append(env)
            return observation, 0.0, False, False, info

    def _reset_one(self, env: int, given: Mapping[str, Any]) -> tuple[Any, Any]:
        try:
            return super()._reset_one(env, given)
        except Exception as err:
            return self._rebuilt(env, err, given)

    def _rebuilt(self, env: int, error: Exception, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """Build environment ``env`` anew, after ``error``; return the result of its reset."""
        while True:
            self._restarts.count(env, error)
            with contextlib.suppress(Exception):  # it is broken
                self.envs[env].close()
            try:
                self._build(env)
                return super()._reset_one(env, given)
            except Exception as err:
                error = err

    def _build(self, env: int) -> None:
        self.envs[env] = new = self._makers[env]()
        if (new.observation_space, new.action_space) != self._spaces:
            raise ConfigError(f"environment {env} was built anew with other spaces")
        self._calls.renew(env)
        self._seeds[env] = random.getrandbits(31)  # from the worker's own stream
        new.action_space.seed(self._seeds[env])
