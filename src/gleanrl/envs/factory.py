"""Environments as users name them: an id, its registered spec, or a callable that makes one."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
from torch import nn

from gleanrl.core.errors import ArgumentTypeError, ConfigError, UnknownEnvError, did_you_mean
from gleanrl.envs.libs.pettingzoo import PettingZooEnv, is_pettingzoo_env
from gleanrl.envs.tensordict_envs import is_tensordict_env
from gleanrl.envs.vector import is_vector_env

EnvFactory: TypeAlias = str | gym.envs.registration.EnvSpec | Callable[..., Any]
"""The source of one environment per call: an id, its registered spec, or a callable."""
_PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "HighwayEnv": "highway_env"}
"""Packages whose environments exist only after an import, by namespace."""


def is_built(given: Any) -> bool:
    """Tell whether ``given`` is an environment already."""
    known = isinstance(given, gym.Env) or is_vector_env(given) or is_tensordict_env(given)
    return known or is_pettingzoo_env(given)


def build(given: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return ``given`` if it is built, else the object that it makes with ``kwargs``.

    A callable may also return an id. An environment of PettingZoo's gets TensorDict methods.
    """
    if is_built(given):
        if kwargs:
            raise ConfigError(
                f"arguments {sorted(kwargs)} are for making an environment; a "
                f"{type(given).__name__} was given, which is built already"
            )
        made = given
    elif is_id(given):
        made = make_gym(given, **kwargs)
    elif isinstance(given, nn.Module):
        raise ConfigError(
            f"a {type(given).__name__}, a module of torch's, is given as the environment; "
            "what makes an environment comes first, the policy after it"
        )
    elif callable(given):
        made = given(**kwargs)
        made = make_gym(made) if isinstance(made, str) else made
    else:
        raise ConfigError(
            f"{given!r:.100} is neither an environment id, an environment nor a callable that "
            "returns one"
        )
    return PettingZooEnv(made) if is_pettingzoo_env(made) else made


def is_id(given: Any) -> bool:
    """Tell whether ``given`` names a registered environment."""
    return isinstance(given, (str, gym.envs.registration.EnvSpec))


def per_env(name: str, given: Any, number: int, argument: str = "num_workers") -> list[Any]:
    """Return one entry of ``given`` per environment: its own, or the same for all."""
    if is_id(given) or isinstance(given, Mapping) or callable(given):
        return [given] * number
    if not isinstance(given, Sequence):
        raise ConfigError(f"{name} ({given!r:.100}) must be one entry or one per environment")
    if len(given) != number:
        raise ConfigError(f"{name} has {len(given)} entries for {argument}={number}")
    return list(given)


def check_factories(factories: Sequence[Any]) -> None:
    """Raise an error for objects that cannot make an environment, before making any."""
    for index, factory in enumerate(factories):
        makes = is_id(factory) or callable(factory)
        if not makes or is_tensordict_env(factory) or isinstance(factory, gym.Env):
            raise ConfigError(
                f"create_env_fn for environment {index} is a {type(factory).__name__}; give an id "
                "or a callable that makes a new environment at every call"
            )


_IGNORED = {
    *("allow_step_when_done", "consolidate", "daemon", "memmap", "metadata_from_workers"),
    *("mp_start_method", "non_blocking", "num_sub_threads", "num_threads", "pin_memory"),
    *("policy_proof", "serial_for_single", "share_individual_td", "shared_memory"),
    *("shutdown_timeout", "use_buffers"),
}


def check_ignored(kind: type, arguments: Mapping[str, Any]) -> None:
    """Accept arguments of TorchRL's batched environments that change how data move, not which.

    Processes are always forked from a clean one, data always go through shared memory where they
    fit it, and stepping an environment that has ended is always left to the environment.
    """
    unknown = sorted(arguments.keys() - _IGNORED)
    if unknown:
        close = did_you_mean(unknown[0], [*_IGNORED, *inspect.signature(kind).parameters])
        raise ArgumentTypeError(f"{kind.__name__} takes no {unknown[0]}={close}")


@contextlib.contextmanager
def closed_on_error(made: Sequence[Any]) -> Iterator[None]:
    """If the block raises, close every environment in ``made``, each once."""
    try:
        yield
    except BaseException:
        for env in {id(env): env for env in made}.values():
            # What went wrong first is what the user has to know.
            with contextlib.suppress(Exception):
                env.close()
        raise


# -- registered environments -----------------------------------------------------------------------


def make_gym(given: Any, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make the registered environment of an id or a spec."""
    name: str = given if isinstance(given, str) else given.id
    if isinstance(given, str):
        _import_plugin(name)
    try:
        return gym.make(given, **kwargs)
    except (ImportError, gym.error.DependencyNotInstalled) as err:
        raise ConfigError(_import_message(name, err)) from err
    except gym.error.UnregisteredEnv as err:  # a namespace, name or version that does not exist
        raise UnknownEnvError(_unknown_message(name, err)) from err
    except gym.error.Error as err:
        known = not isinstance(given, str) or given in gym.registry
        raise (ConfigError if known else UnknownEnvError)(
            f"environment {name!r} cannot be made: {err}"
        ) from err


def _import_message(name: str, err: Exception) -> str:
    module, colon, _ = name.partition(":")
    what = "is registered, but cannot be made"
    if colon:
        what = f"needs the module {module!r}, which registers it and cannot be imported"
    cause: BaseException | None = err
    while cause is not None and not (isinstance(cause, ImportError) and cause.name):
        cause = cause.__cause__
    hint = f"; install what provides {cause.name!r}" if isinstance(cause, ImportError) else ""
    return f"environment {name!r} {what}: {err}{hint}"


def _unknown_message(name: str, err: Exception) -> str:
    for plugin in _PLUGINS:
        _import_plugin(f"{plugin}/{name}")  # its environments may be meant
    same = [known for known in gym.registry if known.rpartition("/")[2] == name]
    close = same or difflib.get_close_matches(name, list(gym.registry), n=3, cutoff=0.6)
    hint = (
        "import the package that registers it first, or write 'module:id'; Atari environments are "
        "'ALE/...' and need `pip install ale-py`"
    )
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    elif re.search(r"_v\d+$", name):
        hint = f"a PettingZoo environment is made by gleanrl.envs.PettingZooEnv({name!r})"
    return f"no environment is registered as {name!r}: {hint} ({err})"


def _import_plugin(name: str) -> None:
    """Import the package that registers ``name``: a worker has imported nothing but GleanRL."""
    module = _PLUGINS.get(name.partition("/")[0]) if "/" in name else None
    if module is None or name in gym.registry or importlib.util.find_spec(module) is None:
        return
    gym.register_envs(importlib.import_module(module))
