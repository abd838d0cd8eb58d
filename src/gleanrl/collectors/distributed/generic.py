"""Collectors over nodes that use torch.distributed, and code shared by all over nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack, cast

from gleanrl.collectors.arguments import (
    Arguments,
    DistributedArguments,
    DistributedSyncArguments,
    RayArguments,
    defaults,
    documents_arguments,
    typed,
)
from gleanrl.collectors.backend_choice import selects
from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.distributed.default_configs import (
    DEFAULT_SLURM_CONF,
    DEFAULT_SLURM_CONF_MAIN,
)
from gleanrl.collectors.in_process_collector import Collector
from gleanrl.collectors.multi_collector import MultiAsyncCollector, MultiSyncCollector
from gleanrl.collectors.nested import serve
from gleanrl.collectors.weight_update import DistributedWeightUpdater
from gleanrl.collectors.worker_plan import WorkerPlan, deal, env_functions
from gleanrl.core.errors import ConfigError
from gleanrl.transport.addresses import TCP_PORT, ports_to_try
from gleanrl.transport.launchers import check_replaces, make_launcher, serve_as_rank
from gleanrl.transport.network import NetworkBackend
from gleanrl.transport.process_group import ProcessGroups

_SHORTEST_BEAT_S = 0.1


class DistributedCollector(BaseCollector):
    """Runs a policy on other machines (or in processes of this one) and yields batches.

    Nodes act with copies of the policy: call `update_policy_weights_` after each optimizer step.

    A launcher starts one node per entry of ``create_env_fn``. Each node connects to this process,
    proves that it knows the secret, and serves like a worker of a `MultiCollector`. With
    ``sync=True`` a batch is a stack of one rollout of every node, otherwise the first
    rollout to arrive. Rollouts and weights travel as flat tensors over ``torch.distributed``.

    `WorkerDied` names a node whose process, host or network goes down: at once if its connection
    ends or its launcher reports it, else after ``heartbeat`` seconds.

    Example:
        >>> from gleanrl.collectors import DistributedCollector
        >>> with DistributedCollector(["CartPole-v1"] * 2, frames_per_batch=64, total_frames=128,
        ...                           sync=True, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    ARGUMENTS: ClassVar[Any] = DistributedArguments
    _sync = False
    """Whether batches are synchronous whatever ``sync`` says."""

    @documents_arguments(DistributedArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[DistributedArguments]
    ) -> None:
        """Start the nodes; each builds its environments and resets them once.

        Args:
            create_env_fn: The environments: a list with one entry per node, or one entry for a
                single node. `Collector` lists the kinds of entries.
            policy: The policy. Nodes get copies.
            **kwargs: See `gleanrl.collectors.arguments.DistributedArguments`.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            WorkerError: an exception of a node; it is an instance of its own class as well.
            WorkerDied: a node ended while starting.
            CollectorTimeout: nodes did not come up in time.
        """
        super().__init__(create_env_fn, policy, kwargs)
        arguments = self._arguments
        arguments["sync"] = arguments["sync"] or self._sync
        if self._sync or arguments["update_interval"] is not None:
            if arguments["max_weight_update_interval"] not in (None, -1):
                raise ConfigError("update_interval is max_weight_update_interval: give one of them")
            arguments["max_weight_update_interval"] = arguments["update_interval"]
            if self._sync and policy is None and arguments["weight_updater"] is None:
                arguments["max_weight_update_interval"] = None  # no weights to send by itself
        if arguments["on_failure"] == "relaunch":
            check_replaces(arguments["launcher"])
        if arguments["launcher"] == "torchrun":
            serve_as_rank(arguments["start_timeout"])  # does not return in ranks that are nodes
        functions = env_functions(create_env_fn, None, default=1)
        plan = plan_nodes(arguments, functions)
        heartbeat = arguments["heartbeat"]
        if heartbeat < _SHORTEST_BEAT_S:
            raise ConfigError(
                f"heartbeat ({heartbeat}) must be at least {_SHORTEST_BEAT_S} seconds"
            )
        plane = ProcessGroups(arguments["backend"], heartbeat)
        launcher = make_launcher(arguments["launcher"], arguments["slurm_kwargs"])
        ports = ports_to_try(arguments["tcp_port"])
        self._start(
            plan,
            lambda windows: NetworkBackend(
                windows,
                launcher,
                plane,
                replaces=plan.relaunches is not None,
                host=arguments["host"],
                ports=ports,
                threads=arguments["num_sub_threads"],
                timeout_s=heartbeat,
                start_timeout=arguments["start_timeout"],
            ),
        )


class DistributedSyncCollector(DistributedCollector):
    """A `DistributedCollector` with ``sync=True`` that sends weights without a call.

    ``sync`` and other arguments that this class decides are a `TypeError`.

    Example:
        >>> from gleanrl.collectors import DistributedSyncCollector
        >>> with DistributedSyncCollector(["CartPole-v1"] * 2, frames_per_batch=64,
        ...                               total_frames=128, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    ARGUMENTS = DistributedSyncArguments
    _sync = True

    @documents_arguments(DistributedSyncArguments, like=DistributedCollector)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[DistributedSyncArguments]
    ) -> None:
        super().__init__(create_env_fn, policy, **cast("DistributedArguments", kwargs))


# -- what collectors over nodes and Ray actors read of their arguments ----------------------------

KINDS: Mapping[str, Any] = {
    "single": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
}
_OF_THE_LEARNER = frozenset(
    {"frames_per_batch", "total_frames", "init_random_frames", "replay_buffer", "sync", "backend"}
)
_USUAL = {**defaults(DistributedArguments), **defaults(RayArguments)}


def plan_nodes(arguments: Arguments, functions: Sequence[Any]) -> WorkerPlan:
    """Return the plan of a collector over nodes or actors, each with environments of its own."""
    kind, each = _read_class(arguments["collector_class"]), arguments["num_workers_per_collector"]
    if kind is Collector and each > 1:
        raise ConfigError(
            f"num_workers_per_collector ({each}) needs nodes with several workers: "
            "pass collector_class='sync' or 'async', or num_envs= for one worker with several "
            "environments"
        )
    dealt = deal("collector_kwargs", arguments["collector_kwargs"], len(functions))
    return WorkerPlan(
        arguments,
        functions,
        sync=arguments["sync"],
        collector_class=None if kind is Collector else kind,
        serve=serve,
        remote=True,
        kwargs=[_read_kwargs(kind, one, arguments) for one in dealt],
    )


def _read_class(collector_class: Any) -> Any:
    if collector_class is None:
        return Collector
    if not isinstance(collector_class, str):
        return collector_class
    if collector_class not in KINDS:
        raise ConfigError(
            f"collector_class ({collector_class!r}) must be a class or one of {sorted(KINDS)}"
        )
    return KINDS[collector_class]


def _read_kwargs(kind: Any, kwargs: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the ``collector_kwargs`` of one node against the collector's own arguments."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"collector_kwargs ({kwargs!r:.100}) must be a mapping, or a list of them"
        )
    if kind in KINDS.values():
        kwargs = typed(kind.ARGUMENTS, kwargs)
    for name, value in kwargs.items():
        if name in _OF_THE_LEARNER:
            raise ConfigError(f"collector_kwargs[{name!r}]: give {name}= to the collector itself")
        above = arguments.get(name)
        if above is not _USUAL.get(name) and above is not value and above != value:
            raise ConfigError(
                f"collector_kwargs[{name!r}] is {value!r:.100}, but {name}= is {above!r:.100}: "
                "say it once"
            )
    return dict(kwargs)


DistributedDataCollector = DistributedCollector
selects(DistributedCollector, "distributed", launcher="mp")
selects(DistributedCollector, "submitit", launcher="submitit")

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DEFAULT_SLURM_CONF_MAIN",
    "TCP_PORT",
    "DistributedCollector",
    "DistributedDataCollector",
    "DistributedSyncCollector",
    "DistributedWeightUpdater",
]
