"""Asynchronous pools: EnvPool and ALE's vector environment, which answer for some at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import OwnOptions
from gleanrl.core.window import Array, Window
from gleanrl.envs.result_writers import VectorReset
from gleanrl.envs.simulator_state import StateError
from gleanrl.envs.state_kinds import Node
from gleanrl.envs.vector import EnvPoolResets, VectorAdapter, VectorResets, is_envpool


class AsyncPool(VectorAdapter):
    """A pool of `all_envs` environments of which each step answers for `num_envs`.

    A step sends actions to the environments of row ``t`` and receives those that answer first: row
    ``t + 1`` shows them, and row ``t`` has the rewards and flags with which they arrived there.
    """

    _resets: _EnvPool | _Ale

    def __init__(self, env: Any, options: OwnOptions, again: Callable[[], Any] | None) -> None:
        """Take over ``env``, which was not reset; ``again`` makes another one, if that is known."""
        resets = _EnvPool(env, options) if is_envpool(env) else _Ale(env, again)
        super().__init__(resets, options)
        self.can_cut = False
        self.ids = np.zeros((1, self.num_envs), np.int64)
        """The environment of each entry of a row."""
        self.at_hand: Array
        """The environments that have answered last."""

    def explain(self) -> str:
        kind, most, how = type(self.inner).__name__, self.all_envs, self._resets.explain()
        return f"{kind} of {most}, which answers for {self.num_envs} of them at a time, {how}"

    def begin(self, window: Window, carry: Window) -> None:
        super().begin(window, carry)
        if len(self.ids) <= window.steps:
            self.ids = np.zeros((window.steps + 1, self.num_envs), np.int64)
        self.ids[0] = self.at_hand
        if self._resets.by_id:
            step, own = self._step, weakref.proxy(self)  # a cycle would keep memory
            self._step = lambda actions: step(actions, own.at_hand)

    def step(self, t: int) -> None:  # type: ignore[override]  # as pools do
        self.at_hand = self.ids[t + 1] = self._advance(t)["env_id"]

    def reset(self, carry: Window, envs: Sequence[int] | None = None, /, **options: Any) -> None:
        super().reset(carry, envs, **options)
        self.at_hand = np.array(self._resets.first)

    def snapshot(self, allow_pickle: bool = False) -> Node:
        raise StateError("environments of an asynchronous pool take steps between two calls")


class _EnvPool(EnvPoolResets):
    """Results under way cannot be withdrawn, so a pool is reset by making it anew."""

    by_id = True
    """Whether a step is told for whom actions are; ALE's knows."""
    _used = False
    first: Array
    """The environments that answered first after a reset."""

    @property
    def rows(self) -> int:
        return int(self.env.config["batch_size"])

    def all(self, options: Mapping[str, Any]) -> VectorReset:
        if self._used:
            self.seed(_drawn_seed(), static=False)
        self._used = True
        returned = super().all(options)
        self.first = returned.infos["env_id"]
        return returned

    def seed(self, seed: int, static: bool) -> None:
        super().seed(seed, static)
        self._used = False


class _Ale(VectorResets):
    """Like `_EnvPool`; only the user's callable can make another one."""

    by_id = False

    def __init__(self, env: Any, again: Callable[[], Any] | None) -> None:
        if env.autoreset_mode is not AutoresetMode.NEXT_STEP:
            raise ConfigError(
                f"an {type(env).__name__} that answers for {env.batch_size} of its {env.num_envs} "
                "environments at a time needs autoreset_mode='NextStep'"
            )
        super().__init__(env, in_step=False, singly=False)
        self._again, self._used = again, False

    @property
    def rows(self) -> int:
        return int(self.env.batch_size)

    def all(self, options: Mapping[str, Any]) -> VectorReset:
        if self._used:
            if self._again is None:
                raise ConfigError(
                    f"this {type(self.env).__name__} cannot be reset or seeded again, because "
                    "environments take steps meanwhile: give a callable that makes it"
                )
            self.env.close()
            self.env = self._again()
            self._seed = _drawn_seed() if self._seed is None else self._seed
        self._used = True
        returned = super().all(options)
        self.first = returned.infos["env_id"]
        return returned

    def seed(self, seed: int, static: bool) -> None:
        self._seed = np.full(self.env.num_envs, seed) if static else seed  # type: ignore[assignment]


def _drawn_seed() -> int:
    return int(torch.randint(2**31 - 1, ()))


def is_async_pool(env: Any) -> bool:
    """Tell whether ``env`` answers for some of its environments at a time.

    A wrapper around one that does is refused: it would not know whose results it gets.
    """
    if is_envpool(env):
        return bool(env.is_async)
    inner: Any = env.unwrapped
    if type(inner).__name__ != "AtariVectorEnv" or inner.batch_size == inner.num_envs:
        return False
    if env is not inner:
        raise ConfigError(
            f"a {type(env).__name__} around an {type(inner).__name__} that answers for "
            f"{inner.batch_size} of its {inner.num_envs} environments at a time cannot be "
            "collected from: leave out the wrapper, or batch_size"
        )
    return True
