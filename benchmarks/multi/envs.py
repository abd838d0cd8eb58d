"""Environments that cost next to nothing, or an exactly known time, and say what they did."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Still(gym.Env[Any, Any]):
    """Does nothing and hands out the same array at every step, with the step's number in it.

    An observation is ``size`` bytes; the first eight are the number of steps so far, the next eight
    the number of the environment.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, number: int, size: int) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (size,), np.uint8)
        self._seen = np.ones(size, np.uint8)
        self._stamp = self._seen[:16].view(np.int64)
        self._stamp[:] = 0, number
        self._count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._count += 1
        self._stamp[0] = self._count
        return self._seen, 0.0, False, False, {}


class Timed(gym.Env[Any, Any]):
    """Sleeps at every step and tells when and for how long.

    Observations are ``[time, busy, number]``: the clock when the step ended, all seconds spent in
    `step` so far, the number of the environment. ``time.perf_counter`` is one clock for all
    processes of a Linux machine.
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, number: int, mean: float, exponential: bool) -> None:
        self._number, self._busy = number, 0.0
        random = np.random.default_rng(number)
        times = random.exponential(mean, 4096) if exponential else np.full(4096, mean)
        self._times = times.tolist()
        self._count = 0

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.array([time.perf_counter(), self._busy, self._number])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        start = time.perf_counter()
        self._count += 1
        time.sleep(self._times[self._count % len(self._times)])
        self._busy += time.perf_counter() - start
        return self._observe(), 0.0, False, False, {}


class Build:
    """A factory of one environment of ``kind``, cheap to send to a worker."""

    def __init__(self, kind: type[gym.Env[Any, Any]], *arguments: Any) -> None:
        self._kind, self._arguments = kind, arguments

    def __call__(self) -> gym.Env[Any, Any]:
        return self._kind(*self._arguments)


def still(count: int, size: int) -> list[Build]:
    """Return ``count`` factories of `Still`."""
    return [Build(Still, number, size) for number in range(count)]


def timed(count: int, mean: float, exponential: bool) -> list[Build]:
    """Return ``count`` factories of `Timed`."""
    return [Build(Timed, number, mean, exponential) for number in range(count)]
