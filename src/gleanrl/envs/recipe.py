"""From what a user calls an environment to one with TensorDict methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym

from gleanrl.core.errors import ConfigError
from gleanrl.envs.gym_env import GymEnv
from gleanrl.envs.registry import make_gym
from gleanrl.envs.tensordict_layout import is_tensordict_env

Recipe: TypeAlias = str | gym.envs.registration.EnvSpec | Callable[..., Any]
"""What makes one environment per call: an id, its registered spec, or a callable."""


def make_tensordict_env(recipe: Recipe, kwargs: Mapping[str, Any]) -> Any:
    """Make one environment; what Gymnasium calls one is wrapped.

    Raises:
        UnknownEnvError: an id that is not registered.
        ConfigError: something else was made.
    """
    if isinstance(recipe, str | gym.envs.registration.EnvSpec):
        return GymEnv(make_gym(recipe, **kwargs))
    made = recipe(**kwargs)
    if isinstance(made, str):
        made = make_gym(made)
    if is_tensordict_env(made):
        return made
    if isinstance(made, gym.Env):
        return GymEnv(made)
    raise ConfigError(
        f"create_env_fn must make environments with TensorDict methods or a gymnasium.Env, it made "
        f"a {type(made).__name__}"
    )


_IGNORED = frozenset(
    {
        "allow_step_when_done",
        "consolidate",
        "daemon",
        "memmap",
        "metadata_from_workers",
        "mp_start_method",
        "non_blocking",
        "num_sub_threads",
        "num_threads",
        "pin_memory",
        "policy_proof",
        "serial_for_single",
        "share_individual_td",
        "shared_memory",
        "shutdown_timeout",
        "use_buffers",
    }
)


def ignored(name: str, arguments: Mapping[str, Any]) -> None:
    """Accept arguments of TorchRL's batched environments that change how data move, not which.

    Processes are always forked from a clean one, data always go through shared memory where they
    fit it, and stepping an environment that has ended is always left to the environment.

    Raises:
        TypeError: an argument that TorchRL's have not either.
    """
    unknown = sorted(arguments.keys() - _IGNORED)
    if unknown:
        raise TypeError(f"{name} got unexpected arguments: {', '.join(unknown)}")


def dealt(name: str, given: Any, number: int, argument: str = "num_workers") -> list[Any]:
    """Return one entry of ``given`` per environment: each its own, or all the same one.

    Raises:
        ConfigError: another number of entries, or nothing that can be one.
    """
    if isinstance(given, str | Mapping | gym.envs.registration.EnvSpec) or callable(given):
        return [given] * number
    if not isinstance(given, Sequence):
        raise ConfigError(f"{name} ({given!r:.100}) must be one entry or one per environment")
    if len(given) != number:
        raise ConfigError(f"{name} has {len(given)} entries for {argument}={number}")
    return list(given)


def check_recipes(recipes: Sequence[Any]) -> None:
    """Find what cannot make an environment, before anything is made.

    Raises:
        ConfigError: names the entry.
    """
    for index, recipe in enumerate(recipes):
        known = isinstance(recipe, str | gym.envs.registration.EnvSpec) or callable(recipe)
        if not known or is_tensordict_env(recipe) or isinstance(recipe, gym.Env):
            raise ConfigError(
                f"create_env_fn for environment {index} is a {type(recipe).__name__}; give an id "
                "or a callable that makes a new environment at every call"
            )
