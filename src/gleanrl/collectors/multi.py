"""Collectors with several workers, each in a process of its own."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors import workers
from gleanrl.collectors.base import PostHook, PreHook
from gleanrl.collectors.launch import LaunchedCollector
from gleanrl.collectors.legacy import warn_updater
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import (
    InfoKeys,
    check_int,
)
from gleanrl.engine.batches import BatchOptions
from gleanrl.engine.interruptor import Interruptor
from gleanrl.transport.inline import InlineBackend
from gleanrl.transport.process import ProcessBackend
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion

NOT_ARGUMENTS = ("self", "__class__")
"""What `locals` of a constructor holds besides its arguments."""
Device = torch.device | str | int | None
Devices = Device | Sequence[Device]


class MultiCollector(LaunchedCollector):
    """Runs a policy in environments of several worker processes and yields batches.

    ``MultiCollector(..., sync=True)`` makes a `MultiSyncCollector`, ``sync=False`` a
    `MultiAsyncCollector`. Workers write into memory that this process maps too: a batch is a view
    of it, yours until you let go of its last tensor, and it never changes meanwhile.

    A worker has a copy of the policy. It acts with the weights of the last
    `update_policy_weights_` before its rollout began, never with a mixture.
    """

    _sync = True

    def __new__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> MultiCollector:
        """Choose the subclass.

        Raises:
            TypeError: `MultiCollector` itself without ``sync``, or a subclass with the other.
        """
        if cls is MultiCollector:
            if not isinstance(sync, bool):
                raise TypeError(f"MultiCollector needs sync=True or sync=False, not {sync!r}")
            return super().__new__(MultiSyncCollector if sync else MultiAsyncCollector)
        if sync is not None and sync != cls._sync:
            raise TypeError(f"{cls.__name__} has sync={cls._sync}, not {sync!r}")
        return super().__new__(cls)

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        num_workers: int | None = None,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | Sequence[int],
        total_frames: int | None = -1,
        device: Devices = None,
        storing_device: Devices = None,
        env_device: Devices = None,
        policy_device: Devices = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        collector_class: Any = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | None = None,
        exploration_mode: str | None = None,
        reset_when_done: bool = True,
        update_at_each_batch: bool = False,
        preemptive_threshold: float | None = None,
        interruptor: Interruptor | None = None,
        num_threads: int | None = None,
        num_sub_threads: int = 1,
        cat_results: str | int | None = None,
        set_truncated: bool = False,
        use_buffers: bool | None = None,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        replay_buffer_chunk: bool | None = None,
        local_init_rb: bool | None = None,
        trust_policy: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        no_cuda_sync: bool = False,
        auto_register_policy_transforms: bool | None = None,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        track_policy_version: bool | PolicyVersion = False,
        worker_idx: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        track_traj_ids: bool = True,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: str = "padded",
        traj_quota: str | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        compact_obs: bool = False,
        num_envs: int | None = None,
        categorical_action_encoding: bool = True,
        observation_dtype: torch.dtype | None = None,
        info_keys: InfoKeys = (),
        check_finite: bool = False,
        fast: bool = True,
        timeout: float | None = None,
        start_timeout: float = 120.0,
        backend: str | None = None,
        sync: bool | None = None,
    ) -> None:
        """Start the workers; each builds its environments and resets them once.

        Everything a worker needs is sent to it: lambdas, closures and what lives in ``__main__``
        included. `Collector` explains the arguments that are not explained here.

        Args:
            create_env_fn: What each worker collects from: a list with one entry per worker, or one
                for all together with ``num_workers``.
            policy: What acts. Workers get copies.
            num_workers: How many workers; a list of environments tells by its length.
            policy_factory: Called in each worker to make its policy; or a list, one per worker.
                With a ``policy`` beside it, that is where weights are taken from.
            frames_per_batch: Frames of one batch. Synchronous workers share them out;
                asynchronous ones make whole batches each. A list gives every worker its own.
            total_frames: Frames over all workers after which iteration ends.
            device: As for `Collector`; or a list, one per worker. So are the three below.
            storing_device: Where batches are delivered; the CPU if workers differ.
            env_device: Where environments run.
            policy_device: Where policies run.
            create_env_kwargs: Arguments of environments; or a list, one per worker.
            collector_class: Not ours: runs as it is inside each worker.
            max_frames_per_traj: See `Collector`.
            init_random_frames: Frames, over all workers, that are acted at random.
            reset_at_each_iter: See `Collector`.
            postproc: Applied here to every batch.
            split_trajs: See `Collector`.
            exploration_type: See `Collector`.
            exploration_mode: Retired.
            reset_when_done: Only ``True``.
            update_at_each_batch: Send the policy's weights before (synchronous) or after
                (asynchronous) each batch.
            preemptive_threshold: Share of the workers that finish; the others are stopped then, and
                what they did not reach is masked; where it comes to no worker, all are stopped at
                once and make a step each. Synchronous collectors only.
            interruptor: Stops rollouts from outside.
            num_threads: torch threads of this process while workers run; by default those it has,
                less one per worker.
            num_sub_threads: torch threads of each worker.
            cat_results: ``"stack"`` (default): a leading worker dimension. A number: rollouts one
                after another along that dimension (-1: time). Synchronous collectors only.
            set_truncated: See `Collector`.
            use_buffers: Accepted for compatibility; memory is always used again.
            replay_buffer: Anything with ``extend``; batches go there and ``None`` is yielded. Into
                a `ReplayBuffer` of tensors workers write by themselves; it is shared if it was not.
            extend_buffer: ``False`` adds step by step, one element per step and worker.
            replay_buffer_chunk: Retired.
            local_init_rb: Retired.
            trust_policy: See `Collector`.
            compile_policy: See `Collector`.
            cudagraph_policy: See `Collector`.
            no_cuda_sync: Accepted for compatibility; only the copies made here are waited for.
            auto_register_policy_transforms: See `Collector`.
            weight_updater: Retired: a `WeightUpdaterBase`, or what returns one, that sends weights
                in place of the schemes.
            weight_sync_schemes: Per model id; shared memory by default.
            weight_recv_schemes: Models that a collector this one is a worker of may update; see
                `register_scheme_receiver`.
            track_policy_version: Deliver ``"policy_version"``; or the counter to use.
            worker_idx: This collector's index among its parent's workers.
            init_fn: Called first in every worker.
            track_traj_ids: See `Collector`.
            trajs_per_batch: See `Collector`.
            trajs_per_write: See `Collector`.
            traj_format: See `Collector`.
            traj_quota: See `Collector`; over the environments of all workers.
            pre_collect_hook: Called in every worker before each of its rollouts.
            post_collect_hook: Called in every worker with each of its rollouts; or with what it
                stores, where workers write into a buffer. The memory is used again: clone what is
                to be kept. Values may be changed in place; new entries need ``postproc``.
            compact_obs: See `Collector`.
            num_envs: Environments of each worker.
            categorical_action_encoding: See `Collector`.
            observation_dtype: See `Collector`.
            info_keys: See `Collector`.
            check_finite: See `Collector`.
            fast: See `Collector`.
            timeout: Seconds one rollout may take; a worker that takes longer is killed. By default
                a worker is waited for as long as it lives, with a warning every minute.
            start_timeout: Seconds all workers together may take to come up.
            backend: ``"process"``, or ``"inline"``: the same workers in this process.
            sync: Chooses the subclass of `MultiCollector`.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            WorkerError: what a worker raised; it is an instance of its own class as well.
            WorkerDied: a worker's process ended while starting.
            CollectorTimeout: workers did not come up in time.
        """
        given = SimpleNamespace(**{k: v for k, v in locals().items() if k not in NOT_ARGUMENTS})
        super().__init__(pre_collect_hook, post_collect_hook)
        warn_updater(weight_updater)
        functions = workers.env_functions(create_env_fn, num_workers)
        self.num_workers = len(functions)
        self._check(given)
        self._read(given)
        threads = workers.Threads(num_threads, self.num_workers)
        self._threads = weakref.finalize(self, threads.restore)
        make = workers.make_backend_of(
            backend,
            lambda: ProcessBackend(check_int("num_sub_threads", num_sub_threads, least=1)),
            lambda windows: InlineBackend(windows, apart=True),
        )
        self._launch(given, functions, make)


class MultiSyncCollector(MultiCollector):
    """A batch holds one rollout of every worker.

    After `update_policy_weights_` the next batch is made with the new weights by all of them.

    Example:
        >>> from gleanrl.collectors import MultiSyncCollector
        >>> with MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=64, total_frames=128,
        ...                         backend="inline") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    _as_gathered = True

    def _batch_of(self, frames: Sequence[int]) -> int:
        return sum(frames)

    def _gather_with(self) -> None:
        interruptor = self.interruptor
        options = BatchOptions(
            stacked=self._cat is None,
            cat=-1 if self._cat is None else self._cat,
            device=self.storing_device,
            trim=self._enough is not None or interruptor is not None,
        )
        self._budget = self._engine.plan(
            self._limits,
            self._asked,
            options,
            enough=self._enough,
            stopped=bool if interruptor is None else interruptor.collection_stopped,
        )

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        if self._update_each:
            self.update_policy_weights_()
        return super()._gather(feed)


