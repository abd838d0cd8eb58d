"""Collectors over nodes that talk through torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

from gleanrl.collectors.arguments import (
    Arguments,
    DistributedArguments,
    DistributedSyncArguments,
    read,
    shows,
)
from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.compat import DistributedWeightUpdater
from gleanrl.collectors.distributed.default_configs import (
    DEFAULT_SLURM_CONF,
    DEFAULT_SLURM_CONF_MAIN,
    TCP_PORT,
)
from gleanrl.collectors.distributed.nodes import plan_nodes
from gleanrl.collectors.workers import env_functions, launch_workers
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int, seconds
from gleanrl.transport.data_plane import DataPlane
from gleanrl.transport.launchers import Launcher, check_replaces, make_launcher, serve_elsewhere
from gleanrl.transport.network import NetworkBackend
from gleanrl.transport.process_group import ProcessGroups, check_kind

_PORTS = 1 << 16
_MOST_PORTS = 100
_SHORTEST_BEAT_S = 0.1


class DistributedCollector(BaseCollector):
    """Runs a policy on other machines (or in processes of this one) and yields batches.

    A launcher starts one node per entry of ``create_env_fn``. Each connects to this process, shows
    that it knows the secret it was given, and serves like a worker of a `MultiCollector`: with
    ``sync=True`` a batch is a stack of one rollout of every node, otherwise the rollout of
    whichever was first. Rollouts and weights travel as flat tensors over ``torch.distributed``.

    A node whose process, host or network goes down is named in a `WorkerDied`: at once where its
    connection tells or its launcher knows, else after ``heartbeat`` seconds.

    Example:
        >>> from gleanrl.collectors import DistributedCollector
        >>> with DistributedCollector(["CartPole-v1"] * 2, frames_per_batch=64, total_frames=128,
        ...                           sync=True, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    ARGUMENTS: ClassVar[Any] = DistributedArguments
    _can_replace = True
    """Whether nodes can be let in later on."""

    @shows(DistributedArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[DistributedArguments]
    ) -> None:
        """Have the nodes started; each builds its environments and resets them once.

        Args:
            create_env_fn: What each node collects from: a list with one entry per node, or one
                environment for a single node. `Collector` says what an entry can be.
            policy: What acts. Nodes get copies.
            **kwargs: See `gleanrl.collectors.arguments.DistributedArguments`.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            WorkerError: what a node raised; it is an instance of its own class as well.
            WorkerDied: a node ended while starting.
            CollectorTimeout: nodes did not come up in time.
        """
        arguments = read(self.ARGUMENTS, type(self).__name__, kwargs)
        interval = arguments["max_weight_update_interval"]
        if arguments["update_interval"] is not None:
            if interval not in (None, -1):
                raise ConfigError("update_interval is max_weight_update_interval: give one of them")
            interval = check_int("update_interval", arguments["update_interval"], least=1)
        self._start_nodes(
            create_env_fn,
            policy,
            arguments,
            arguments["sync"],
            arguments["update_after_each_batch"],
            interval,
        )

    def _start_nodes(
        self,
        create_env_fn: Any,
        policy: Any,
        arguments: Arguments,
        sync: bool,
        update_after: bool,
        interval: int | None,
    ) -> None:
        """Check the arguments and have the nodes started."""
        if arguments["on_failure"] == "relaunch":
            check_replaces(arguments["launcher"])
        serve_elsewhere(arguments["launcher"], arguments["start_timeout"])
        super().__init__(arguments)
        functions = env_functions(create_env_fn, None, default=1)
        relaunches = check_int("max_relaunches", arguments["max_relaunches"], least=0)
        plan = plan_nodes(
            type(self).__name__,
            create_env_fn,
            policy,
            arguments,
            functions=functions,
            sync=sync,
            update_after=update_after,
            interval=interval,
            relaunches=relaunches if self._can_replace else None,
        )
        check_kind(arguments["backend"])
        if seconds("heartbeat", arguments["heartbeat"]) < _SHORTEST_BEAT_S:
            raise ConfigError(
                f"heartbeat ({arguments['heartbeat']}) must be at least {_SHORTEST_BEAT_S} seconds"
            )
        launcher = make_launcher(arguments["launcher"], arguments["slurm_kwargs"])
        ports = ports_to_try(arguments["tcp_port"])
        threads = check_int("num_sub_threads", arguments["num_sub_threads"], least=1)
        replaces = plan.relaunches is not None
        self._start(
            arguments,
            launch_workers(arguments, plan),
            lambda windows: NetworkBackend(
                windows,
                launcher,
                self._data_plane(arguments, launcher),
                replaces=replaces,
                host=arguments["host"],
                ports=ports,
                threads=threads,
                timeout_s=arguments["heartbeat"],
                start_timeout=arguments["start_timeout"],
            ),
        )

    def _data_plane(self, arguments: Arguments, launcher: Launcher) -> DataPlane:
        """Return what carries data."""
        return ProcessGroups(arguments["backend"])


class DistributedSyncCollector(DistributedCollector):
    """A `DistributedCollector` with ``sync=True`` that sends weights by itself.

    Example:
        >>> from gleanrl.collectors import DistributedSyncCollector
        >>> with DistributedSyncCollector(["CartPole-v1"] * 2, frames_per_batch=64,
        ...                               total_frames=128, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    ARGUMENTS = DistributedSyncArguments

    @shows(DistributedSyncArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[DistributedSyncArguments]
    ) -> None:
        """Have the nodes started.

        Args:
            create_env_fn: See `DistributedCollector`.
            policy: See `DistributedCollector`.
            **kwargs: See `gleanrl.collectors.arguments.DistributedSyncArguments`.

        Raises:
            TypeError: ``sync`` and the like, which this class decides.
            ConfigError: see `DistributedCollector`.
        """
        arguments = read(DistributedSyncArguments, type(self).__name__, kwargs)
        interval = check_int("update_interval", arguments["update_interval"], least=1)
        self._start_nodes(create_env_fn, policy, arguments, True, False, interval)


def ports_to_try(arguments: int | str | None) -> Sequence[int]:
    """Return the port that was asked for; else that in the environment, and those after it.

    Raises:
        ConfigError: no port number.
    """
    wanted = arguments if arguments is not None else os.environ.get("TCP_PORT", TCP_PORT)
    try:
        port = int(wanted)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port < _PORTS:
        raise ConfigError(f"tcp_port ({wanted!r}) must be a port number")
    if arguments is not None or port == 0:
        return (port,)
    return range(port, min(port + _MOST_PORTS, _PORTS))


DistributedDataCollector = DistributedCollector

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DEFAULT_SLURM_CONF_MAIN",
    "TCP_PORT",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedWeightUpdater",
]
