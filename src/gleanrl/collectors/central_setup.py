"""Central inference: the policy of the learner acts in the environments of all workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from torch import nn

from gleanrl.collectors.arguments import (
    OF_ASYNC,
    OF_CENTRAL,
    Arguments,
    MultiArguments,
    check_inference,
    defaults,
)
from gleanrl.collectors.nested import serve
from gleanrl.collectors.worker_plan import WorkerPlan, env_kwargs, read_failure
from gleanrl.core.affinity import Processors, read_affinity
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import GymOptions, check_int, read_device, warn
from gleanrl.core.retry_limits import read_retry_limit
from gleanrl.engine.session import CLOSE_TIMEOUT_S
from gleanrl.parallel.env_workers import EnvWorkersPlan
from gleanrl.parallel.inside_env_worker import MOST_GROUPS
from gleanrl.parallel.parallel_env import ParallelEnv
from gleanrl.policies.central_policy_calls import JointPolicy
from gleanrl.rollout.source_builder import SourceBuilder, on_device
from gleanrl.transport.central_inference import CallSizes

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
_INSIDE = (
    "inference",
    "env_groups",
    *OF_ASYNC,
    "create_env_kwargs",
    "num_sub_threads",
    "timeout",
    "start_timeout",
    "on_failure",
    "max_relaunches",
)
"""The arguments of the collector in the process of the policy that others do not pass on."""
_INSIDE_S = 10.0
"""Seconds that the process of the policy has to start and to report late workers."""
_STORING = [part.name for part in fields(GymOptions)]
"""The arguments that the environments get, in workers."""


def read_inference(arguments: Arguments, sync: bool) -> bool:
    """Tell whether inference is central."""
    kind = arguments["inference"]
    of_central = OF_CENTRAL if sync else OF_CENTRAL + OF_ASYNC
    check_inference(arguments, {"workers": (), "central": of_central}[kind])
    if kind == "workers":
        return False
    adds = arguments["replay_buffer"] is not None and not arguments["extend_buffer"]
    if sync and adds and arguments["on_failure"] == "continue":
        raise ConfigError(
            "on_failure='continue' and extend_buffer=False exclude each other with synchronous "
            "central inference: each element has a frame of every environment"
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


def policy_process_plan(
    arguments: Arguments,
    functions: Sequence[Any],
    kind: Callable[..., Any],
    sync: bool,
    affinity: Sequence[Processors] | None,
) -> WorkerPlan:
    """Return the plan of a collector whose one worker has a policy for other workers.

    That worker has a collector of the class ``kind``. Other arguments as in `central_plan`.
    """
    if arguments["interruptor"] is not None:
        raise ConfigError("interruptor needs policy_process=False: it stays in this process")
    inside = {name: arguments[name] for name in _INSIDE}
    # Workers would inherit the processors of the process with the policy.
    inside["worker_affinity"] = affinity or [Processors(os.sched_getaffinity(0))] * len(functions)
    usual = defaults(MultiArguments)
    outside = {name: usual[name] for name in ("create_env_kwargs", "timeout")}
    # First inside, where it is known which of the workers is late.
    outside["start_timeout"] = arguments["start_timeout"] + _INSIDE_S
    outside["cat_results"] = 0 if sync else None  # the one worker's rollout is the batch
    plan = WorkerPlan(
        {**arguments, **outside},
        [list(functions)],
        sync=sync,
        collector_class=partial(kind, policy_process=False, **inside),
        serve=serve,
    )
    if not sync:
        each = len(_members(arguments, functions)[0]) // arguments["env_groups"]
        plan.batches = replace(plan.batches, rollout_envs=each)
    return plan


def driver_processors(arguments: Arguments, process: bool) -> list[Processors] | None:
    """Return the processors of the process with the policy, as a list of one."""
    given = arguments["driver_affinity"]
    if given is not None and not process:
        raise ConfigError("driver_affinity needs a process of its own for the policy")
    return None if given is None else read_affinity("driver_affinity", [given], 1)


def central_plan(
    arguments: Arguments,
    functions: Sequence[Any],
    sync: bool,
    affinity: Sequence[Processors] | None,
) -> WorkerPlan:
    """Return the plan of a collector in this process over environments in workers.

    These are made by the functions of each worker; ``affinity`` has the processors of each. They
    all take the same steps if ``sync``.
    """
    groups, members = arguments["env_groups"], _members(arguments, functions)
    each = len(members[0]) // groups
    count = len(functions)
    restarts = read_retry_limit("max_env_restarts", arguments["max_env_restarts"])
    kwargs = env_kwargs(arguments["create_env_kwargs"], count)
    sharing = EnvWorkersPlan(
        apart=not sync,
        storing=GymOptions(**{name: arguments[name] for name in _STORING}),
        threads=arguments["num_sub_threads"],
        timeout=arguments["timeout"],
        start_timeout=arguments["start_timeout"],
        affinity=affinity,
        on_failure=arguments["on_failure"],
        relaunches=read_failure(arguments),
        needs_all=sync and arguments["on_failure"] == "relaunch",
        restarts=restarts if arguments["on_env_error"] == "restart" else None,
    )
    # Asynchronous ones are groups of one worker each, which go on at their own pace.
    parts = [range(count)] if sync else [range(worker, worker + 1) for worker in range(count)]
    envs = [
        ParallelEnv(
            len(part),
            [env for worker in part for env in members[worker][first : first + each]],
            create_env_kwargs=[kwargs[worker] for worker in part for _ in range(each)],
            num_envs=each * len(part),
            shutdown_timeout=CLOSE_TIMEOUT_S,
            sharing=sharing,
            first_worker=part.start,
        )
        for part in parts
        for first in range(0, each * groups, each)
    ]
    usual = defaults(MultiArguments)
    in_workers = (*_STORING, "num_envs", "create_env_kwargs", "on_env_error")
    dealt = {name: usual[name] for name in in_workers}
    make, policy = arguments["policy_factory"], arguments["policy"]
    acting = policy if make is None else make()  # all groups have one policy
    dealt |= {"policy": acting if policy is None else policy, "policy_factory": None}
    arguments = {**arguments, **dealt}
    acting = on_device(
        acting, read_device("policy_device", arguments["policy_device"] or arguments["device"])
    )
    plan = WorkerPlan(
        arguments,
        envs,
        sync=sync,
        in_process=True,
        central=sharing,
        acting=acting if sync else JointPolicy(acting, arguments["max_batch_size"]),
    )
    plan.starts_with_learners = make is not None and isinstance(policy, nn.Module)
    if sync:
        plan.batches = replace(plan.batches, cat=0)
        return plan
    if each == 1 and arguments["num_envs"] != 1:
        own = (plan.for_worker(part) for part in range(len(envs)))
        plan.factories = [SourceBuilder(replace(options, drop_batch=True)) for options in own]
    if (steps := arguments["transition_chunk_size"]) is not None:
        plan.frames = [steps * each] * len(envs)
        frames = plan.limits.frames_per_batch
        plan.batches = replace(plan.batches, joined=frames // (steps * each))
        plan.pipeline.least_frames = frames if plan.batches.joined > 1 else 0
    return plan


def _members(arguments: Arguments, functions: Sequence[Any]) -> list[list[Any]]:
    """Return the factories of the environments of each worker."""
    number, groups = arguments["num_envs"], arguments["env_groups"]
    if groups > MOST_GROUPS:
        raise ConfigError(f"env_groups ({groups}) must be at most {MOST_GROUPS}")
    members = []
    for create_env_fn in functions:
        if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
            if number is not None:
                raise ConfigError(
                    f"num_envs ({number}) and lists of environments exclude each other"
                )
            members.append(list(create_env_fn))
        else:
            members.append([create_env_fn] * (number or 1))
    counts = set(map(len, members))
    if len(counts) > 1:
        raise ConfigError(f"workers have {sorted(counts)} environments; give each as many")
    if counts.pop() % groups:
        raise ConfigError(
            f"env_groups ({groups}) must divide the environments of each worker ({len(members[0])})"
        )
    return members


def in_whole_rollouts(arguments: Arguments, functions: Sequence[Any]) -> Arguments:
    """Return ``arguments`` with ``frames_per_batch`` rounded up to whole rollouts, if joined.

    A warning tells of that.
    """
    steps = arguments["transition_chunk_size"]
    if steps is None:
        return arguments
    if arguments["compact_obs"]:
        raise ConfigError("compact_obs and transition_chunk_size exclude each other")
    part = steps * (len(_members(arguments, functions)[0]) // arguments["env_groups"])
    frames = check_int("frames_per_batch", arguments["frames_per_batch"], least=1)
    if (missing := -frames % part) and os.environ.get("RL_WARNINGS", "1") != "0":
        warn(
            f"frames_per_batch ({frames}) is not a multiple of the {part} frames of a rollout "
            f"(transition_chunk_size): batches hold {frames + missing} frames"
        )
    return {**arguments, "frames_per_batch": frames + missing}


def call_sizes(arguments: Arguments, functions: Sequence[Any]) -> CallSizes:
    """Return which environments a call of the policy acts for."""
    most, least = arguments["max_batch_size"], arguments["min_batch_size"]
    if most is not None and most < least:
        raise ConfigError(f"min_batch_size ({least}) must be at most max_batch_size ({most})")
    count = sum(map(len, _members(arguments, functions)))
    if count < least:
        raise ConfigError(
            f"min_batch_size ({least}) must be at most the {count} environments of all workers: "
            "every call would wait for max_wait_s seconds"
        )
    return CallSizes(least, most, arguments["max_wait_s"], arguments["max_ahead"])
