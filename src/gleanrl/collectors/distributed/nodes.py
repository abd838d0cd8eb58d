"""What collectors over nodes and Ray actors read of their arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gleanrl.collectors.arguments import Arguments, RayArguments, RPCArguments, defaults
from gleanrl.collectors.collector import Collector
from gleanrl.collectors.episodes import EpisodesPlan
from gleanrl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from gleanrl.collectors.plan import WorkerPlan
from gleanrl.collectors.weights import WeightSchedule
from gleanrl.collectors.workers import deal
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import check_int

KINDS: Mapping[str, Any] = {
    "single": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
}
_OF_THE_LEARNER = frozenset(
    {"frames_per_batch", "total_frames", "init_random_frames", "replay_buffer", "sync", "backend"}
)
_USUAL = {**defaults(RPCArguments), **defaults(RayArguments)}


def plan_nodes(
    owner: str,
    create_env_fn: Any,
    policy: Any,
    arguments: Arguments,
    *,
    functions: Sequence[Any],
    sync: bool,
    update_after: bool,
    interval: int | None,
    relaunches: int | None = None,
) -> WorkerPlan:
    """Return what the workers of a collector over nodes are.

    Args:
        owner: The name of the collector's class, for errors.
        create_env_fn: As it was given.
        policy: The learner's policy.
        arguments: All arguments.
        functions: What each node collects from.
        sync: Whether a batch holds a rollout of every node.
        update_after: Whether nodes whose rollout was delivered get weights.
        interval: Batches after which a node gets weights at the latest; ``None`` or -1 for never.
        relaunches: How often a node is replaced; ``None`` if it cannot be.

    Raises:
        ConfigError: arguments that contradict each other.
    """
    count = len(functions)
    kind = _read_class(arguments["collector_class"])
    workers_each = check_int(
        "num_workers_per_collector", arguments["num_workers_per_collector"], least=1
    )
    if kind is Collector and workers_each > 1:
        raise ConfigError(
            f"num_workers_per_collector ({workers_each}) needs nodes with several workers: "
            "pass collector_class='sync' or 'async', or num_envs= for one worker with several "
            "environments"
        )
    dealt = deal("collector_kwargs", arguments["collector_kwargs"], count)
    kwargs = [_read_kwargs(one, arguments) for one in dealt]
    check_bool("sync", sync)
    check_bool("update_after_each_batch", update_after)
    _check_failure(owner, arguments["on_failure"], sync, relaunches is not None)
    if arguments["on_failure"] != "raise" and arguments["traj_quota"] is not None:
        raise ConfigError(
            f"traj_quota={arguments['traj_quota']!r} needs trajectories of every environment, and "
            f"on_failure={arguments['on_failure']!r} continues without those of lost nodes: "
            "leave one out"
        )
    if interval is not None and interval != -1:
        interval = check_int("max_weight_update_interval", interval, least=1)
    if update_after and policy is None:
        raise ConfigError(
            "update_after_each_batch=True takes weights from the policy, and there is none: "
            "give policy= (beside policy_factory=, if nodes are to make their own)"
        )
    return WorkerPlan(
        create_env_fn=create_env_fn,
        functions=functions,
        policy=policy,
        sync=sync,
        collector_class=kind,
        remote=True,
        kwargs=kwargs,
        workers_each=workers_each,
        sending=WeightSchedule(count, None if interval == -1 else interval, update_after),
        tolerant=arguments["on_failure"] != "raise",
        relaunches=relaunches if arguments["on_failure"] == "relaunch" else None,
        num_threads=torch.get_num_threads(),  # as they are: nodes have their own cores
    )


def _check_failure(owner: str, what: Any, sync: bool, replaces: bool) -> None:
    """Check what is to be done when a node is lost.

    Raises:
        ConfigError: no way to continue, or none for this collector.
    """
    if what not in ("raise", "continue", "relaunch"):
        raise ConfigError(f"on_failure ({what!r}) must be 'raise', 'continue' or 'relaunch'")
    if what != "raise" and sync:
        raise ConfigError(
            f"on_failure={what!r} needs sync=False: a batch of sync=True has a part of every node"
        )
    if what == "relaunch" and not replaces:
        raise ConfigError(
            f"on_failure='relaunch' is for DistributedCollector: {owner} cannot let single nodes "
            "in later; use 'continue'"
        )


def _read_class(collector_class: Any) -> Any:
    if collector_class is None:
        return Collector
    if isinstance(collector_class, EpisodesPlan):
        return collector_class
    if isinstance(collector_class, str):
        if collector_class not in KINDS:
            raise ConfigError(
                f"collector_class ({collector_class!r}) must be a class or one of {sorted(KINDS)}"
            )
        collector_class = KINDS[collector_class]
    if not callable(collector_class):
        raise ConfigError(f"collector_class ({collector_class!r:.100}) must be a class or a name")
    return collector_class


def check_bool(name: str, value: Any) -> bool:
    """Return ``value``.

    Raises:
        ConfigError: it is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} ({value!r}) must be True or False")
    return value


def _read_kwargs(kwargs: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the ``collector_kwargs`` of one node against the collector's own arguments."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise ConfigError(
            f"collector_kwargs ({kwargs!r:.100}) must be a mapping, or a list of them"
        )
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
