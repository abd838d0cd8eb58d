"""Gymnasium environments with TensorDict methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import DONE, REWARD, TERMINATED, TRUNCATED, Key
from gleanrl.core.options import InfoKeys, check_observation_dtype, whole
from gleanrl.envs.base import EnvBase, EnvSpecs, batched
from gleanrl.envs.closing import closed_on_error
from gleanrl.envs.gym_wrappers import FrameSkip, Pixels
from gleanrl.envs.registry import make_gym
from gleanrl.envs.returned import check_flag, check_reset, check_reward, not_five, write_rewards
from gleanrl.envs.spaces import (
    action_decoder,
    action_leaves,
    assemble,
    leaf_field,
    observation_leaves,
    space_spec,
)
from gleanrl.envs.specs import Binary, TensorSpec, Unbounded
from gleanrl.envs.writers import InfoWriter, Writer, info_fields, make_writer
from gleanrl.memory.window import RolloutWindow

F = TypeVar("F", bound=Callable[..., Any])
_FLAGS = (DONE, TERMINATED, TRUNCATED)


@dataclass(frozen=True, slots=True)
class GymSource:
    """What is inside a `GymEnv`, for stepping it without TensorDicts. Internal to the package."""

    envs: tuple[gym.Env[Any, Any], ...]
    batch_shape: tuple[int, ...]
    categorical: bool
    observation_dtype: torch.dtype | None
    info_keys: InfoKeys
    seeds: tuple[int | None, ...] = ()
    """What the next reset of each environment is to be seeded with."""


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
        num_envs = None if num_envs is None else whole("num_envs", num_envs, least=0)
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
            self._source = GymSource(
                tuple(self._envs), batch, categorical_action_encoding, observation_dtype, info_keys
            )
            specs = self._read_spaces(batch)
        super().__init__(specs, batch, device)
        self._seeds: list[int | None] = [None] * len(self._envs)

    def _read_spaces(self, batch: tuple[int, ...]) -> EnvSpecs:
        source, first = self._source, self._envs[0]
        leaves = observation_leaves(first.observation_space)
        fields = [leaf_field(leaf, source.observation_dtype) for leaf in leaves]
        infos = info_fields(source.info_keys, fields)
        self._writers: list[Writer] = [
            *(make_writer(leaf, field) for leaf, field in zip(leaves, fields, strict=True)),
            *(InfoWriter(name, field) for name, field in infos.items()),
        ]
        # The present observations of all environments; one step long, so that writers can fill it.
        self._now = RolloutWindow.allocate((*fields, *infos.values()), len(self._envs), 1)
        self._acts = action_leaves(first.action_space)
        self._decoders = [action_decoder(leaf.space, source.categorical) for leaf in self._acts]
        shown: dict[Key, TensorSpec] = {
            leaf.key: _shown(leaf.space, field.dtype)
            for leaf, field in zip(leaves, fields, strict=True)
        }
        shown |= {field.key: Unbounded(field.shape, field.dtype) for field in infos.values()}
        told = {leaf.key: space_spec(leaf.space, source.categorical) for leaf in self._acts}
        return EnvSpecs(
            observation=batched(shown, batch),
            action=batched(told, batch),
            reward=batched({REWARD: Unbounded((1,), torch.float32)}, batch),
            done=batched({key: Binary((1,), torch.bool) for key in _FLAGS}, batch),
        )

    def unwrap(self) -> GymSource | None:
        """Return what is inside, or ``None`` if data are wanted on another device than the CPU."""
        on_cpu = self.device is None or self.device.type == "cpu"
        return replace(self._source, seeds=tuple(self._seeds)) if on_cpu else None

    # -- stepping --------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None, **options: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        chosen = range(len(self._envs))
        if mask is not None:
            flat = mask.reshape(len(self._envs), -1).any(1).cpu()
            chosen = [env for env in chosen if flat[env]]  # type: ignore[assignment]
        for env in chosen:
            seed, self._seeds[env] = self._seeds[env], None
            result = self._envs[env].reset(seed=seed, options=options or None)
            self._show(env, *check_reset(result, f"environment {env}: reset"))
        flags = torch.zeros((*self.batch_size, 1), dtype=torch.bool)
        return self._pack({key: flags.clone() for key in _FLAGS})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        rewards, dead, late = [], [], []
        for env, action in enumerate(self._actions(tensordict)):
            result = self._envs[env].step(action)
            if not isinstance(result, tuple) or len(result) != 5:
                raise not_five(result, f"environment {env}: step")
            observation, reward, terminated, truncated, info = result
            self._show(env, observation, info)
            rewards.append(check_reward(reward, env))
            dead.append(check_flag(terminated, env, "terminated"))
            late.append(check_flag(truncated, env, "truncated"))
        shape = (*self.batch_size, 1)
        narrow = np.empty((len(rewards), 1), np.float32)
        write_rewards(narrow, np.array([rewards]), when="")
        ended, cut = (torch.tensor(flags).view(shape) for flags in (dead, late))
        return self._pack(
            {
                REWARD: torch.from_numpy(narrow).view(shape),
                DONE: ended | cut,
                TERMINATED: ended,
                TRUNCATED: cut,
            }
        )

    def _show(self, env: int, observation: Any, info: Any) -> None:
        for writer in self._writers:
            writer.write_carry(self._now, env, observation, info)

    def _pack(self, entries: dict[Key, torch.Tensor]) -> TensorDictBase:
        packed = TensorDict({}, batch_size=self.batch_size, device=self.device)
        for key in self._now.keys():
            now = self._now.tensor(key)[:, 0]
            packed.set(key, now.clone().view((*self.batch_size, *now.shape[1:])))
        for key, value in entries.items():
            packed.set(key, value)
        return packed

    def _actions(self, tensordict: TensorDictBase) -> Sequence[Any]:
        parts = []
        for leaf, decode in zip(self._acts, self._decoders, strict=True):
            action = tensordict.get(leaf.key).detach().cpu()
            ndim = len(self.batch_size)
            parts.append(decode(action.reshape((len(self._envs), *action.shape[ndim:])).numpy()))
        if len(self._acts) == 1 and not self._acts[0].path:
            return parts[0]
        space = self._envs[0].action_space
        return [assemble(self._acts, values, space) for values in zip(*parts, strict=True)]

    # -- life ------------------------------------------------------------------------------------

    def _set_seed(self, seed: int, static: bool) -> None:
        for i, env in enumerate(self._envs):
            own = seed if static else seed + i
            self._seeds[i] = own
            env.action_space.seed(own)

    def _close(self) -> None:
        for env in self._envs:
            env.close()

    def __repr__(self) -> str:
        inside = self._envs[0]
        name = inside.spec.id if inside.spec is not None else str(inside)
        return f"GymEnv({name!r}, batch_size={tuple(self.batch_size)}, device={self.device})"


GymWrapper = GymEnv
"""The name users know for a `GymEnv` around an environment that was built already."""


def _shown(space: gym.Space[Any], dtype: torch.dtype) -> TensorSpec:
    spec = space_spec(space)
    if spec.dtype == dtype:
        return spec
    return Unbounded(spec.shape, dtype)


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
