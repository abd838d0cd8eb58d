"""This process's connection to Ray, and what actors may be asked for."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gleanrl.core.errors import ConfigError

_OURS = ("concurrency_groups", "lifetime", "max_concurrency", "max_restarts", "max_task_retries")
"""Options of an actor that a worker depends on."""


def require_ray() -> Any:
    """Return the ``ray`` module.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as err:
        raise ImportError(
            f"collecting with Ray needs the package ray, which cannot be imported here ({err}); "
            "pip install 'gleanrl[ray]'"
        ) from err


class Session:
    """Who uses the Ray that was started for collectors, so that the last one ends it."""

    def __init__(self) -> None:
        """Start without users."""
        self._lock = threading.Lock()
        self._users: set[int] = set()
        self._node: str | None = None
        """What tells the Ray that was started here from one that somebody starts later."""

    def enter(self, user: object, config: Mapping[str, Any] | None) -> None:
        """Connect to Ray unless this process is connected; ``config`` are arguments for that."""
        ray = require_ray()
        with self._lock:
            if not ray.is_initialized():
                self._users.clear()
                ray.init(**(config or {}))
                self._node = ray.get_runtime_context().get_node_id()
            elif config:
                warnings.warn(
                    f"ray_init_config ({dict(config)}) has no effect: this process is connected "
                    "to Ray already",
                    UserWarning,
                    stacklevel=2,
                )
            if self._node is not None:
                self._users.add(id(user))

    def leave(self, user: object, end: bool) -> None:
        """Disconnect if ``user`` was the last; ``end=False`` leaves that to somebody else."""
        with self._lock:
            if id(user) not in self._users:
                return
            self._users.discard(id(user))
            if not end:
                self._node = None  # it is the user's from here on
                self._users.clear()
            elif not self._users:
                node, self._node = self._node, None
                ray = require_ray()
                if ray.is_initialized() and ray.get_runtime_context().get_node_id() == node:
                    ray.shutdown()


session = Session()
"""That of this process."""


def store_capacity() -> int:
    """Return how many bytes Ray's object store on this machine holds; 0 if that is not known."""
    ray = require_ray()
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["NodeID"] == here]
    return int(sum(node["Resources"].get("object_store_memory", 0) for node in nodes))


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an actor, one CPU by default.

    Raises:
        ConfigError: no mapping, or options that are not the user's to choose.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"remote_configs ({options!r:.100}) must be a mapping or a list of them")
    found = sorted(set(options) & set(_OURS))
    if found:
        raise ConfigError(
            f"remote_configs sets {found}, which collection depends on; it may set resources, "
            "runtime_env, scheduling_strategy and the like"
        )
    return {"num_cpus": 1, **options}


def check_room(options: Sequence[Mapping[str, Any]]) -> None:
    """Tell why actors with ``options`` will not come up soon, if that can be told."""
    there = require_ray().cluster_resources()
    for option, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU")):
        asked = sum(float(own.get(option) or 0) for own in options)
        if asked > there.get(resource, 0.0):
            warnings.warn(
                f"{len(options)} actors ask for {asked:g} {resource}, the Ray cluster has "
                f"{there.get(resource, 0.0):g}: those that do not fit wait for more; lower "
                f"{option} in remote_configs (0 is allowed)",
                UserWarning,
                stacklevel=2,
            )
