"""The start of a collector: each worker's arguments and the factory of its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import torch

from gleanrl.collectors.arguments import Arguments, check, read_exploration
from gleanrl.collectors.inside_worker import serve_filling, serve_worker
from gleanrl.collectors.update_schedule import read_sending
from gleanrl.collectors.weight_update import read_updater
from gleanrl.core.errors import ArgumentTypeError, ConfigError
from gleanrl.core.options import (
    FrameLimits,
    OwnOptions,
    SourceOptions,
    check_int,
    is_number,
    read_device,
    warn,
)
from gleanrl.core.protocols import SourceFactory
from gleanrl.core.retry_limits import read_retry_limit
from gleanrl.engine.batch_delivery import BatchOptions
from gleanrl.engine.buffer_or_recorder import make_sink
from gleanrl.engine.pipeline import Pipeline
from gleanrl.memory.shared import check_memory
from gleanrl.parallel.env_workers import EnvWorkersPlan
from gleanrl.rollout.source_builder import SourceBuilder
from gleanrl.weights.module_weights import PolicyVersion

Serve: TypeAlias = "Callable[[WorkerPlan, SourceOptions, Mapping[str, Any]], SourceFactory]"
_OWN = {part.name for part in fields(OwnOptions)}
_ENV_BYTES, _WORKER_BYTES = 5_000, 20_000_000
"""Memory of the smallest environments and their processes."""


class WorkerPlan:
    """The arguments of a collector, read and dealt out to its workers, before these start."""

    starts_with_learners = False
    """Whether a policy that a factory made in this process starts with the learner's weights."""

    def __init__(
        self,
        arguments: Arguments,
        functions: Sequence[Any],
        *,
        sync: bool = True,
        collector_class: Any = None,
        serve: Serve | None = None,
        in_process: bool = False,
        central: EnvWorkersPlan | None = None,
        acting: Any = None,
        remote: bool = False,
        kwargs: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Read and check the arguments.

        Args:
            arguments: The result of `read`, with ``create_env_fn`` and ``policy``.
            functions: Each worker's ``create_env_fn``.
            sync: Whether a batch holds a rollout of every worker.
            collector_class: The class of the whole collector in each worker, ``None`` for none.
            serve: Returns the function that builds the source of a worker with a whole collector,
                of this plan, the worker's settings, and the arguments of that collector alone.
            in_process: Whether workers are in this process, with the user's own objects.
            central: The processes of the environments, of which these workers are groups.
            acting: The policy that acts in them, if that is not the user's own object.
            remote: Whether workers share no memory with this process.
            kwargs: Further arguments of each worker's collector.
        """
        count = len(functions)
        check(arguments)
        self.arguments, self.policy = arguments, arguments["policy"]
        self.functions, self.collector_class, self._serve = functions, collector_class, serve
        self.sync, self.in_process, self.remote = sync, in_process, remote
        self.central, self.acting = central, self.policy if acting is None else acting
        self._kwargs = kwargs or [{}] * count
        if not remote:
            check_counts(arguments["num_envs"] or 1, 0 if in_process else count)
        self.interruptor = arguments["interruptor"]
        self.enough = read_threshold(arguments["preemptive_threshold"], count, sync)
        self.relaunches = None if central else read_failure(arguments)
        """The number of replacements of each worker, and in how many seconds (``None`` for all);
        ``None`` without replacements."""
        self.tolerant = arguments["on_failure"] != "raise" and not (central and sync)
        """Whether collection continues when workers are lost."""
        self.blanks = sync and arguments["on_failure"] == "continue"
        """Whether batches may lack the rollouts of lost workers."""
        self.stops = self.enough is not None or self.interruptor is not None or self.blanks
        """Whether rollouts may be shorter than asked for."""
        self.masks = (
            self.stops
            or arguments["on_env_error"] == "restart"
            or (central is not None and bool(central.only_rows))
        )
        """Whether frames may be none of the environment's transitions."""
        self.sending = read_sending(arguments, count, sync)
        self.exploration = read_exploration(
            arguments["exploration_type"], arguments["exploration_mode"]
        )
        self.max_lag = arguments["max_lag"]
        track = arguments["track_policy_version"]
        self.version = PolicyVersion() if track is True else track or None
        self.updater = read_updater(arguments["weight_updater"])
        self._read_devices()
        self._read_batches()
        # Drawn from torch's generator: a seeded script has seeded workers.
        self.stream = 0 if in_process else int(torch.randint(1 << 62, ()))
        """The first worker's random stream, from which the other streams follow."""
        self._env_kwargs = env_kwargs(arguments["create_env_kwargs"], count)
        self._makers = deal("policy_factory", arguments["policy_factory"], count)
        self.factories = [self._factory(worker) for worker in range(count)]
        """Functions that build the source of each worker, in the worker."""

    def _read_devices(self) -> None:
        def each(name: str) -> list[torch.device | None]:
            dealt = deal(name, self.arguments[name], len(self.functions))
            return [read_device(name, device) for device in dealt]

        default = each("device")
        storing, policies, envs = (
            [own or usual for own, usual in zip(each(name), default, strict=True)]
            for name in ("storing_device", "policy_device", "env_device")
        )
        self.policy_device: Any = policies
        self.env_device: Any = envs
        columns = zip(storing, policies, envs, strict=True)
        places = {at or (policy if policy == env else None) for at, policy, env in columns}
        self.storing_device = places.pop() if len(places) == 1 else torch.device("cpu")

    def _read_batches(self) -> None:
        arguments, sync = self.arguments, self.sync
        frames, count = arguments["frames_per_batch"], len(self.functions)
        if isinstance(frames, Sequence) and not isinstance(frames, str):  # each worker has its own
            given = deal("frames_per_batch", list(frames), count)
            self.frames = [check_int("frames_per_batch", one, least=1) for one in given]
            frames = sum(self.frames) if sync else max(self.frames)
        else:  # synchronous workers share a number out; asynchronous ones collect all of it each
            frames = check_int("frames_per_batch", frames, least=1)
            self.frames = [-(-frames // count) if sync else frames] * count
        """Per worker, the frames of its rollouts."""
        self.limits = FrameLimits.from_arguments(
            frames, arguments["total_frames"], arguments["init_random_frames"]
        )
        cat = read_cat(arguments["cat_results"], sync)
        self.batches = BatchOptions(
            stacked=sync and cat is None and not self.in_process,
            cat=-1 if cat is None else cat,
            device=self.storing_device,
            trim=sync and self.stops and not self.in_process,
            single=not sync,
        )
        self.sink = make_sink(arguments, self.batches.stacked, sync)
        """The replay buffer or writer that receives batches instead of the user."""
        self.fills = (
            self.sink is not None and not self.in_process and self.sink.by_workers(self.remote)
        )
        """Whether workers write their rollouts into the sink themselves."""
        if self.fills and self.max_lag is not None:
            raise ConfigError(
                f"max_lag ({self.max_lag}) discards batches, but workers write into this buffer "
                "before the learner sees their batches: drop max_lag"
            )
        self.pipeline = Pipeline(arguments, self.sink, self.storing_device)

    # -- what each worker gets ---------------------------------------------------------------------

    def for_worker(self, worker: int) -> SourceOptions:
        """Return the settings of ``worker``, which travel to it."""
        own = {**self.arguments, **self._kwargs[worker]}
        more = env_kwargs(self._kwargs[worker].get("create_env_kwargs"), 1)[0]
        own["create_env_kwargs"] = {**self._env_kwargs[worker], **more}
        maker, buffer = self._makers[worker], self.arguments["replay_buffer"]
        return SourceOptions(
            **{name: own[name] for name in _OWN},
            create_env_fn=self.functions[worker],
            env_device=self.env_device[worker],
            policy=self.acting if maker is None or self.in_process else None,
            policy_factory=maker,
            policy_device=self.policy_device[worker],
            exploration_type=self.exploration,
            track_policy_version=self.version is not None,
            mask=self.masks,
            stream=None if self.in_process else self.stream + worker,
            frames_per_batch=self.frames[worker],
            random_frames=self.limits.init_random_frames > 0,
            replay_buffer=buffer if self.fills else None,
            learner_extends=buffer is not None and not self.fills,
            device_rows=self.in_process and self.central is None,
            storing_device=self.storing_device,
        )

    def _factory(self, worker: int) -> SourceFactory:
        options, given = self.for_worker(worker), self._kwargs[worker]
        if self.in_process:
            return SourceBuilder(options)
        whole = self.collector_class is not None or not _OWN.issuperset(given)
        factory: SourceFactory = partial(serve_worker, options)
        if whole and self._serve is not None:
            factory = self._serve(self, options, given)
        if self.sink is not None and self.fills:
            factory = partial(serve_filling, factory, self.pipeline, self.sink)
        return factory


def check_counts(
    envs: int, workers: int, what: str = "", advice: str = "lower num_envs or num_workers"
) -> None:
    """Refuse ``envs`` in each of ``workers``, or in this process, for which memory is lacking."""
    what = what or f"{envs:,} environments" + f" in each of {workers:,} workers" * bool(workers)
    least = max(1, workers) * envs * _ENV_BYTES + workers * _WORKER_BYTES
    check_memory(least, what, advice, "memory")


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
        functions = list(create_env_fn)
    else:
        num_workers = default if num_workers is None else num_workers
        if num_workers is None:
            raise ArgumentTypeError(
                "one create_env_fn for several workers needs num_workers=; or pass a list with one "
                "entry per worker"
            )
        functions = [create_env_fn] * check_int("num_workers", num_workers, least=1)
    built = [env for env in functions if isinstance(env, gym.Env | gym.vector.VectorEnv)]
    if len({id(env) for env in built}) < len(built):
        warn(
            f"create_env_fn is one {built[0]} for several workers: each gets a copy in its present "
            "state, random numbers included; pass an id or a callable that makes one"
        )
    return functions


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
    if not (is_number(threshold) and 0 <= threshold <= 1):
        raise ConfigError(f"preemptive_threshold ({threshold!r}) must be a number in [0, 1]")
    if threshold < 1 and not sync:
        warn(
            "preemptive_threshold has no effect on an asynchronous collector, where no worker "
            "waits for another"
        )
    return int(workers * threshold) if threshold < 1 and sync else None


def read_failure(arguments: Arguments) -> tuple[int, float | None] | None:
    """Return how many replacements each worker may have, and in how many seconds.

    ``None`` stands for no replacements, or for all time.
    """
    what, quota = arguments["on_failure"], arguments["traj_quota"]
    if what != "raise" and quota is not None:
        raise ConfigError(
            f"traj_quota={quota!r} needs trajectories of every environment, and on_failure="
            f"{what!r} continues without those of lost workers: leave one out"
        )
    allowed = read_retry_limit("max_relaunches", arguments["max_relaunches"])
    return allowed if what == "relaunch" else None


def env_kwargs(given: Any, workers: int) -> list[Mapping[str, Any]]:
    """Return each worker's ``create_env_kwargs``."""
    dealt = deal("create_env_kwargs", given, workers)
    for kwargs in dealt:
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ConfigError(f"create_env_kwargs ({kwargs!r:.100}) must be a mapping")
    return [dict(kwargs or {}) for kwargs in dealt]
