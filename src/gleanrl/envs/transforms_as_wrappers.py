"""TorchRL's transforms that step and reset an environment themselves, as Gymnasium wrappers.

Such transforms come first around one environment. A wrapper makes the same calls of that
environment, in the same order, and draws the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

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


_WRAPPERS = {"FrameSkipTransform": _Repeats, "NoopResetEnv": _BeginsAtRandom}
