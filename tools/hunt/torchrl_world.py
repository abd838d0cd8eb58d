"""TorchRL's environments over a certified one; imported only where a case draws them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from torchrl.envs import GymWrapper, InitTracker, StepCounter, TransformedEnv


def wrapped(env: gym.Env[Any, Any]) -> Any:
    """Return ``env`` as TorchRL's own wrapper shows it, with two of its transforms."""
    return TransformedEnv(GymWrapper(env), StepCounter()).append_transform(InitTracker())
