"""Central inference: the policy of the learner acts in the environments of all workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from gleanrl.collectors.arguments import Arguments, MultiArguments, defaults
from gleanrl.collectors.worker_plan import WorkerPlan, env_kwargs
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import GymOptions, check_int
from gleanrl.envs.parallel_worker import MOST_GROUPS
from gleanrl.parallel.env_workers import EnvWorkersPlan
from gleanrl.parallel.parallel_env import ParallelEnv

_WHY_NOT: Mapping[str, str] = {
    "collector_class": "workers have no collector of their own",
    "preemptive_threshold": "all environments take the same steps",
    "cat_results": "all environments are one batch already",
    "init_fn": "workers only step environments: call it in create_env_fn",
    "worker_idx": "the policy is in the learner's process",
    "backend": "workers are processes",
}
"""Arguments that make no sense with central inference, and the reason."""
_OF_ONE = (
    "frames_per_batch",
    "policy_factory",
    "device",
    "storing_device",
    "env_device",
    "policy_device",
)
_STORING = [part.name for part in fields(GymOptions)]
"""The arguments that the environments get, in workers."""


def read_inference(arguments: Arguments, sync: bool) -> bool:
    """Tell whether inference is central.

    Raises:
        ConfigError: no such kind, or arguments that it excludes.
        NotImplementedError: it is asynchronous.
    """
    kind = arguments["inference"]
    if kind not in ("workers", "central"):
        raise ConfigError(f"inference ({kind!r}) must be 'workers' or 'central'")
    if kind == "workers":
        return False
    if not sync:
        raise NotImplementedError(
            "inference='central' is synchronous in this version: use MultiSyncCollector, or "
            "Collector(num_collectors=..., sync=True)"
        )
    for name, why in _excluded(arguments):
        raise ConfigError(
            f"{name} ({arguments[name]!r:.80}) and inference='central' exclude each other: {why}"
        )
    return True


def _excluded(arguments: Arguments) -> Iterator[tuple[str, str]]:
    usual = defaults(MultiArguments)
    for name, why in _WHY_NOT.items():
        allowed = (usual[name], *(("process", "multiprocessing") if name == "backend" else ()))
        if arguments[name] not in allowed:
            yield name, why
    for name in _OF_ONE:
        if isinstance(arguments[name], Sequence) and not isinstance(arguments[name], str):
            yield name, "there is one policy and one batch, so give one value for all"


def central_plan(arguments: Arguments, functions: Sequence[Any]) -> WorkerPlan:
    """Return the plan of a collector in this process over environments in workers.

    Args:
        arguments: Those of the collector.
        functions: Each worker's ``create_env_fn``.

    Raises:
        ConfigError: the environments of a worker cannot be dealt out to the groups.
    """
    given, groups = arguments["num_envs"], check_int("env_groups", arguments["env_groups"], least=1)
    if groups > MOST_GROUPS:
        raise ConfigError(f"env_groups ({groups}) must be at most {MOST_GROUPS}")
    each, uneven = divmod(1 if given is None else check_int("num_envs", given, least=1), groups)
    if uneven:
        raise ConfigError(
            f"env_groups ({groups}) must divide the environments of each worker (num_envs={given})"
        )
    kwargs = env_kwargs(arguments["create_env_kwargs"], len(functions))
    sharing = EnvWorkersPlan(
        storing=GymOptions(**{name: arguments[name] for name in _STORING}),
        threads=check_int("num_sub_threads", arguments["num_sub_threads"], least=1),
        timeout=arguments["timeout"],
        start_timeout=arguments["start_timeout"],
    )
    envs = [
        ParallelEnv(
            len(functions),
            [function for function in functions for _ in range(each)],
            create_env_kwargs=[own for own in kwargs for _ in range(each)],
            num_envs=each * len(functions),
            sharing=sharing,
        )
        for _ in range(groups)
    ]
    usual = defaults(MultiArguments)
    dealt = {name: usual[name] for name in (*_STORING, "num_envs", "create_env_kwargs")}
    make = arguments["policy_factory"]
    if make is not None:  # all groups have one policy
        dealt |= {"policy": make(), "policy_factory": None}
    plan = WorkerPlan({**arguments, **dealt}, envs, in_process=True, central=True)
    plan.batches = replace(plan.batches, cat=0)
    return plan
