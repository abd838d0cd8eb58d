"""Gymnasium environments with TensorDict methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import GymOptions, InfoKeys, check_int, check_observation_dtype
from gleanrl.envs.factory import EnvFactory, build, closed_on_error
from gleanrl.envs.gymnasium import GymnasiumEnv
from gleanrl.envs.row_env import RowEnv
from gleanrl.envs.tensordict_envs import is_tensordict_env
from gleanrl.envs.vector import is_vector_env
from gleanrl.operations.proofs import remembered


@remembered
class GymEnv(RowEnv):
    """A Gymnasium environment, or several of one kind as a batch.

    Observations keep the dtype of their space, and ``Dict`` spaces become nested keys; rewards are
    float32 ``[..., 1]``.

    Example:
        >>> env = GymEnv("CartPole-v1")
        >>> env.rollout(3)["observation"].shape
        torch.Size([3, 4])
    """

    rows: GymnasiumEnv

    def __init__(
        self,
        env: str | gym.Env[Any, Any] | gym.envs.registration.EnvSpec | Callable[[], Any],
        *,
        num_envs: int | None = None,
        device: torch.device | str | None = None,
        frame_skip: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = True,
        categorical_action_encoding: bool = True,
        observation_dtype: torch.dtype | None = None,
        info_keys: InfoKeys = (),
        **make_kwargs: Any,
    ) -> None:
        """Make the environments. None is reset, unless ``from_pixels`` needs a picture's size.

        Args:
            env: An id, a built environment, or a callable that makes one.
            num_envs: Make this many, batch size ``[num_envs]``; ``None`` or 0 for a single one.
            device: Where data are returned.
            frame_skip: Repeat every action this many times and add the rewards up.
            from_pixels: Add the rendered picture, ``[height, width, 3]`` uint8, as ``"pixels"``.
            pixels_only: With ``from_pixels``, leave out all other observations.
            categorical_action_encoding: Discrete actions as indices; otherwise as one-hot vectors.
            observation_dtype: Cast floating observations to this dtype.
            info_keys: Numeric ``info`` entries to deliver in addition: names (float32 scalars), or
                names with shape and dtype. An entry that ``info`` lacks is zero.
            make_kwargs: Passed on to `gymnasium.make` or the callable.

        Raises:
            UnknownEnvError: an id that is not registered.
            ConfigError: arguments that do not fit together.
        """
        num_envs = None if num_envs is None else check_int("num_envs", num_envs, least=0)
        check_observation_dtype(observation_dtype)
        if num_envs and isinstance(env, gym.Env):
            raise ConfigError(
                f"num_envs ({num_envs}) needs an id or a callable, not a built {type(env).__name__}"
            )
        if from_pixels and not isinstance(env, gym.Env):
            make_kwargs.setdefault("render_mode", "rgb_array")
        envs: list[gym.Env[Any, Any]] = []
        batch = (num_envs,) if num_envs else ()
        ours: list[gym.Env[Any, Any]] = []
        with closed_on_error(ours):
            for _ in range(num_envs or 1):
                made = _make(env, make_kwargs)
                if made is not env:
                    ours.append(made)
                made = made if frame_skip in (None, 1) else FrameSkip(made, frame_skip)
                envs.append(Pixels(made, pixels_only) if from_pixels else made)
            options = GymOptions(
                categorical_action_encoding=categorical_action_encoding,
                observation_dtype=observation_dtype,
                info_keys=info_keys,
            )
            super().__init__(GymnasiumEnv(envs, batch, options), device=device)

    @property
    def members(self) -> tuple[gym.Env[Any, Any], ...]:
        """The Gymnasium environments inside, wrappers included."""
        return tuple(self.rows.envs)

    def __repr__(self) -> str:
        inside = self.members[0]
        name = inside.spec.id if inside.spec is not None else str(inside)
        return f"GymEnv({name!r}, batch_size={tuple(self.batch_size)}, device={self.device})"


GymWrapper = GymEnv
"""TorchRL's name for a `GymEnv` around a built environment."""


def _make(given: Any, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    made = build(given, kwargs)
    if not isinstance(made, gym.Env) or is_vector_env(made):
        raise ConfigError(
            f"GymEnv needs an id, a single gymnasium.Env or a callable that makes one, not a "
            f"{type(made).__name__}"
        )
    return made


def make_tensordict_env(
    factory: EnvFactory, kwargs: Mapping[str, Any], storing: GymOptions | None = None
) -> Any:
    """Make one environment with TensorDict methods; wrap Gymnasium's, and store data so."""
    made, storing = build(factory, kwargs), storing or GymOptions()
    if is_vector_env(made):
        raise ConfigError(
            f"create_env_fn made a {type(made).__name__}, which is several environments: a "
            "ParallelEnv, a SerialEnv and inference='central' need single ones (num_envs= makes "
            "several); a collector with inference='workers' takes it"
        )
    if isinstance(made, gym.Env) and not is_tensordict_env(made):
        return GymEnv(made, **asdict(storing))
    if not is_tensordict_env(made):
        raise ConfigError(
            "create_env_fn must make environments with TensorDict methods or a gymnasium.Env, it "
            f"made a {type(made).__name__}"
        )
    storing.check_unused(made)
    return made


class FrameSkip(gym.Wrapper[Any, Any, Any, Any]):
    """Repeats every action and adds the rewards up; stops at the end of the episode."""

    def __init__(self, env: gym.Env[Any, Any], times: int) -> None:
        """Repeat actions ``times`` times."""
        if times < 1:
            raise ConfigError(f"frame_skip ({times}) must be at least 1")
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        total: Any = 0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = self.env.step(action)
            if reward is not None:  # TorchRL's environments may have none
                total = total + reward
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class Pixels(gym.ObservationWrapper[Any, Any, Any]):
    """Shows rendered images as ``"pixels"``, alone or together with the observation."""

    def __init__(self, env: gym.Env[Any, Any], only: bool = True) -> None:
        """Reset ``env`` to learn the size of a picture; the first `reset` returns that episode."""
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
        first, self._first = self._first, None
        if first is None or seed is not None or options is not None:
            first = self.env.reset(seed=seed, options=options)
        observation, info = first
        return self.observation(observation), info

    def observation(self, observation: Any) -> dict[str, Any]:
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


class set_gym_backend(contextlib.nullcontext[Any], contextlib.ContextDecorator):
    """Choose the only library of `GymEnv`. Use as ``.set()``, context or decorator."""

    def __init__(self, backend: Any) -> None:
        """Accept ``"gymnasium"`` or the module.

        Raises:
            ConfigError: any other backend.
        """
        if backend != "gymnasium" and backend is not gym:
            raise ConfigError(
                f"gym backend {backend!r} is not supported: environments are made with gymnasium; "
                "wrap those of other libraries with shimmy"
            )
        super().__init__(self)
        self.backend = "gymnasium"

    def set(self) -> None:
        """Do nothing, because the backend is the only one."""
