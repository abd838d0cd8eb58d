"""The adapter that steps a user's environment into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from gleanrl.core.errors import ConfigError, note
from gleanrl.core.options import SourceOptions
from gleanrl.core.retry_limits import read_retry_limit
from gleanrl.envs.async_pool import AsyncPool, is_async_pool
from gleanrl.envs.factory import build, closed_on_error, is_built, is_id
from gleanrl.envs.gymnasium import GymnasiumEnv, check_spaces, without_call_checks
from gleanrl.envs.inside_torchrl_worker import prepare_workers
from gleanrl.envs.recorded_or_called_transforms import Unproven
from gleanrl.envs.rehearsal_proof import transformed_rows
from gleanrl.envs.restarting_envs import RestartingEnv, Restarts
from gleanrl.envs.row_env import EnvRows
from gleanrl.envs.serial import SerialEnv, rows_of
from gleanrl.envs.tensor_vector import TensorVectorEnv, tensor_device
from gleanrl.envs.tensordict_envs import TensorDictHandle, is_tensordict_env
from gleanrl.envs.vector import (
    DenseVectorEnv,
    EnvPoolResets,
    NextStepPool,
    VectorAdapter,
    VectorResets,
    is_envpool,
    is_vector_env,
)

Made: TypeAlias = EnvRows | TensorDictHandle
"""Environments that step into rows; all others have TensorDict methods."""


def make_env(options: SourceOptions) -> Made:
    """Build the environment ``options`` describe.

    If that fails, environments that were made are closed; those that were given are left alone.
    """
    given, num_envs = options.create_env_fn, options.num_envs
    several = isinstance(given, Sequence) and not isinstance(given, str)
    if several and not given:
        raise ConfigError("create_env_fn is an empty sequence: give at least one environment")
    if num_envs is not None and several:
        raise ConfigError(
            f"num_envs ({num_envs}) and a sequence of {len(given)} environments exclude each other"
        )
    if num_envs is not None and is_vector_env(given):
        raise _vector_already(given, num_envs)
    if num_envs is not None and (is_built(given) or not (is_id(given) or callable(given))):
        raise ConfigError(
            f"num_envs ({num_envs}) needs an id or a callable that makes one environment "
            f"per call, not a {type(given).__name__}"
        )
    items = list(given) if several else [given] * (1 if num_envs is None else num_envs)
    made: list[Any] = []
    with closed_on_error(made):
        if options.on_env_error == "restart":
            return _restarting(items, options, several or num_envs is not None, made)
        built = [
            _build(index, item, options.create_env_kwargs, made) for index, item in enumerate(items)
        ]
        if several or num_envs is not None:
            return _batch(built, options, made)
        if is_vector_env(built[0]) and is_async_pool(built[0]):
            again = partial(build, given, options.create_env_kwargs) if made else None
            return AsyncPool(built[0], options, again)
        return _adapt(built[0], options, bool(made))


def _build(index: int, given: Any, kwargs: Mapping[str, Any], made: list[Any]) -> Any:
    """Return environment ``index``, that of ``given``; add a new environment to ``made``."""
    try:
        env = build(given, kwargs)
    except Exception as err:
        note(err, f"environment {index} raised this while it was built")
        raise
    if not is_built(env):
        raise ConfigError(
            f"create_env_fn returned a {type(env).__name__}; it must return a gymnasium.Env, a "
            "gymnasium.vector.VectorEnv or an environment with TensorDict methods"
        )
    if not is_built(given):
        made.append(env)
    return env


def _restarting(
    items: Sequence[Any], options: SourceOptions, batch: bool, made: list[Any]
) -> RestartingEnv:
    """Return single Gymnasium environments of which each is built anew where it raises."""
    envs, kwargs = [], options.create_env_kwargs
    allowed = read_retry_limit("max_env_restarts", options.max_env_restarts)
    restarts = Restarts(len(items), allowed)
    for index, item in enumerate(items):
        env = restarts.built(index, partial(_build, index, item, kwargs, made))
        if is_built(item) or not isinstance(env, gym.Env) or is_vector_env(env):
            raise ConfigError(
                "on_env_error='restart' builds single Gymnasium environments anew: give ids or "
                f"callables that make one (several with num_envs=), not a {type(env).__name__}"
            )
        envs.append(without_call_checks(env))
    check_spaces(envs)
    shape = (len(envs),) if batch else ()
    makers = [lambda item=item: without_call_checks(build(item, kwargs)) for item in items]
    return RestartingEnv(envs, makers, shape, options.storing(), restarts)


def _batch(built: list[Any], options: SourceOptions, made: Sequence[Any]) -> Made:
    if len({id(env) for env in built}) < len(built):
        raise ConfigError(
            "the same environment object was given more than once; "
            "give callables that each make one"
        )
    if all(isinstance(env, gym.Env) and not is_vector_env(env) for env in built):
        fresh = {id(env) for env in made}
        envs = [without_call_checks(env) if id(env) in fresh else env for env in built]
        check_spaces(envs)
        return GymnasiumEnv(envs, (len(envs),), options.storing())
    if all(is_tensordict_env(env) for env in built):
        return _adapt(SerialEnv.of(built), options, fresh=len(made) == len(built))
    vector = next(filter(is_vector_env, built), None)
    if vector is not None and options.num_envs is not None:
        raise _vector_already(vector, options.num_envs)
    kinds = sorted({type(env).__name__ for env in built})
    raise ConfigError(
        f"a sequence must hold single Gymnasium or TensorDict environments of one kind, not {kinds}"
    )


def _vector_already(env: Any, num_envs: int) -> ConfigError:
    return ConfigError(
        f"num_envs ({num_envs}) copies single environments, and a {type(env).__name__} is "
        f"{env.num_envs} of them already: drop num_envs="
    )


def _adapt(env: Any, options: SourceOptions, fresh: bool) -> Made:
    """Return the adapter of ``env``; a ``fresh`` one has no other user, so it may be changed."""
    if is_vector_env(env):  # first: EnvPool's are single environments, too, by their class
        return make_vector(env, options)
    if isinstance(env, gym.Env):
        single = without_call_checks(env) if fresh else env
        return GymnasiumEnv([single], (), options.storing())
    rows = rows_of(env, options.storing(), fresh)
    if isinstance(rows, GymnasiumEnv):
        return rows
    options.storing().check_unused(env)
    if rows is not None:
        return rows
    if options.env_device is not None and env.device != options.env_device:
        env = env.to(options.env_device)
    if options.fast:
        prepare_workers(env)
    handle = TensorDictHandle(env)
    if not options.fast:
        return handle
    try:
        return transformed_rows(handle, fresh)
    except Unproven as err:
        handle.why = f"{handle.why}; {err}"
        return handle


def make_vector(env: Any, options: SourceOptions) -> VectorAdapter:
    """Return the adapter for the reset mode of ``env``.

    ``env`` is a `gymnasium.vector.VectorEnv` or an EnvPool made with ``envpool.make_gymnasium``.
    """
    if is_envpool(env):
        return NextStepPool(EnvPoolResets(env, options), options)
    mode = _mode(env)
    # Only these two are known to honour a reset mask in every mode. Wrappers around them are not:
    # some of Gymnasium's own refuse the mask or lose it on the way.
    known = isinstance(env, (SyncVectorEnv, AsyncVectorEnv))
    resets = VectorResets(
        env, in_step=mode is AutoresetMode.SAME_STEP, singly=known or mode is AutoresetMode.DISABLED
    )
    device = tensor_device(resets.begin())
    if device is not None and mode is AutoresetMode.SAME_STEP:
        return TensorVectorEnv(resets, options, device)
    if device is not None and device.type != "cpu":
        raise ConfigError(
            f"{type(env).__name__} returns tensors on {device} in {mode} mode; environments on a "
            "device need AutoresetMode.SAME_STEP, with final observations in infos['final_obs']"
        )
    if mode is not AutoresetMode.NEXT_STEP:
        return DenseVectorEnv(resets, options)
    if isinstance(env.unwrapped, AsyncVectorEnv) and not env.unwrapped.shared_memory:
        # Its workers keep their "reset in the next step" mark through an explicit reset.
        raise ConfigError(
            "AsyncVectorEnv with shared_memory=False resets environments twice after reset() "
            "in NEXT_STEP mode; make it with shared_memory=True or autoreset_mode='SameStep'"
        )
    return NextStepPool(resets, options)


def _mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    mode = env.metadata.get("autoreset_mode")
    try:
        return AutoresetMode(mode)
    except ValueError as err:
        raise ConfigError(
            f"{type(env).__name__}.metadata['autoreset_mode'] is {mode!r}; it must be one of "
            f"{[str(mode) for mode in AutoresetMode]}: without it nobody can tell whether the step "
            "after an end is a transition"
        ) from err
