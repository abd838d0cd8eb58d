"""Gymnasium wrappers behind `GymEnv`'s arguments."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from gleanrl.core.errors import ConfigError


class FrameSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats every action and adds the rewards up; stops where the episode ends."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        """Repeat actions ``times`` times.

        Raises:
            ConfigError: ``times`` is not positive.
        """
        if times < 1:
            raise ConfigError(f"frame_skip ({times}) must be at least 1")
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step up to ``times`` times."""
        total = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class Pixels(gym.Wrapper[Any, Any, Any, Any]):
    """Shows what the environment renders as ``"pixels"``, alone or beside its observation."""

    def __init__(self, env: gym.Env[Any, Any], only: bool = True) -> None:
        """Reset ``env`` to learn the size of a picture; the first `reset` returns that episode.

        Raises:
            ConfigError: the environment does not render arrays.
        """
        super().__init__(env)
        self._only = only
        self._first: tuple[Any, dict[str, Any]] | None = env.reset()
        picture = self._render()
        own, shown = env.observation_space, dict[str, gym.Space[Any]]()
        if not only:
            shown.update(own.spaces if isinstance(own, spaces.Dict) else {"observation": own})
        shown["pixels"] = spaces.Box(0, 255, picture.shape, np.uint8)
        self._nested = isinstance(own, spaces.Dict)
        self.observation_space = spaces.Dict(shown)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, or return the one begun at construction."""
        first, self._first = self._first, None
        if first is None or seed is not None or options is not None:
            first = self.env.reset(seed=seed, options=options)
        observation, info = first
        return self._show(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and render."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._show(observation), reward, terminated, truncated, info

    def _show(self, observation: Any) -> dict[str, Any]:
        shown = {"pixels": self._render()}
        if self._only:
            return shown
        return {**(observation if self._nested else {"observation": observation}), **shown}

    def _render(self) -> np.ndarray[Any, Any]:
        picture = self.env.render()
        if not isinstance(picture, np.ndarray):
            raise ConfigError(
                f"from_pixels needs an environment made with render_mode='rgb_array', this one "
                f"renders {type(picture).__name__}"
            )
        return picture
