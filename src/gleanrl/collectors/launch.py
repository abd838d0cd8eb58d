"""The start of a collector: each worker's arguments and the factory of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import gymnasium as gym
import torch
from tensordict.nn import InteractionType

from gleanrl.collectors.arguments import (
    Arguments,
    check,
    check_callables,
    read_exploration,
    read_version,
)
from gleanrl.collectors.episodes import EpisodesPlan
from gleanrl.collectors.nested import nested_factory
from gleanrl.collectors.weight_schedule import Sending
from gleanrl.collectors.weight_update import WeightUpdaterBase, read_updater
from gleanrl.collectors.worker import serve_filling, serve_worker
from gleanrl.core.errors import ArgumentTypeError, ConfigError
from gleanrl.core.options import (
    DevicePlan,
    FrameBudget,
    OwnOptions,
    SourceOptions,
    TrajectoryOptions,
    check_int,
    is_number,
    seconds,
    warn,
)
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.batches import BatchOptions
from gleanrl.engine.pipeline import Pipeline
from gleanrl.engine.sink import Sink, make_sink
from gleanrl.memory.shared import check_memory
from gleanrl.rollout.build import SourceBuilder
from gleanrl.weights.snapshot import PolicyVersion

_ENV_BYTES, _WORKER_BYTES = 5_000, 20_000_000
"""Memory of the smallest environments and their processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """The workers of a collector, and the way from their rollouts to batches."""

    create_env_fn: Any
    """The argument ``create_env_fn``, unchanged."""
    functions: Sequence[Any]
    """Each worker's ``create_env_fn``."""
    policy: Any
    sync: bool = True
    """Whether a batch holds a rollout of every worker."""
    collector_class: Any = None
    """The class of each worker's collector."""
    whole: bool = False
    """Whether each worker runs a whole collector of its class instead of `WorkerCollector`."""
    here: bool = False
    """Whether the only worker is this process, with the user's own objects and streams."""
    remote: bool = False
    """Whether workers share no memory with this process."""
    kwargs: Sequence[Mapping[str, Any]] = ()
    """Remote workers: further arguments of each worker's collector."""
    workers_each: int = 1
    """Remote workers: the workers of each worker's collector, if it has any."""
    sending: Sending | None = None
    """Sends weights without a call, if the user asked for that."""
    tolerant: bool = False
    """Whether collection continues without lost workers."""
    relaunches: int | None = None
    """The number of replacements of each worker; ``None`` without replacements."""
    enough: int | None = None
    """The number of finished workers at which the others stop; ``None`` for all."""
    interruptor: Any = None
    num_threads: int | None = None
    """torch threads of this process while workers run."""

    @property
    def stops(self) -> bool:
        """Whether rollouts may be stopped early."""
        return self.enough is not None or self.interruptor is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A plan and the objects made from it and the arguments, before the start of workers."""

    plan: WorkerPlan
    exploration: InteractionType
    version: PolicyVersion | None
    """The version counter to show."""
    updater: WeightUpdaterBase | None
    factories: Sequence[SourceFactory]
    """Functions that build the source of each worker, in the worker."""
    limits: FrameBudget
    asked: Sequence[int]
    """Per worker, the frames of its rollouts."""
    batches: BatchOptions
    pipeline: Pipeline
    """The pipeline of batches."""
    sink: Sink | None
    """The replay buffer or writer that receives batches instead of the user."""
    fills: bool = False
    """Whether workers write their rollouts into the sink themselves."""
    policy_device: Any
    env_device: Any
    stream: int = 0
    """The first worker's random stream, from which the other streams follow."""


