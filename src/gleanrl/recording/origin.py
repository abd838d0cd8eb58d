"""The origin of frames: a card's description of the environment."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec


def describe_env(env: Any, format: str) -> dict[str, Any]:
    """Return a description of ``env``: a built environment, several, a spec or an id.

    ``env_spec`` is Gymnasium's JSON; spaces are Minari's, for that format only.
    """
    first = env[0] if isinstance(env, list | tuple) and env else env
    if isinstance(first, str):
        facts: dict[str, Any] = {"env": first}
        with contextlib.suppress(gym.error.Error, ImportError):
            facts |= _of_spec(gym.spec(first))
        return {**facts, "env": first}
    if isinstance(first, EnvSpec):
        return _of_spec(first)
    facts = {"env": type(getattr(first, "unwrapped", first)).__name__}
    spec = getattr(first, "spec", None)
    if isinstance(spec, EnvSpec):
        facts |= _of_spec(spec)
    if format == "minari":
        facts |= _of_spaces(first)
    return facts


def _of_spec(spec: EnvSpec) -> dict[str, Any]:
    facts: dict[str, Any] = {"env": spec.id}
    with contextlib.suppress(TypeError, ValueError, AttributeError):  # an entry point in __main__
        facts["env_spec"] = spec.to_json()
    return facts


def _of_spaces(env: Any) -> dict[str, Any]:
    from minari.serialization import serialize_space

    facts = {}
    for name in ("observation_space", "action_space"):
        space = getattr(env, f"single_{name}", getattr(env, name, None))
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            if isinstance(space, gym.Space):
                facts[name] = json.loads(serialize_space(space))
    return facts
