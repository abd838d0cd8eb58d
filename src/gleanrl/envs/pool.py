"""Vectorised environments whose automatic reset costs a step: NEXT_STEP mode and EnvPool."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Env
from gymnasium.vector import AsyncVectorEnv

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int
from gleanrl.core.protocols import Array
from gleanrl.envs.batched import ResetResult, Rows
from gleanrl.envs.batched_env import BatchedEnv


class NextStepPool(BatchedEnv):
    """A vectorised environment in NEXT_STEP mode, as a `Pool`."""

    costs_reset_step = True
    # How many steps a rollout will take is not known when it begins.
    _draws_ahead = 32

    def _prepare(self, env: Any) -> None:
        if isinstance(env.unwrapped, AsyncVectorEnv) and not env.unwrapped.shared_memory:
            # Its workers keep their "reset in the next step" mark through an explicit reset.
            raise ConfigError(
                "AsyncVectorEnv with shared_memory=False resets environments twice after reset() "
                "in NEXT_STEP mode; make it with shared_memory=True or autoreset_mode='SameStep'"
            )

    def step(self, t: int) -> None:
        """Take one step with the actions in row ``t``, writing the row and root row ``t + 1``."""
        self._advance(t)


class EnvPoolAdapter(NextStepPool):
    """An EnvPool with the Gymnasium interface, as a `Pool`; it must answer for all at once."""

    def _prepare(self, env: Any) -> None:
        if not isinstance(env, Env):
            raise ConfigError(
                f"{type(env).__name__} has EnvPool's dm_env interface; make it with "
                "envpool.make_gymnasium"
            )
        if env.is_async:  # type: ignore[attr-defined]  # EnvPool's own
            size, count = env.config["batch_size"], env.config["num_envs"]  # type: ignore[attr-defined]
            raise ConfigError(
                f"an EnvPool that answers for {size} of its {count} environments at a time cannot "
                "be stepped as one batch; leave out batch_size"
            )
        _make_spaces(env)

    def _resets_singly(self) -> bool:
        return True

    def _reset_all(self, options: Mapping[str, Any]) -> ResetResult:
        result = self._env.reset(options=dict(options)) if options else self._env.reset()
        return ResetResult(result, self.num_envs)

    def _reset_some(self, envs: Array, options: Mapping[str, Any]) -> tuple[ResetResult, Rows]:
        # An EnvPool answers for the environments it was asked about only, in the order asked.
        result = self._env.reset(envs.astype(np.int32), **({"options": options} if options else {}))
        return ResetResult(result, len(envs)), slice(None)

    def seed(self, seed: int, static: bool = False) -> int:
        """Seed environment ``i`` with ``seed + i``: an EnvPool is seeded by making it anew.

        Raises:
            ConfigError: ``seed`` is no whole number of 0 or more.
        """
        seed = check_int("seed", seed, least=0)
        last = seed if static else seed + self.num_envs - 1
        own = [seed] * self.num_envs if static else list(range(seed, last + 1))
        spec = self._env.spec
        seeds: dict[str, Any] = {"seed": 0, "env_seed": [value % 2**31 for value in own]}
        if "env_seed" not in spec.config._fields:  # older ones count up from one seed
            seeds = {"seed": seed % 2**31}
        fresh = type(self._env)(type(spec)(spec.config._replace(**seeds)))
        _make_spaces(fresh)
        self._env.close()
        self._env = fresh
        return last


def _make_spaces(env: Any) -> None:
    with warnings.catch_warnings():
        # Gymnasium warns that EnvPool's bounds lose precision; nobody can do anything about it.
        warnings.simplefilter("ignore", UserWarning)
        _ = env.observation_space, env.action_space


def is_envpool(given: Any) -> bool:
    """Tell whether ``given`` is an EnvPool, without importing it."""
    return any(
        base.__name__ == "EnvPoolMixin" and base.__module__.partition(".")[0] == "envpool"
        for base in type(given).__mro__
    )