def launch_workers(arguments: Arguments, plan: WorkerPlan) -> Launch:
    """Return the launch for these arguments."""
    count = len(plan.functions)
    check(arguments)
    _check_workers(arguments, plan)
    if not plan.remote:
        envs = arguments["num_envs"]
        envs = 1 if envs is None else check_int("num_envs", envs, least=1)
        check_counts(envs, 0 if plan.here else count)
    names = ("device", "storing_device", "policy_device", "env_device")
    columns = [deal(name, cast("Any", arguments)[name], count) for name in names]
    devices = [DevicePlan.from_arguments(*column) for column in zip(*columns, strict=True)]
    places = {device.storing for device in devices}
    storing = places.pop() if len(places) == 1 else torch.device("cpu")
    frames = arguments["frames_per_batch"]
    asked = frames_per_worker(frames, count, plan.sync)
    if isinstance(frames, Sequence):
        frames = sum(asked) if plan.sync else max(asked)
    cat = read_cat(arguments["cat_results"], plan.sync)
    stacked = plan.sync and cat is None and not plan.here
    sink = make_sink(arguments["replay_buffer"], arguments["extend_buffer"], stacked)
    launch = Launch(
        plan=plan,
        exploration=read_exploration(arguments["exploration_type"], arguments["exploration_mode"]),
        version=read_version(arguments["track_policy_version"]),
        updater=read_updater(arguments["weight_updater"]),
        factories=[],
        limits=FrameBudget.from_arguments(
            frames, arguments["total_frames"], arguments["init_random_frames"]
        ),
        asked=asked,
        batches=BatchOptions(
            stacked=stacked,
            cat=-1 if cat is None else cat,
            device=storing,
            trim=plan.sync and plan.stops and not plan.here,
            single=not plan.sync,
        ),
        pipeline=Pipeline(
            TrajectoryOptions.from_arguments(
                arguments["split_trajs"],
                arguments["trajs_per_batch"],
                arguments["traj_format"],
                arguments["trajs_per_write"],
                arguments["replay_buffer"],
                arguments["traj_quota"],
            ),
            arguments["postproc"],
            sink,
            storing,
            episodes_end=arguments["reset_at_each_iter"],
            same=arguments["return_same_td"],
        ),
        sink=sink,
        fills=sink is not None and not plan.here and sink.by_workers(plan.remote),
        policy_device=[device.policy for device in devices],
        env_device=[device.env for device in devices],
        # Drawn from torch's generator: a seeded script has seeded workers.
        stream=0 if plan.here else int(torch.randint(1 << 62, ())),
    )
    return replace(launch, factories=_factories(arguments, launch))


def check_counts(
    envs: int, workers: int, what: str = "", advice: str = "lower num_envs or num_workers"
) -> None:
    """Refuse numbers of environments and workers for which this machine lacks memory.

    Raises:
        ConfigError: ``envs`` in each of ``workers``, or in this process, need more than there is.
    """
    what = what or f"{envs:,} environments" + f" in each of {workers:,} workers" * bool(workers)
    least = max(1, workers) * envs * _ENV_BYTES + workers * _WORKER_BYTES
    check_memory(least, what, advice, "memory")


def _check_workers(arguments: Arguments, plan: WorkerPlan) -> None:
    """Check for contradictions that only collectors with workers can have."""
    factories = arguments["policy_factory"]
    both = plan.policy is not None and factories is not None
    if both and arguments["weight_updater"] is not None:
        raise ArgumentTypeError(
            "policy and policy_factory exclude each other with a weight_updater; drop it, and "
            "weights are taken from policy"
        )
    if isinstance(factories, Sequence):
        check_callables(**{f"policy_factory[{i}]": f for i, f in enumerate(factories)})
    seconds("start_timeout", arguments["start_timeout"])


# -- a source factory for each ---------------------------------------------------------------------


def _factories(arguments: Arguments, launch: Launch) -> list[SourceFactory]:
    """Return the functions that build each worker's source, in the worker."""
    plan, count = launch.plan, len(launch.plan.functions)
    kwargs = env_kwargs(arguments["create_env_kwargs"], count)
    makers = deal("policy_factory", arguments["policy_factory"], count)
    names = {part.name for part in fields(OwnOptions)}
    factories: list[SourceFactory] = []
    for worker in range(count):
        given = plan.kwargs[worker] if plan.kwargs else {}
        own: dict[str, Any] = {name: {**arguments, **given}[name] for name in names}
        more = env_kwargs(given.get("create_env_kwargs"), 1)[0]
        own["create_env_kwargs"] = {**kwargs[worker], **more}
        options = SourceOptions(
            **own,
            create_env_fn=plan.functions[worker],
            env_device=launch.env_device[worker],
            policy=plan.policy if makers[worker] is None or plan.here else None,
            policy_factory=makers[worker],
            policy_device=launch.policy_device[worker],
            exploration_type=launch.exploration,
            track_policy_version=launch.version is not None,
            mask=plan.stops,
            stream=None if plan.here else launch.stream + worker,
            frames_per_batch=launch.asked[worker],
            replay_buffer=arguments["replay_buffer"] if launch.fills else None,
            learner_extends=arguments["replay_buffer"] is not None and not launch.fills,
        )
        rest = {name: value for name, value in given.items() if name not in names}
        factories.append(_factory(launch, options, rest))
    return factories


def _factory(launch: Launch, options: SourceOptions, rest: Mapping[str, Any]) -> SourceFactory:
    """Return the function that builds the source of one worker.

    Args:
        launch: The launch of all workers.
        options: The settings of this one.
        rest: Arguments that need a collector of its own in the worker.
    """
    kind = launch.plan.collector_class
    if launch.plan.here:
        return SourceBuilder(options)
    factory: SourceFactory
    if isinstance(kind, EpisodesPlan):
        factory = kind.factory(options)
    elif launch.plan.whole or rest:
        factory = nested_factory(launch, options, rest)
    else:
        factory = partial(serve_worker, options)
    if launch.sink is not None and launch.fills:
        factory = partial(serve_filling, factory, launch.pipeline, launch.sink)
    return factory


