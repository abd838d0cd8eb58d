"""A callable that makes environments and can say what they are like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym
import torch
from tensordict import TensorDictBase

from gleanrl.core.errors import ConfigError
from gleanrl.envs.gym_env import GymEnv
from gleanrl.envs.tensordict_layout import is_tensordict_env


@dataclass(frozen=True, slots=True)
class EnvMetaData:
    """What is known of an environment without having one."""

    tensordict: TensorDictBase
    """One step filled with zeros."""
    batch_size: torch.Size
    device: torch.device | None
    observation_spec: Any
    action_spec: Any
    reward_spec: Any
    done_spec: Any


class EnvCreator:
    """Makes environments by a callable of yours, which travels to other processes by value.

    Example:
        >>> from gleanrl.envs import GymEnv
        >>> make = EnvCreator(lambda: GymEnv("Pendulum-v1"))
        >>> make().action_spec.shape, make.meta_data.batch_size
        (torch.Size([1]), torch.Size([]))
    """

    def __init__(
        self,
        create_env_fn: Callable[..., Any],
        create_env_kwargs: Mapping[str, Any] | None = None,
        share_memory: bool = True,
    ) -> None:
        """Remember the callable; nothing is made yet.

        Args:
            create_env_fn: Returns a new environment at every call.
            create_env_kwargs: Its arguments.
            share_memory: Accepted for compatibility: environments share no state here.

        Raises:
            ConfigError: ``create_env_fn`` cannot be called.
        """
        if not callable(create_env_fn):
            raise ConfigError(f"create_env_fn ({create_env_fn!r:.100}) must be callable")
        self._make = create_env_fn
        self._kwargs = dict(create_env_kwargs or {})
        self._meta_data: EnvMetaData | None = None

    def __call__(self, **kwargs: Any) -> Any:
        """Make an environment; ``kwargs`` add to those given at construction."""
        return self._make(**{**self._kwargs, **kwargs})

    def make_variant(self, **kwargs: Any) -> EnvCreator:
        """Return a creator with other arguments."""
        return EnvCreator(self._make, {**self._kwargs, **kwargs})

    @property
    def meta_data(self) -> EnvMetaData:
        """What the environments are like; one is made for that at the first access, and closed."""
        if self._meta_data is None:
            with _closing(self()) as env:
                self._meta_data = _describe(env)
        return self._meta_data

    def __getstate__(self) -> dict[str, Any]:
        # By value: lambdas and functions of a script must reach processes that cannot import them.
        return {"made_by": cloudpickle.dumps((self._make, self._kwargs))}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._make, self._kwargs = cloudpickle.loads(state["made_by"])
        self._meta_data = None


@contextmanager
def _closing(env: Any) -> Iterator[Any]:
    if isinstance(env, gym.Env):
        env = GymEnv(env)
    if not is_tensordict_env(env):
        raise ConfigError(
            f"create_env_fn made a {type(env).__name__}; meta_data needs a gymnasium.Env or an "
            "environment with TensorDict methods"
        )
    try:
        yield env
    finally:
        env.close()


def _describe(env: Any) -> EnvMetaData:
    return EnvMetaData(
        tensordict=env.fake_tensordict(),
        batch_size=env.batch_size,
        device=env.device,
        observation_spec=env.full_observation_spec,
        action_spec=env.full_action_spec,
        reward_spec=env.full_reward_spec,
        done_spec=env.full_done_spec,
    )
