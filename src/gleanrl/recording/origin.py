"""The origin of frames: a card's description of the environment, to make it again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from gleanrl.core.errors import ConfigError
from gleanrl.core.keys import Key
from gleanrl.envs.factory import make_gym
from gleanrl.envs.spaces import Actions
from gleanrl.memory.tensor_files import TensorFile


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


def env_spec(facts: Mapping[str, Any]) -> EnvSpec | None:
    """Return the spec that a card has, if Gymnasium can read it.

    A spec may name any callable, so it must not be made: see `make_env`.
    """
    text = facts.get("env_spec")
    if not isinstance(text, str):
        return None
    with contextlib.suppress(Exception):  # whatever a file written by anyone may hold
        return EnvSpec.from_json(text)
    return None


def make_env(facts: Mapping[str, Any]) -> gym.Env[Any, Any]:
    """Make the environment of a card, which may come from anyone.

    Only its id and its ``kwargs`` are used, of what is registered here.

    Raises:
        ConfigError: it is not registered, or cannot be made.
    """
    name, spec = facts.get("env"), env_spec(facts)
    if not isinstance(name, str) or ":" in name:
        raise ConfigError(f"the card names no registered environment ({name!r:.50})")
    try:
        return make_gym(name, **({} if spec is None else spec.kwargs))
    except Exception as err:
        raise ConfigError(f"{name} cannot be made again: {err}") from err


def decoder(
    space: gym.Space[Any], files: Mapping[Key, TensorFile], rows: int, *, batched: bool = False
) -> Actions | None:
    """Return a decoder of ``rows`` recorded actions of ``space``, numbers or one-hot vectors.

    Returns:
        ``None`` if the entries in ``files`` are no actions of this space.
    """
    for categorical in (True, False):
        with contextlib.suppress(ConfigError):
            actions = Actions(space, rows, categorical, batched=batched)
            if all(f.key in files and files[f.key].shape == f.shape for f in actions.fields):
                return actions
    return None