# -- arguments dealt out ---------------------------------------------------------------------------


def env_functions(
    create_env_fn: Any, num_workers: int | None, default: int | None = None
) -> list[Any]:
    """Return each worker's ``create_env_fn``; one environment serves ``default`` workers."""
    if isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str):
        if not create_env_fn:
            raise ConfigError("create_env_fn is empty: give one environment per worker")
        if num_workers is not None and num_workers != len(create_env_fn):
            warn(
                f"num_workers ({num_workers!r}) is ignored: create_env_fn has an entry for each of "
                f"{len(create_env_fn)} workers"
            )
        _warn_of_copies(list(create_env_fn))
        return list(create_env_fn)
    num_workers = default if num_workers is None else num_workers
    if num_workers is None:
        raise ArgumentTypeError(
            "one create_env_fn for several workers needs num_workers=; or pass a list with one "
            "entry per worker"
        )
    functions = [create_env_fn] * check_int("num_workers", num_workers, least=1)
    _warn_of_copies(functions)
    return functions


def _warn_of_copies(functions: Sequence[Any]) -> None:
    """Warn if several workers are to use one built Gymnasium (vector) environment."""
    built = [env for env in functions if isinstance(env, gym.Env | gym.vector.VectorEnv)]
    if len({id(env) for env in built}) < len(built):
        warn(
            f"create_env_fn is one {built[0]} for several workers: each gets a copy in its present "
            "state, random numbers included; pass an id or a callable that makes one"
        )


def env_functions_of(create_env_fn: Any, num_collectors: int | None) -> list[Any]:
    """Return each worker's ``create_env_fn``; a list must match ``num_collectors``."""
    default = 1 if num_collectors is None else check_int("num_collectors", num_collectors, least=1)
    functions = env_functions(create_env_fn, None, default)
    if num_collectors not in (None, len(functions)):
        raise ConfigError(
            f"num_collectors ({num_collectors}) does not match create_env_fn, which lists "
            f"{len(functions)}"
        )
    return functions


def deal(name: str, value: Any, workers: int) -> list[Any]:
    """Deal ``value`` out: one for all, or a list with one entry per worker."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != workers:
            raise ConfigError(f"{name} has {len(value)} entries for {workers} workers")
        return list(value)
    return [value] * workers


def frames_per_worker(frames_per_batch: Any, workers: int, sync: bool) -> list[int]:
    """Return the frames of each worker per batch.

    Synchronous workers share a number out (rounded up); asynchronous ones collect all of it each.
    A sequence gives each its own.
    """
    if isinstance(frames_per_batch, Sequence) and not isinstance(frames_per_batch, str):
        given = deal("frames_per_batch", list(frames_per_batch), workers)
        return [check_int("frames_per_batch", frames, least=1) for frames in given]
    frames = check_int("frames_per_batch", frames_per_batch, least=1)
    return [-(-frames // workers) if sync else frames] * workers


def read_cat(cat_results: str | int | None, sync: bool) -> int | None:
    """Return the dimension to concatenate along, ``None`` to stack."""
    if cat_results is None or cat_results == "stack":
        return None
    if not sync:
        raise ConfigError(
            f"cat_results ({cat_results!r}) is for synchronous collectors: otherwise every batch "
            "is the rollout of one worker"
        )
    if isinstance(cat_results, str):
        raise ConfigError(f"cat_results ({cat_results!r}) must be 'stack' or a dimension")
    return check_int("cat_results", cat_results)


def read_threshold(threshold: float | None, workers: int, sync: bool) -> int | None:
    """Return the number of finished workers at which the others stop, ``None`` for all."""
    if threshold is None:
        return None
    if not is_number(threshold):
        raise ConfigError(f"preemptive_threshold ({threshold!r}) must be a number in [0, 1]")
    if not 0 <= threshold <= 1:
        raise ConfigError(f"preemptive_threshold ({threshold}) must lie in [0, 1]")
    if threshold < 1 and not sync:
        warn(
            "preemptive_threshold has no effect on an asynchronous collector, where no worker "
            "waits for another"
        )
    return int(workers * threshold) if threshold < 1 and sync else None


def env_kwargs(given: Any, workers: int) -> list[Mapping[str, Any]]:
    """Return each worker's ``create_env_kwargs``."""
    dealt = deal("create_env_kwargs", given, workers)
    for kwargs in dealt:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ConfigError(f"create_env_kwargs ({kwargs!r:.100}) must be a mapping")
    return [dict(kwargs or {}) for kwargs in dealt]
