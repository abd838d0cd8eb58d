"""Other people's process vectorisation, each in the loop that fits it.

The policy runs in this process for all of them; the environments run in others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.actors import CategoricalActor
from benchmarks.envs import EnvFactory
from benchmarks.hand_pool import PoolLoop
from benchmarks.harness import Fields, Skip
from benchmarks.peers import SB3


def async_vector_env(
    factories: Sequence[EnvFactory], net: nn.Module, steps: int, dtype: Any = np.int64
) -> PoolLoop:
    """Return the bare loop over Gymnasium's ``AsyncVectorEnv``: a process per environment."""
    pool = gym.vector.AsyncVectorEnv(list(factories), shared_memory=True, copy=False)
    return _loop(pool, len(factories), net, steps, dtype)


def sb3(factories: Sequence[EnvFactory], net: nn.Sequential, steps: int, lean: bool) -> SB3:
    """Return ``PPO.collect_rollouts`` over ``SubprocVecEnv``: a process per environment."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    # Forked: the default starts as many interpreters, and does the same from then on.
    return SB3(factories, net, steps, lean, lambda makers: SubprocVecEnv(makers, "fork"))


def tianshou(factories: Sequence[EnvFactory], net: nn.Module, steps: int, shared: bool) -> PoolLoop:
    """Return the bare loop over tianshou's ``SubprocVectorEnv`` or ``ShmemVectorEnv``."""
    from tianshou.env import ShmemVectorEnv, SubprocVectorEnv

    pool = (ShmemVectorEnv if shared else SubprocVectorEnv)(list(factories))
    return _loop(_Tianshou(pool), len(factories), net, steps, np.int64)


def pufferlib(
    factories: Sequence[EnvFactory], net: nn.Module, steps: int, workers: int, halves: bool = False
) -> PoolLoop | PufferHalves:
    """Return a loop over PufferLib's ``Multiprocessing``.

    With ``halves`` one of two workers steps while the policy acts for the other. Workers and the
    loop wait by spinning: on two cores one worker is the best choice.
    """
    with _gymnasium_as_gym():
        try:
            from pufferlib import vector
        except (ImportError, RuntimeError) as err:
            raise Skip(f"pufferlib: {err}") from err
        vec = vector.make(
            [_puffer(factory) for factory in factories],
            env_args=[[]] * len(factories),
            env_kwargs=[{}] * len(factories),
            backend=vector.Multiprocessing,
            num_envs=len(factories),
            num_workers=workers,
            batch_size=len(factories) // (2 if halves else 1),
            overwork=True,
        )
    if halves:
        return PufferHalves(vec, len(factories) // 2, net, steps)
    return _loop(vec, len(factories), net, steps, np.int32)


def _loop(pool: Any, count: int, net: nn.Module, steps: int, dtype: Any) -> PoolLoop:
    return PoolLoop(pool, steps, CategoricalActor(net, steps, count, 2, dtype))


def _puffer(factory: EnvFactory) -> Callable[..., Any]:
    def make(buf: Any = None, seed: int = 0) -> Any:
        from pufferlib.emulation import GymnasiumPufferEnv

        return GymnasiumPufferEnv(env_creator=factory, buf=buf, seed=seed)

    return make


class PufferHalves:
    """What PufferLib's own trainer does: receive one half, act for it, send, take the other half.

    A row is what was received and what was answered: no successors, and the reward is that of the
    action before. Rows that end an episode are no transitions and are not counted.
    """

    def __init__(self, vec: Any, count: int, net: nn.Module, steps: int) -> None:
        self._vec, self._steps = vec, steps
        self._actors = [CategoricalActor(net, steps, count, 2, np.int32) for _ in range(2)]
        shape = vec.single_observation_space.shape
        self._rows = np.zeros((2, steps, count, *shape), np.float32)
        self._tensors = [torch.from_numpy(rows).unbind() for rows in self._rows]
        self._reward = np.zeros((2, steps, count), np.float32)
        self._done = np.zeros((2, steps, count), bool)
        vec.async_reset(0)

    def collect_batch(self) -> int:
        receive, send = self._vec.recv, self._vec.send
        halves = list(zip(self._actors, self._rows, self._reward, self._done, strict=True))
        with torch.no_grad():
            for actor, tensors in zip(self._actors, self._tensors, strict=True):
                actor.begin(tensors)
            for t in range(self._steps):
                for act, rows, rewards, dones in halves:
                    seen, reward, dead, late, *_ = receive()
                    rows[t] = seen
                    rewards[t] = reward
                    np.logical_or(dead, late, out=dones[t])
                    send(act(t))
            for actor in self._actors:
                actor.finish()
        return int(self._done.size - np.count_nonzero(self._done))

    def fields(self) -> Fields:
        outputs = [actor.outputs for actor in self._actors]
        flat = {
            **{name: np.stack([some[name].numpy() for some in outputs]) for name in outputs[0]},
            "observation": self._rows,
            "next.reward": self._reward,
            "mask": ~self._done,
        }
        return {name: np.concatenate(value, 1).swapaxes(0, 1) for name, value in flat.items()}

    def close(self) -> None:
        self._vec.close()


@contextmanager
def _gymnasium_as_gym() -> Iterator[None]:
    """Let ``import gym`` find Gymnasium: PufferLib wants the old Gym for comparisons of types only.

    With the old one installed, every library that supports both would look at it, and warn.
    """
    kept = sys.modules.get("gym")
    sys.modules["gym"] = gym
    try:
        yield
    finally:
        if kept is None:
            del sys.modules["gym"]
        else:
            sys.modules["gym"] = kept


class _Tianshou:
    """Has the ended environments reset in the step that follows, as the others here do.

    tianshou leaves resets to its user. So that an ended environment makes no step of its own, the
    others are stepped without it.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._ids = np.arange(len(pool))
        self._ended: np.ndarray[Any, Any] = self._ids[:0]
        self._seen: Any = None

    def reset(self) -> Any:
        seen, info = self._pool.reset()
        self._seen = np.array(seen)
        return self._seen, info

    def step(self, action: Any) -> Any:
        if not len(self._ended):
            seen, reward, dead, late, info = self._pool.step(action)
        else:
            seen, reward, dead, late, info = self._step_some(action)
        self._ended = np.flatnonzero(dead | late)
        return seen, reward, dead, late, info

    def _step_some(self, action: Any) -> Any:
        rest = np.delete(self._ids, self._ended)
        reward = np.zeros(len(self._ids))
        dead, late = np.zeros((2, len(self._ids)), bool)
        seen = self._seen
        if len(rest):
            seen[rest], reward[rest], dead[rest], late[rest], _ = self._pool.step(
                action[rest], rest
            )
        seen[self._ended] = self._pool.reset(self._ended)[0]
        return seen, reward, dead, late, {}

    def close(self) -> None:
        self._pool.close()
