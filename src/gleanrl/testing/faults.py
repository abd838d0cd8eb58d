"""Environments and policies in which a fault happens at a given call."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from gleanrl.core.errors import ConfigError, for_users
from gleanrl.envs.factory import build

File: TypeAlias = str | os.PathLike[str]


class InjectedError(RuntimeError):
    """The exception of the fault ``"raise"``."""


def _fail(*details: Any) -> None:
    raise InjectedError("this fault was injected", *details)


_ACTS: dict[str, Callable[[], Any]] = {
    "raise": _fail,
    "raise-unpicklable": lambda: _fail(threading.Lock()),
    "hang": lambda: threading.Event().wait(),
    "hang-gil": lambda: ctypes.PyDLL(None).sleep(1_000_000),  # keeps the interpreter's lock
    "sys.exit": lambda: sys.exit(4),
    "os._exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(1),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
_DATA = ("nan", "shape", "dtype")
FAULTS = (*_ACTS, "sleep", *_DATA)
"""The names of all faults."""


class _Fault:
    """Counts calls, and does something bad at one of them."""

    def __init__(self, kind: Any, at: int, seconds: float, once: File | None) -> None:
        if not callable(kind) and kind not in FAULTS:
            raise ConfigError(f"fault ({kind!r}) must be a function or one of {FAULTS}")
        self.kind, self.at, self.seconds = kind, at, seconds
        self.once = None if once is None else Path(once)
        self.calls = 0

    def call(self) -> bool:
        """Count a call; act if it is due; return whether to spoil what the call returns."""
        self.calls += 1
        due = self.calls >= self.at if self.kind == "sleep" else self.calls == self.at
        if not due or (self.once is not None and self.once.exists()):
            return False
        if self.once is not None:
            self.once.touch()  # first: afterwards there may be no process
        if self.kind == "sleep":
            time.sleep(self.seconds)
        elif self.kind not in _DATA:
            _ACTS.get(self.kind, self.kind)()
        return self.kind in _DATA

    def spoil(self, value: Any) -> Any:
        """Return a tensor or an observation with the fault in all its parts."""
        if isinstance(value, dict):
            return {key: self.spoil(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(map(self.spoil, value))
        if not isinstance(value, torch.Tensor):
            return self.spoil(torch.tensor(np.asarray(value))).numpy()
        if self.kind == "shape":
            return value.unsqueeze(-1)
        if self.kind == "dtype":
            return value.to(torch.float32 if value.dtype == torch.float64 else torch.float64)
        return torch.full_like(value, torch.nan) if value.is_floating_point() else value


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """A Gymnasium environment in which a fault happens at a given step or reset, or while built.

    Example:
        >>> import functools, gleanrl
        >>> from gleanrl.testing import FaultyEnv
        >>> envs = ["CartPole-v1", functools.partial(FaultyEnv, "CartPole-v1", "kill", at=12)]
        >>> with gleanrl.MultiSyncCollector(envs, frames_per_batch=40) as collector:
        ...     collector.next()
        Traceback (most recent call last):
        gleanrl.core.errors.WorkerDied: worker 1 ...
    """

    @for_users
    def __init__(
        self,
        env: Any,
        fault: str | Callable[[], Any],
        *,
        when: str = "step",
        at: int = 10,
        seconds: float = 1.0,
        once: File | None = None,
    ) -> None:
        """Build the environment.

        Args:
            env: A Gymnasium environment, an id, or a callable that makes an environment.
            fault: A function, or one of `FAULTS`: ``"raise"`` (`InjectedError`),
                ``"raise-unpicklable"`` (an error that cannot be sent), ``"hang"``, ``"hang-gil"``
                (holds the interpreter's lock), ``"sleep"`` (from that call on), ``"sys.exit"``,
                ``"os._exit"``, ``"kill"`` (SIGKILL), ``"segfault"``, ``"stop"`` (SIGSTOP);
                ``"nan"``, ``"shape"`` and ``"dtype"`` spoil the observation, and ``"nan"`` the
                reward also.
            when: ``"step"``, ``"reset"`` or ``"build"``.
            at: The number of the step or the reset, from 1, over all episodes. A collector resets
                an environment once during construction.
            seconds: Duration of ``"sleep"``.
            once: Path of a file. The fault happens only while there is none, and makes it, so that
                a replacement does not fail again.

        Raises:
            ConfigError: there is no such fault, or it cannot happen then.
        """
        if when not in ("step", "reset", "build") or (when == "build" and fault in _DATA):
            raise ConfigError(f"fault {fault!r} cannot happen at when={when!r}")
        self._when = when
        self._fault = _Fault(fault, 1 if when == "build" else at, seconds, once)
        self._due("build")
        super().__init__(build(env, {}))

    def _due(self, when: str) -> bool:
        return when == self._when and self._fault.call()

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, with the fault if it is due."""
        spoilt = self._due("reset")
        observation, info = super().reset(**options)
        return self._fault.spoil(observation) if spoilt else observation, info

    def step(self, action: Any) -> Any:
        """Step the environment, with the fault if it is due."""
        spoilt = self._due("step")
        observation, reward, *rest = super().step(action)
        if spoilt:
            observation = self._fault.spoil(observation)
            reward = np.nan if self._fault.kind == "nan" else reward
        return observation, reward, *rest


class FaultyPolicy(TensorDictModuleBase):  # type: ignore[misc]
    """A policy in which a fault happens at a given call."""

    @for_users
    def __init__(
        self,
        policy: Any,
        fault: str | Callable[[], Any],
        *,
        at: int = 10,
        seconds: float = 1.0,
        once: File | None = None,
    ) -> None:
        """Wrap a policy.

        Args:
            policy: A TensorDict module, or a callable that returns the action for an observation.
            fault: As for `FaultyEnv`; ``"nan"``, ``"shape"`` and ``"dtype"`` spoil all outputs.
            at: The number of the call, from 1. A collector calls its policy once during
                construction.
            seconds: See `FaultyEnv`.
            once: See `FaultyEnv`.

        Raises:
            ConfigError: there is no such fault.
        """
        super().__init__()
        if not isinstance(policy, TensorDictModuleBase):
            policy = TensorDictModule(policy, ["observation"], ["action"])
        self.policy = policy
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys
        self._fault = _Fault(fault, at, seconds, once)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Call the policy, with the fault if it is due."""
        spoilt = self._fault.call()
        result: TensorDictBase = self.policy(tensordict)
        for key in self.out_keys if spoilt else ():
            result.set(key, self._fault.spoil(result.get(key)))
        return result
