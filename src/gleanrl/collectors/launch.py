"""How a collector with several workers is set up, from its arguments to its running parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from gleanrl.collectors import checks, legacy, retired, workers
from gleanrl.collectors.filling import FillingFactory, shared_with_workers
from gleanrl.collectors.nested import nested_factory
from gleanrl.collectors.remote import RemoteCollector
from gleanrl.collectors.single import Collector
from gleanrl.collectors.worker import WorkerFactory, WorkerRole
from gleanrl.core.options import (
    EnvOptions,
    FrameBudget,
    PolicyOptions,
    RolloutOptions,
    TrajectoryOptions,
    limit,
    seconds,
)
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.engine import Engine, MakeBackend
from gleanrl.engine.models import WeightSync
from gleanrl.engine.pipeline import Pipeline, make_sink
from gleanrl.rollout.build import Initialised, SourceBuilder


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What one worker has for itself."""

    create_env_fn: Any
    create_env_kwargs: Mapping[str, Any]
    policy_factory: Callable[[], Any] | None
    stream: int
    """What its random streams are made from."""


class LaunchedCollector(RemoteCollector):
    """The steps of the constructor; ``given`` holds its arguments by name."""

    _replaces = False
    """Whether lost workers are replaced."""

    def _check(self, given: SimpleNamespace) -> None:
        """Find contradictions before anything is built."""
        checks.check_multi(given)
        given.weight_updater = legacy.read_updater(given.weight_updater)
        checks.check_trajectories(
            given.track_traj_ids,
            given.split_trajs,
            given.trajs_per_batch,
            False,
            given.set_truncated,
        )
        checks.check_quota(given.traj_quota, given.reset_at_each_iter)
        checks.check_callables(
            postproc=given.postproc,
            init_fn=given.init_fn,
            pre_collect_hook=given.pre_collect_hook,
            post_collect_hook=given.post_collect_hook,
        )
        checks.check_timeout(given.timeout)
        seconds("start_timeout", given.start_timeout)
        checks.check_schemes(given.weight_sync_schemes)
        self.register_scheme_receiver(given.weight_recv_schemes or {})
        retired.check_reset_when_done(given.reset_when_done)
        retired.note_local_init_rb(given.local_init_rb)

    def _read(self, given: SimpleNamespace) -> None:
        """Read what concerns this process."""
        count = self.num_workers
        extend = retired.read_extend_buffer(given.extend_buffer, given.replay_buffer_chunk)
        self._show(vars(given), extend)
        split, whole_ones = bool(given.split_trajs), given.trajs_per_batch is not None
        shaped = split or whole_ones or given.postproc is not None
        checks.check_buffer(
            given.replay_buffer, given.use_buffers, False, extend, shaped, given.compact_obs
        )
        self._devices = workers.Devices.read(
            count,
            device=given.device,
            storing_device=given.storing_device,
            policy_device=given.policy_device,
            env_device=given.env_device,
        )
        self._asked = workers.frames_per_worker(given.frames_per_batch, count, self._sync)
        self._limits = FrameBudget.from_arguments(
            self._batch_of(self._asked), given.total_frames, given.init_random_frames
        )
        self._cat = self._read_cat(given.cat_results)
        self._enough = self._read_threshold(given.preemptive_threshold)
        self._fills = extend and self._workers_fill(given.replay_buffer)
        self._worker_idx = given.worker_idx
        self.exploration_type = retired.read_exploration(
            given.exploration_type, given.exploration_mode
        )
        self.replay_buffer = given.replay_buffer
        self.interruptor = given.interruptor
        self.storing_device = self._devices.storing()
        self.policy_device = self._devices.policies()
        self.env_device = [plan.env for plan in self._devices.plans]
        self._timeout = given.timeout
        self._version = checks.read_version(given.track_policy_version)
        self._update_each = bool(given.update_at_each_batch)
        self._pipeline = Pipeline(
            TrajectoryOptions.from_arguments(
                split,
                given.trajs_per_batch,
                given.traj_format,
                given.trajs_per_write,
                given.replay_buffer,
                given.traj_quota,
            ),
            given.postproc,
            make_sink(given.replay_buffer, extend, self._sync and self._cat is None),
            self.storing_device,
            episodes_end=given.reset_at_each_iter,
        )

    def _factories(self, given: SimpleNamespace, functions: list[Any]) -> list[SourceFactory]:
        """Return what builds each worker's source, there."""
        count = self.num_workers
        given.worker_count = count
        kwargs = workers.env_kwargs(given.create_env_kwargs, count)
        makers = workers.per_worker("policy_factory", given.policy_factory, count)
        # Drawn from torch's generator: a seeded script has seeded workers.
        self._stream = stream = int(torch.randint(1 << 62, ()))
        parts = [
            WorkerParts(functions[worker], kwargs[worker], makers[worker], stream + worker)
            for worker in range(count)
        ]
        return [self._factory(given, worker, part) for worker, part in enumerate(parts)]

    def _factory(self, given: SimpleNamespace, worker: int, own: WorkerParts) -> SourceFactory:
        """Return what builds the source of one worker."""
        builder = self._builder(given, worker, own)
        factory: SourceFactory
        if given.collector_class not in (None, Collector):
            factory = nested_factory(given, builder, self._asked[worker])
        else:
            factory = WorkerFactory(builder, self._role(given, self._asked[worker]))
        if self._fills:
            factory = FillingFactory(factory, self._pipeline)
        if given.init_fn is not None:
            factory = Initialised(given.init_fn, factory)
        return factory

    def _builder(self, given: SimpleNamespace, worker: int, own: WorkerParts) -> SourceBuilder:
        """Return what builds the environments and the policy of one worker."""
        plan = self._devices.plans[worker]
        return SourceBuilder(
            env=EnvOptions(
                create_env_fn=own.create_env_fn,
                create_env_kwargs=own.create_env_kwargs,
                num_envs=given.num_envs,
                categorical=given.categorical_action_encoding,
                observation_dtype=given.observation_dtype,
                info_keys=given.info_keys,
                device=plan.env,
            ),
            policy=PolicyOptions(
                policy=given.policy if own.policy_factory is None else None,
                policy_factory=own.policy_factory,
                trust_policy=given.trust_policy,
                compile_policy=given.compile_policy,
                cudagraph_policy=given.cudagraph_policy,
                device=plan.policy,
                fast=given.fast,
                provide_inputs=given.auto_register_policy_transforms is not False,
            ),
            rollout=self._rollout_options(given, own.stream),
        )

    def _role(self, given: SimpleNamespace, frames: int) -> WorkerRole:
        """Return what a worker's collector is told of this one."""
        return WorkerRole(
            frames_per_batch=frames,
            pre_collect_hook=given.pre_collect_hook,
            post_collect_hook=given.post_collect_hook,
            replay_buffer=self.replay_buffer if self._fills else None,
            learner_extends=self.replay_buffer is not None and not self._fills,
        )

    def _rollout_options(self, given: SimpleNamespace, stream: int) -> RolloutOptions:
        """Return what concerns the rollouts of a worker."""
        return RolloutOptions(
            max_frames_per_traj=limit(given.max_frames_per_traj),
            reset_at_each_iter=given.reset_at_each_iter,
            track_traj_ids=given.track_traj_ids,
            set_truncated=given.set_truncated,
            exploration=self.exploration_type,
            track_policy_version=bool(given.track_policy_version),
            check_finite=given.check_finite,
            mask=given.interruptor is not None or self._enough is not None,
            compact=given.compact_obs,
            stream=stream,
        )

    def _workers_fill(self, replay_buffer: Any) -> bool:
        """Whether workers can write into the buffer themselves."""
        return shared_with_workers(replay_buffer)

    def _launch(self, given: SimpleNamespace, functions: list[Any], make: MakeBackend) -> None:
        """Start the workers and set up everything around them."""
        factories = self._factories(given, functions)
        with self._threads_back():
            self._engine = Engine(make, factories, start_timeout=given.start_timeout)
            with self._starting():
                self._begin(given)

    def _begin(self, given: SimpleNamespace) -> None:
        """Set up memory, weights and counters, now that the workers are up."""
        engine = self._engine
        if self.interruptor is not None:
            self.interruptor.attach(engine.backend.stop_byte)
        self._gather_with()
        self._pipeline.share_out(engine.num_envs)
        self._models = WeightSync(
            engine,
            given.policy,
            made_by_factory=given.policy_factory is not None,
            schemes=given.weight_sync_schemes,
            version=self._version,
            devices=self.policy_device,
            keep=self._replaces,
        )
        self.weight_updater = given.weight_updater

    def _batch_of(self, frames: Sequence[int]) -> int:
        """Return the frames of a batch, given those of each worker."""
        raise NotImplementedError

    def _gather_with(self) -> None:
        """Decide how batches are made."""
        raise NotImplementedError

    def _read_cat(self, cat_results: str | int | None) -> int | None:
        return workers.read_cat(cat_results)

    def _read_threshold(self, threshold: float | None) -> int | None:
        return workers.read_threshold(threshold, self.num_workers)