class MultiAsyncCollector(MultiCollector):
    """A batch is one rollout of one worker, delivered as soon as it is there.

    Workers go on while you learn: each has one rollout ahead of it besides the one it is making.
    After `update_policy_weights_` every rollout that begins uses the new weights.

    Example:
        >>> from gleanrl.collectors import MultiAsyncCollector
        >>> with MultiAsyncCollector(["CartPole-v1"] * 2, frames_per_batch=32, total_frames=128,
        ...                          backend="inline") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(32,), (32,), (32,), (32,)]
    """

    _sync = False
    _as_gathered = True

    def _batch_of(self, frames: Sequence[int]) -> int:
        return max(frames)

    def _gather_with(self) -> None:
        options = BatchOptions(device=self.storing_device, single=True)
        self._budget = self._engine.plan(self._limits, self._asked, options)

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        batch = super()._gather(feed)
        if self._update_each:
            self.update_policy_weights_()
        return batch

    def _read_cat(self, cat_results: str | int | None) -> int | None:
        if cat_results not in (None, "stack"):
            raise ConfigError(
                f"cat_results ({cat_results!r}) is for synchronous collectors: here every batch is "
                "the rollout of one worker"
            )
        return None

    def _read_threshold(self, threshold: float | None) -> int | None:
        if super()._read_threshold(threshold) is not None:
            warnings.warn(
                "preemptive_threshold has no effect on an asynchronous collector, where no worker "
                "waits for another",
                UserWarning,
                stacklevel=2,
            )
        return None


class AsyncCollector(MultiAsyncCollector):
    """One worker that collects while the learner learns.

    Example:
        >>> from gleanrl.collectors import AsyncCollector
        >>> with AsyncCollector("CartPole-v1", frames_per_batch=32, total_frames=64) as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(32,), (32,)]
    """

    _as_gathered = True

    def __init__(self, create_env_fn: Any, policy: Any = None, **kwargs: Any) -> None:
        """Start the worker.

        Args:
            create_env_fn: What to collect from.
            policy: What acts.
            **kwargs: See `MultiCollector`; ``num_workers`` is 1.
        """
        if kwargs.get("num_workers") not in (None, 1):
            raise ConfigError(f"num_workers ({kwargs['num_workers']!r}) of an AsyncCollector is 1")
        super().__init__([create_env_fn], policy, **kwargs)
