"""What TorchRL does around one Gymnasium environment, as Gymnasium wrappers.

These are the transforms that step and reset an environment themselves, and come first around it,
and its encoding of observations. A wrapper makes the same calls of the environment, in the same
order, and draws the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from gleanrl.core.errors import EnvError
from gleanrl.envs.libs.gym import FrameSkip

Wrapped = gym.Wrapper[Any, Any, Any, Any]


def wrapped(env: gym.Env[Any, Any], member: Any, leading: Sequence[nn.Module]) -> gym.Env[Any, Any]:
    """Return ``env`` with wrappers in place of TorchRL's transforms.

    TorchRL's ``member`` steps it; the first transforms around that are ``leading``.
    """
    if member.wrapper_frame_skip != 1:
        env = FrameSkip(env, member.wrapper_frame_skip)
    for part in leading:
        env = _WRAPPERS[type(part).__name__](env, part, member)
    return env


class _Repeats(Wrapped):
    """Repeats actions as ``FrameSkipTransform`` does: also behind the end of an episode."""

    def __init__(self, env: gym.Env[Any, Any], part: Any, member: Any) -> None:
        super().__init__(env)
        self._part = part

    def step(self, action: Any) -> Any:
        observation, reward, dead, late, info = self.env.step(action)
        total = _single(reward)
        for _ in range(self._part.frame_skip - 1):
            observation, reward, dead, late, info = self.env.step(action)
            total = total + _single(reward)
        return observation, total, dead, late, info


def _single(reward: Any) -> Any:
    """Return a reward as TorchRL's environments do: float32, and no negative zero."""
    value = np.asarray(0 if reward is None else reward)
    return np.add(value, 0.0).astype(np.float32, casting="same_kind")


class _BeginsAtRandom(Wrapped):
    """Takes random steps after a reset, as ``NoopResetEnv`` does."""

    def __init__(self, env: gym.Env[Any, Any], part: Any, member: Any) -> None:
        super().__init__(env)
        self._part, self._member = part, member

    def reset(self, **options: Any) -> Any:
        part, shown = self._part, self.env.reset(**options)
        count = int(torch.randint(part.noops, (1,))) if part.random else part.noops
        for _ in range(vars(sys.modules[type(part).__module__])["_MAX_NOOPS_TRIALS"] + 1):
            for _ in range(count):
                drawn = part.parent.rand_action().get(self._member.action_key)
                observation, _, dead, late, info = self.env.step(self._member.read_action(drawn))
                shown = observation, info
                if dead or late:
                    shown = self.env.reset()
                    break
            else:
                return shown
        raise RuntimeError(
            f"an episode ended again and again within the {count} random steps of NoopResetEnv"
        )


def showing_one_hot(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Return ``env``, showing indices as one-hot vectors, as TorchRL's ``GymEnv`` does."""
    space, encode = _one_hot(env.observation_space)
    return gym.wrappers.TransformObservation(env, encode, space)


def _one_hot(space: gym.Space[Any]) -> tuple[gym.Space[Any], Callable[[Any], Any]]:
    """Return the encoded ``space``, and a function that encodes its values."""
    if isinstance(space, spaces.Dict):
        parts = {name: _one_hot(part) for name, part in space.spaces.items()}
        encoded = spaces.Dict({name: part for name, (part, _) in parts.items()})
        return encoded, lambda value: {name: fn(value[name]) for name, (_, fn) in parts.items()}
    sizes = np.atleast_1d(getattr(space, "n" if isinstance(space, spaces.Discrete) else "nvec", ()))
    if sizes.ndim != 1 or not sizes.size or np.any(getattr(space, "start", 0)):
        return space, lambda value: value
    total, places = int(sizes.sum()), np.cumsum(sizes) - sizes

    def encode(value: Any) -> Any:
        indices = np.asarray(value, np.int64)  # some show them as floats
        if indices.size != len(sizes) or np.any((indices < 0) | (indices >= sizes)):
            raise EnvError(
                f"an observation of {space} is {value}; correct the space or the observation"
            )
        row = np.zeros(total, np.int64)
        row[places + indices] = 1
        return row

    return spaces.Box(0, 1, (total,), np.int64), encode


_WRAPPERS = {"FrameSkipTransform": _Repeats, "NoopResetEnv": _BeginsAtRandom}
