"""Registered Gymnasium environments: making one from its id."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import Any

import gymnasium as gym

from gleanrl.core.errors import ConfigError, UnknownEnvError
from gleanrl.envs.stock import is_stock, stock

_PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "HighwayEnv": "highway_env"}
"""Packages whose environments exist only once they were imported, by namespace."""


def make_gym(given: str | gym.envs.registration.EnvSpec, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make a registered environment.

    Raises:
        UnknownEnvError: the id is not registered.
        ConfigError: a package it needs is missing.
    """
    if isinstance(given, str):
        import_plugin(given)
    try:
        return gym.make(given, **kwargs)
    except gym.error.DependencyNotInstalled as err:
        raise ConfigError(f"environment {given!r} needs a package that is missing: {err}") from err
    except (gym.error.UnregisteredEnv, gym.error.Error, ModuleNotFoundError) as err:
        raise UnknownEnvError(unknown_env_message(str(given), err)) from err


_CALL_CHECKS = (stock(gym.wrappers.OrderEnforcing), stock(gym.wrappers.PassiveEnvChecker))


def without_call_checks(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Take out the two wrappers that only check how an environment is called.

    They cost a tenth of a cheap step. This library resets before it steps, and checks itself what
    comes back. All other wrappers stay, and so does an environment that the user made and kept.
    """
    while _only_checks(env):
        env = env.env  # type: ignore[attr-defined]  # both are wrappers
    outer = env
    while isinstance(outer, gym.Wrapper):
        while _only_checks(outer.env):
            outer.env = outer.env.env  # type: ignore[attr-defined]
        outer = outer.env
    return env


def _only_checks(env: gym.Env[Any, Any]) -> bool:
    return type(env) in _CALL_CHECKS and is_stock(env)


def unknown_env_message(env_id: str, err: Exception) -> str:
    """Return a sentence for an unknown id: what is close to it, or which package may be missing."""
    close = difflib.get_close_matches(env_id, list(gym.registry), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else _package_hint(env_id)
    return f"no environment is registered as {env_id!r}: {hint} ({err})"


def _package_hint(env_id: str) -> str:
    if env_id.startswith("ALE/"):
        return "Atari environments need `pip install ale-py`"
    return "import the package that registers it first, or write 'module:id'"


def import_plugin(env_id: str) -> None:
    """Import the package that registers ``env_id`` if it is known and installed.

    A worker process has imported nothing but this library, so ids of Atari environments, say, would
    not exist in it.
    """
    module = _PLUGINS.get(env_id.partition("/")[0]) if "/" in env_id else None
    if module is None or env_id in gym.registry or importlib.util.find_spec(module) is None:
        return
    gym.register_envs(importlib.import_module(module))
