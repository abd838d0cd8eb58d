"""Gymnasium environments with TensorDict methods."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import gymnasium as gym
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key
from gleanrl.core.options import InfoKeys, check_int, check_observation_dtype
from gleanrl.core.protocols import Array, Window
from gleanrl.envs.base import EnvBase
from gleanrl.envs.closing import closed_on_error
from gleanrl.envs.gym_batch import FLAGS, GymBatch, GymSource
from gleanrl.envs.gym_wrappers import FrameSkip, Pixels
from gleanrl.envs.registry import make_gym
from gleanrl.envs.stock import stock
from gleanrl.memory.window import RolloutWindow

F = TypeVar("F", bound=Callable[..., Any])


@stock
class GymEnv(EnvBase):
    """A Gymnasium environment, or several of one kind as a batch.

    Observations keep the dtype of their space, and ``Dict`` spaces become nested keys; rewards are
    float32 ``[..., 1]``.

    Example:
        >>> env = GymEnv("CartPole-v1")
        >>> env.rollout(3)["observation"].shape
        torch.Size([3, 4])
    """

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
            from_pixels: Show what is rendered, ``[height, width, 3]`` uint8, as ``"pixels"``.
            pixels_only: Show nothing else then.
            categorical_action_encoding: Discrete actions as indices; otherwise as one-hot vectors.
            observation_dtype: Cast floating observations to this dtype.
            info_keys: Numeric ``info`` entries to deliver beside the observation: names (float32
                scalars), or names with shape and dtype. Zero where ``info`` lacks one.
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
        if from_pixels:
            make_kwargs.setdefault("render_mode", "rgb_array")
        self._envs: list[gym.Env[Any, Any]] = []
        batch = (num_envs,) if num_envs else ()
        ours: list[gym.Env[Any, Any]] = []
        with closed_on_error(ours):
            for _ in range(num_envs or 1):
                made = _make(env, make_kwargs)
                if made is not env:
                    ours.append(made)
                made = made if frame_skip in (None, 1) else FrameSkip(made, frame_skip)
                self._envs.append(Pixels(made, pixels_only) if from_pixels else made)
            source = GymSource(
                tuple(self._envs), batch, categorical_action_encoding, observation_dtype, info_keys
            )
            self._take(source, device)

    @classmethod
    def of(cls, source: GymSource) -> GymEnv:
        """Return a batch of environments that are built already, taken over."""
        env = cls.__new__(cls)
        env._envs = list(source.envs)
        env._take(source, None)
        return env

    def _take(self, source: GymSource, device: torch.device | str | None) -> None:
        self._source = source
        self.batch = GymBatch(source)
        """What steps them. Internal to the package."""
        specs = self.batch.specs()
        now, window = (
            RolloutWindow.allocate(self.batch.observations, len(self._envs), 1) for _ in range(2)
        )
        self._now: Window = now
        self.batch.begin(window, now)
        super().__init__(device=device, batch_size=source.batch_shape)
        self._declare(specs)

    @property
    def members(self) -> tuple[gym.Env[Any, Any], ...]:
        """The Gymnasium environments inside, wrappers included."""
        return tuple(self._envs)

    def move(self, window: Window, now: Window) -> None:
        """Keep the present observations in ``now`` from here on. Internal to the package."""
        for key in now.keys():
            now.tensor(key).copy_(self._now.tensor(key))
        self._now = now
        self.batch.begin(window, now)

    def _gym_source(self) -> GymSource:
        """Return what is inside, with the seeds not yet used."""
        return replace(self._source, seeds=self.batch.seeds)

    # -- stepping --------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        chosen = range(len(self._envs))
        if mask is not None:
            flat = mask.reshape(len(self._envs), -1).any(1).cpu()
            chosen = [env for env in chosen if flat[env]]  # type: ignore[assignment]
        self.batch.reset(chosen, options)
        flags = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        return self._pack({key: flags.clone() for key in FLAGS})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome = self.batch.step(self.batch.decode(self._actions(tensordict)))
        shape = (*self.batch_size, 1)
        ended = torch.from_numpy(outcome.terminated).view(shape)
        cut = torch.from_numpy(outcome.truncated).view(shape)
        return self._pack(
            {
                REWARD: torch.from_numpy(outcome.rewards).view(shape),
                DONE: ended | cut,
                TERMINATED: ended,
                TRUNCATED: cut,
            }
        )

    def _pack(self, entries: dict[Key, torch.Tensor]) -> TensorDictBase:
        packed = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key in self._now.keys():
            now = self._now.tensor(key)[:, 0]
            packed.set(key, now.clone().view((*self.batch_size, *now.shape[1:])))
        for key, value in entries.items():
            packed.set(key, value)
        return packed

    def _actions(self, tensordict: TensorDictBase) -> list[Array]:
        parts, ndim = [], len(self.batch_size)
        for key in self.batch.action_keys:
            action = tensordict.get(key).detach().cpu()
            parts.append(action.reshape((len(self._envs), *action.shape[ndim:])).numpy())
        return parts

    # -- life ------------------------------------------------------------------------------------

    _returns_all = True

    def _set_seed(self, seed: int | None) -> None:
        self.batch.seed(check_int("seed", seed, least=0), False)

    def _seed_all(self, seed: int | None, static: bool) -> None:
        if static:
            self.batch.seed(check_int("seed", seed, least=0), True)
        else:
            self._set_seed(seed)

    def _close(self) -> None:
        for env in self._envs:
            env.close()

    def __repr__(self) -> str:
        inside = self._envs[0]
        name = inside.spec.id if inside.spec is not None else str(inside)
        return f"GymEnv({name!r}, batch_size={tuple(self.batch_size)}, device={self.device})"


GymWrapper = GymEnv
"""The name users know for a `GymEnv` around an environment that was built already."""


def _make(given: Any, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    if isinstance(given, (str, gym.envs.registration.EnvSpec)):
        return make_gym(given, **kwargs)
    if not isinstance(given, gym.Env) and callable(given):
        given = given(**kwargs)
    elif kwargs and kwargs != {"render_mode": "rgb_array"}:
        raise ConfigError(
            f"arguments {sorted(kwargs)} are for making an environment; a "
            f"{type(given).__name__} was given, which is built already"
        )
    if not isinstance(given, gym.Env):
        raise ConfigError(
            f"GymEnv needs an id, a gymnasium.Env or a callable that makes one, not a "
            f"{type(given).__name__}"
        )
    return given


class set_gym_backend:
    """Choose the library behind `GymEnv`; there is one. Use as ``.set()``, context or decorator."""

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
        self.backend = "gymnasium"

    def set(self) -> None:
        """Do nothing: it is the backend already."""

    def __enter__(self) -> set_gym_backend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return

    def __call__(self, function: F) -> F:
        """Return ``function`` wrapped to run with this backend."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return run  # type: ignore[return-value]  # same signature by construction
