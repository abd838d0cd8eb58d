"""Registered Gymnasium environments: making one from its id, and sending registrations on."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym

from gleanrl.core.errors import ConfigError, UnknownEnvError
from gleanrl.envs.stock import is_stock, stock

_PLUGINS = {"ALE": "ale_py", "MiniGrid": "minigrid", "HighwayEnv": "highway_env"}
"""Packages whose environments exist only once they were imported, by namespace."""


def make_gym(given: str | gym.envs.registration.EnvSpec, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make a registered environment.

    Raises:
        UnknownEnvError: the id is not registered.
        ConfigError: a module it needs is missing, or it cannot be made.
    """
    if isinstance(given, str):
        import_plugin(given)
    name = given if isinstance(given, str) else given.id
    try:
        return gym.make(given, **kwargs)
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as err:
        raise UnknownEnvError(unknown_env_message(name, err)) from err
    except (ImportError, gym.error.DependencyNotInstalled) as err:
        raise ConfigError(_import_message(name, err)) from err
    except gym.error.UnregisteredEnv as err:  # a version that does not exist, say
        raise UnknownEnvError(unknown_env_message(name, err)) from err
    except gym.error.Error as err:
        raise (ConfigError if _is_registered(given) else UnknownEnvError)(
            f"environment {name!r} cannot be made: {err}"
        ) from err


def _is_registered(given: str | gym.envs.registration.EnvSpec) -> bool:
    return not isinstance(given, str) or given in gym.registry


def _import_message(name: str, err: Exception) -> str:
    """Say which module an environment lacks."""
    module = name.partition(":")[0] if ":" in name else None
    what = "is registered, but cannot be made"
    if module is not None:
        what = f"needs the module {module!r}, which registers it and cannot be imported"
    lacking = _missing_module(err)
    hint = f"; install what provides {lacking!r}" if lacking else ""
    return f"environment {name!r} {what}: {err}{hint}"


def _missing_module(err: BaseException | None) -> str | None:
    while err is not None:
        if isinstance(err, ImportError) and err.name:
            return err.name
        err = err.__cause__
    return None


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


# -- sending registrations to other processes ------------------------------------------------------

_IMPORT = uuid.uuid4()


def _this_process() -> tuple[uuid.UUID, int]:
    return _IMPORT, os.getpid()  # a fork has the same module, a node may have the same number


@dataclass(frozen=True, slots=True)
class _NotSent:
    """Stands for an environment whose registration could not be sent to this process."""

    name: str
    reason: str

    def __call__(self, **kwargs: Any) -> Any:
        """Say so.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"environment {self.name!r} is registered in the learner's process, but its "
            f"registration could not be sent to this one ({self.reason}); register it in a module "
            "that can be imported here and import that in create_env_fn, or register it there"
        )


@dataclass(frozen=True, slots=True)
class Registrations:
    """The registered environments of a process, to be registered in another one, too."""

    process: tuple[uuid.UUID, int]
    specs: tuple[tuple[tuple[str, ...], bytes], ...]
    """Ids, and their specs as bytes."""

    def restore(self) -> None:
        """Register here what is not, or differs."""
        if self.process == _this_process():
            return
        for ids, blob in self.specs:
            try:
                specs = cloudpickle.loads(blob)
            except Exception as err:  # a module that does not exist here, for example
                specs = [_not_sent(name, err) for name in ids if name not in gym.registry]
            gym.registry.update({s.id: s for s in specs if gym.registry.get(s.id) != s})


def _not_sent(name: str, err: Exception) -> gym.envs.registration.EnvSpec:
    reason = f"{type(err).__name__}: {err}"
    return gym.envs.registration.EnvSpec(name, entry_point=_NotSent(name, reason))


def registrations(dump: Callable[[Any], bytes]) -> Registrations:
    """Return what is registered in this process.

    Args:
        dump: Pickles by value what other processes cannot import.
    """
    specs = list(gym.registry.values())
    groups = [[spec for spec in specs if isinstance(spec.entry_point, str)]]
    groups += [[spec] for spec in specs if not isinstance(spec.entry_point, str)]
    sent: list[tuple[tuple[str, ...], bytes]] = []
    for group in groups:
        ids = tuple(spec.id for spec in group)
        try:
            sent.append((ids, dump(group)))
        except Exception as err:  # whatever the user's objects do when pickled
            if len(group) > 1:  # once more, one by one
                groups += [[spec] for spec in group]
            else:
                sent.append((ids, dump([_not_sent(ids[0], err)])))
    return Registrations(_this_process(), tuple(sent))
