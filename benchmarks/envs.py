"""The environments as factories, which all systems share: same ids, same wrappers, same seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

EnvFactory = Callable[[], "gym.Env[Any, Any]"]


@dataclass(frozen=True)
class Make:
    """Builds one environment whose later ``reset()`` calls continue from ``seed``."""

    build: EnvFactory
    seed: int

    def __call__(self) -> gym.Env[Any, Any]:
        """Build it; seeding takes one reset, which leaves no wrapper behind."""
        env = self.build()
        env.reset(seed=self.seed)
        return env


def seeded(build: EnvFactory, count: int) -> list[Make]:
    """Return ``count`` factories with seeds 0, 1, ..."""
    return [Make(build, seed) for seed in range(count)]


def unchecked(name: str, **options: Any) -> gym.Env[Any, Any]:
    """Make an environment without the two wrappers of `gym.make` that only check calls.

    GleanRL leaves these out of a user's environments, so here no system has them.
    """
    spec = replace(gym.spec(name), order_enforce=False, disable_env_checker=True)
    return gym.make(spec, **options)


def cartpole() -> gym.Env[Any, Any]:
    """Return CartPole as all systems get it."""
    return unchecked("CartPole-v1")


def cartpole_checked() -> gym.Env[Any, Any]:
    """Return CartPole as `gym.make` gives it; for references marked "as gym.make gives it"."""
    return gym.make("CartPole-v1")


def half_cheetah() -> gym.Env[Any, Any]:
    """Return HalfCheetah as all systems get it, without MuJoCo's remark about its model."""
    kept = os.dup(2)
    with open(os.devnull, "w") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        return unchecked("HalfCheetah-v5")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def pong() -> gym.Env[Any, Any]:
    """Return Pong with the usual preprocessing: 84x84 grey, four frames stacked."""
    import ale_py

    gym.register_envs(ale_py)
    env = unchecked("ALE/Pong-v5", frameskip=1)
    env = gym.wrappers.AtariPreprocessing(env, screen_size=84, grayscale_obs=True, frame_skip=4)
    return gym.wrappers.FrameStackObservation(env, 4)


def pong_in_colour() -> gym.Env[Any, Any]:
    """Return Pong as it is, 210x160 in colour."""
    import ale_py

    gym.register_envs(ale_py)
    return unchecked("ALE/Pong-v5")


def cartpole_vector(count: int) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Return Gymnasium's own vectorised CartPole in its default autoreset mode."""
    envs = gym.make_vec("CartPole-v1", num_envs=count, vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    return envs


def cartpole_envpool(count: int) -> Any:
    """Return EnvPool's CartPole on one thread, as the rest of the suite."""
    import envpool

    return envpool.make("CartPole-v1", env_type="gymnasium", num_envs=count, num_threads=1, seed=0)


def pong_envpool(count: int, size: int) -> Any:
    """Return EnvPool's Pong on one thread, which answers for ``size`` of ``count`` at a time."""
    import envpool

    return envpool.make_gymnasium("Pong-v5", num_envs=count, batch_size=size, num_threads=1)


def cartpole_async_envpool(count: int, size: int) -> Any:
    """Return EnvPool's CartPole on one thread, which answers for ``size`` at a time."""
    import envpool

    return envpool.make_gymnasium("CartPole-v1", num_envs=count, batch_size=size, num_threads=1)


def pong_ale_pool(count: int, size: int) -> Any:
    """Return ALE's own vector Pong on one thread, which answers for ``size`` at a time."""
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs=count, batch_size=size, num_threads=1)


class Seeds:
    """A factory for ``num_envs=``: each call makes an environment with the next seed."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self) -> Any:
        made = Make(cartpole, self._next)()
        self._next += 1
        return made


# -- environments that cost next to nothing --------------------------------------------------------


class Still(gym.Env[Any, Any]):
    """Never ends and returns the same observation every time."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, shape: tuple[int, ...] = (4,), dtype: Any = np.float32) -> None:
        high = 255 if np.dtype(dtype) == np.uint8 else 1
        self.observation_space = gym.spaces.Box(0, high, shape, dtype)
        self._seen = np.ones(shape, dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._seen, 0.0, False, False, {}


def still_bytes(size: int) -> Callable[[], Still]:
    """Return a factory of `Still` with observations of ``size`` bytes."""
    return partial(Still, (size,), np.uint8)
