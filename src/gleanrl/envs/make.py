"""From what a user calls an environment to something that steps into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium as gym

from gleanrl.core.errors import ConfigError
from gleanrl.core.options import EnvOptions
from gleanrl.core.protocols import Env
from gleanrl.envs.closing import closed_on_error
from gleanrl.envs.gymnasium import GymnasiumEnv
from gleanrl.envs.pool import NextStepPool
from gleanrl.envs.registry import make_gym, without_call_checks
from gleanrl.envs.serial import SerialEnv, gym_parts, gym_source
from gleanrl.envs.tensordict_handle import TensorDictHandle
from gleanrl.envs.tensordict_layout import is_tensordict_env
from gleanrl.envs.vector import is_vector_env, make_vector

Made: TypeAlias = Env | NextStepPool | TensorDictHandle
"""Gymnasium environments and pools go into rows; all others have TensorDict methods."""


def make_env(options: EnvOptions) -> Made:
    """Build the environment ``options`` describe.

    If that fails, environments that were made are closed; those that were given are left alone.

    Raises:
        UnknownEnvError: an id that is not registered.
        ConfigError: a combination that cannot be built.
    """
    given = options.create_env_fn
    if isinstance(given, Sequence) and not isinstance(given, str):
        return _from_sequence(list(given), options)
    if options.num_envs is not None and not _is_recipe(given):
        raise ConfigError(
            f"num_envs ({options.num_envs}) needs an id or a callable that makes one environment "
            f"per call, not a {type(given).__name__}"
        )
    if options.num_envs is not None:
        return _from_sequence([given] * options.num_envs, replace(options, num_envs=None))
    made: list[Any] = []
    with closed_on_error(made):
        return _adapt(_build(given, options.create_env_kwargs, made), options, bool(made))


def _is_recipe(given: Any) -> bool:
    return isinstance(given, (str, gym.envs.registration.EnvSpec)) or (
        callable(given) and not _is_built(given)
    )


def _is_built(given: Any) -> bool:
    return isinstance(given, gym.Env) or is_vector_env(given) or is_tensordict_env(given)


def _from_sequence(items: Sequence[Any], options: EnvOptions) -> Made:
    if not items:
        raise ConfigError("create_env_fn is an empty sequence: give at least one environment")
    if options.num_envs is not None:
        raise ConfigError(
            f"num_envs ({options.num_envs}) and a sequence of {len(items)} environments "
            "exclude each other"
        )
    made: list[Any] = []
    with closed_on_error(made):
        built = [_build(item, options.create_env_kwargs, made) for item in items]
        return _batch(built, options, made)


def _batch(built: list[Any], options: EnvOptions, made: Sequence[Any]) -> Made:
    if len({id(env) for env in built}) < len(built):
        raise ConfigError(
            "the same environment object was given more than once; "
            "give callables that each make one"
        )
    if all(isinstance(env, gym.Env) and not is_vector_env(env) for env in built):
        fresh = {id(env) for env in made}
        envs = [without_call_checks(env) if id(env) in fresh else env for env in built]
        return _gymnasium(envs, (len(built),), options, inner=None)
    if all(is_tensordict_env(env) for env in built):
        return _adapt(SerialEnv.of(built), options, fresh=len(made) == len(built))
    kinds = sorted({type(env).__name__ for env in built})
    raise ConfigError(
        f"a sequence must hold single Gymnasium or TensorDict environments of one kind, not {kinds}"
    )


def _build(given: Any, kwargs: Mapping[str, Any], made: list[Any]) -> Any:
    """Return the environment of ``given``; one that did not exist before is put into ``made``."""
    if _is_built(given):
        if kwargs:
            raise ConfigError(
                f"create_env_kwargs ({sorted(kwargs)}) need a callable or an id; a "
                f"{type(given).__name__} was given, which is built already"
            )
        return given
    made.append(_call(given, kwargs))
    return made[-1]


def _call(given: Any, kwargs: Mapping[str, Any]) -> Any:
    if isinstance(given, (str, gym.envs.registration.EnvSpec)):
        return make_gym(given, **kwargs)
    if not callable(given):
        raise ConfigError(
            f"create_env_fn ({given!r:.100}) is neither an environment id, an environment nor a "
            "callable that returns one"
        )
    env = given(**kwargs)
    if isinstance(env, str):
        env = make_gym(env)
    if not _is_built(env):
        raise ConfigError(
            f"create_env_fn returned a {type(env).__name__}; it must return a gymnasium.Env, a "
            "gymnasium.vector.VectorEnv or an environment with TensorDict methods"
        )
    return env


def _adapt(env: Any, options: EnvOptions, fresh: bool) -> Made:
    """Return what steps ``env``; one that is ``fresh`` nobody else has, so it may be changed."""
    if is_vector_env(env):  # first: EnvPool's are single environments, too, by their class
        return make_vector(
            env,
            categorical=options.categorical,
            observation_dtype=options.observation_dtype,
            info_keys=options.info_keys,
        )
    if isinstance(env, gym.Env):
        env = without_call_checks(env) if fresh else env
        return _gymnasium([env], (), options, inner=env)
    bare = gym_source(env)
    if bare is not None:
        return GymnasiumEnv(
            [without_call_checks(single) for single in bare.envs] if fresh else bare.envs,
            bare.batch_shape,
            inner=env,
            around=gym_parts(env),
            categorical=bare.categorical,
            observation_dtype=options.observation_dtype or bare.observation_dtype,
            info_keys=options.info_keys or bare.info_keys,
            seeds=bare.seeds,
        )
    if options.device is not None and env.device != options.device:
        env = env.to(options.device)
    return TensorDictHandle(env)


def _gymnasium(
    envs: Sequence[Any], shape: tuple[int, ...], options: EnvOptions, inner: Any
) -> GymnasiumEnv:
    return GymnasiumEnv(
        envs,
        shape,
        inner=inner,
        categorical=options.categorical,
        observation_dtype=options.observation_dtype,
        info_keys=options.info_keys,
    )
