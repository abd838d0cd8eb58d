"""Collectors whose workers are Ray actors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors import workers
from gleanrl.collectors.base import PostHook, PreHook
from gleanrl.collectors.distributed.nodes import NodesCollector, with_defaults
from gleanrl.collectors.multi import NOT_ARGUMENTS, Devices
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import InfoKeys, check_int
from gleanrl.transport.ray import RayBackend, check_options, require_ray, session
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion


class RayCollector(NodesCollector):
    """Runs a policy in Ray actors, on this machine or on a cluster, and yields batches.

    One actor per entry of ``create_env_fn``, each with a copy of the policy; it serves like a
    worker of a `MultiCollector`. With ``sync=True`` a batch is a stack of one rollout of every
    actor, otherwise the rollout of whichever was first. A rollout is one object in Ray's store. One
    of 256 KB or more that makes a whole batch is handed out where it lies, as memory of yours to
    read and write, for as long as a quarter of the store suffices; others are copied once into
    memory of this process. Weights are one object per update for all actors.

    If this process is not connected to Ray, the collector starts it, or connects to the cluster
    that ``ray_init_config={"address": ...}`` names, and disconnects when it is shut down. Needs
    ``pip install 'gleanrl[ray]'``.

    An actor that dies is named in a `WorkerDied`, with Ray's reason.

    Example::

        collector = RayCollector(
            ["CartPole-v1"] * 4, policy, frames_per_batch=4096, total_frames=1_000_000, num_envs=16
        )
        for batch in collector:
            ...  # learn
            collector.update_policy_weights_()
        collector.shutdown()
    """

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        frames_per_batch: int | Sequence[int],
        total_frames: int | None = -1,
        device: Devices = None,
        storing_device: Devices = None,
        env_device: Devices = None,
        policy_device: Devices = None,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | None = None,
        exploration_mode: str | None = None,
        collector_class: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_workers_per_collector: int = 1,
        sync: bool = False,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        num_collectors: int | None = None,
        update_after_each_batch: bool = False,
        max_weight_update_interval: int | None = -1,
        num_sub_threads: int = 1,
        cat_results: str | int | None = None,
        set_truncated: bool = False,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        use_env_creator: bool = False,
        no_cuda_sync: bool = False,
        trust_policy: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        cudagraph_policy: bool | Mapping[str, Any] | None = None,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        track_policy_version: bool | PolicyVersion = False,
        worker_idx: int | None = None,
        track_traj_ids: bool = True,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: str = "padded",
        traj_quota: str | None = None,
        pre_collect_hook: PreHook | None = None,
        post_collect_hook: PostHook | None = None,
        init_fn: Callable[[], Any] | None = None,
        num_envs: int | None = None,
        categorical_action_encoding: bool = True,
        observation_dtype: torch.dtype | None = None,
        info_keys: InfoKeys = (),
        check_finite: bool = False,
        fast: bool = True,
        compact_obs: bool = False,
        timeout: float | None = None,
        start_timeout: float = 120.0,
        on_failure: str = "raise",
    ) -> None:
        """Create the actors; each builds its environments and resets them once.

        `MultiCollector` and `Collector` explain the arguments that are not explained here.

        Args:
            create_env_fn: What each actor collects from: a list with one entry per actor, or one
                for all together with ``num_collectors``.
            policy: What acts. Actors get copies.
            policy_factory: Called in each actor to make its policy; or a list, one per actor.
            frames_per_batch: Frames of one batch. With ``sync=True`` actors share them out;
                otherwise each makes whole batches. A list gives every actor its own.
            total_frames: Frames over all actors after which iteration ends; -1 for no end.
            device: As for `Collector`; or a list, one per actor. So are the three below.
            storing_device: Where batches are delivered here.
            env_device: Where environments run.
            policy_device: Where policies run.
            create_env_kwargs: Arguments of environments; or a list, one per actor.
            max_frames_per_traj: See `Collector`.
            init_random_frames: Frames, over all actors, that are acted at random.
            reset_at_each_iter: See `Collector`.
            postproc: Applied here to every batch.
            split_trajs: See `Collector`.
            exploration_type: See `Collector`.
            exploration_mode: Retired.
            collector_class: What runs in an actor: ``"single"`` (default), ``"sync"``,
                ``"async"``, or a class.
            collector_kwargs: Further arguments of the actors' collectors; or a list, one each.
            num_workers_per_collector: Workers of an actor's ``"sync"`` or ``"async"`` collector.
            sync: Whether a batch is made of rollouts of all actors.
            ray_init_config: Arguments of `ray.init`, for when this process is not connected to
                Ray; ``{"address": "auto"}`` connects to the cluster of this machine.
            remote_configs: Options of the actors: ``num_cpus`` (1 by default), ``num_gpus``,
                ``resources``, ``scheduling_strategy``, ``runtime_env``, …; or a list, one each.
            num_collectors: How many actors; a list of environments tells by its length.
            update_after_each_batch: Send the policy's weights when the next batch is asked for:
                to all actors, or with ``sync=False`` to the one that the last batch came from.
            max_weight_update_interval: Batches after which an actor gets new weights at the
                latest; -1 for never.
            num_sub_threads: torch threads of each actor.
            cat_results: See `MultiSyncCollector`; for ``sync=True``.
            set_truncated: See `Collector`.
            replay_buffer: Anything with ``extend``, here; batches go there and ``None`` is yielded.
            extend_buffer: ``False`` adds step by step, one element per step and actor.
            use_env_creator: Accepted for compatibility; what builds environments always travels.
            no_cuda_sync: Accepted for compatibility.
            trust_policy: See `Collector`.
            compile_policy: See `Collector`.
            cudagraph_policy: See `Collector`.
            weight_updater: Retired; see `MultiCollector`.
            weight_sync_schemes: Per model id; `RayWeightSyncScheme` by default.
            weight_recv_schemes: See `MultiCollector`.
            track_policy_version: Deliver ``"policy_version"``; or the counter to use.
            worker_idx: This collector's index among its parent's workers.
            track_traj_ids: See `Collector`.
            trajs_per_batch: See `Collector`.
            trajs_per_write: See `Collector`.
            traj_format: See `Collector`.
            traj_quota: See `Collector`.
            pre_collect_hook: Called in every actor before each of its rollouts.
            post_collect_hook: Called in every actor with each of its rollouts; see
                `MultiCollector`.
            init_fn: Called first in every actor.
            num_envs: Environments of each actor.
            categorical_action_encoding: See `Collector`.
            observation_dtype: See `Collector`.
            info_keys: See `Collector`.
            check_finite: See `Collector`.
            fast: See `Collector`.
            compact_obs: See `Collector`.
            timeout: Seconds one rollout may take. By default an actor is waited for as long as
                Ray knows it alive, with a warning every minute.
            start_timeout: Seconds all actors together may take to be scheduled and to build their
                environments.
            on_failure: ``"raise"``, or ``"continue"``: go on with the other actors when one is
                lost, with a warning; what it had not delivered is collected by the others. For
                ``sync=False``.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            ImportError: Ray is not installed.
            WorkerError: what an actor raised; it is an instance of its own class as well.
            WorkerDied: an actor died while starting.
            CollectorTimeout: actors did not come up in time.
        """
        given = with_defaults(**{k: v for k, v in locals().items() if k not in NOT_ARGUMENTS})
        require_ray()
        super().__init__(pre_collect_hook, post_collect_hook)
        given.create_env_fn = _functions(create_env_fn, num_collectors)
        self._start(given)

    def _start(self, given: SimpleNamespace) -> None:
        """Check the arguments and create the actors."""
        self._given = SimpleNamespace(**vars(given))
        functions = self._read_nodes(given)
        options = [
            check_options(config)
            for config in workers.per_worker(
                "remote_configs", given.remote_configs or {}, self.num_workers
            )
        ]
        self._check(given)
        self._read(given)
        threads = workers.Threads(torch.get_num_threads(), self.num_workers)
        self._threads = weakref.finalize(self, threads.restore)
        sub_threads = check_int("num_sub_threads", given.num_sub_threads, least=1)
        self._launch(
            given,
            functions,
            lambda windows: RayBackend(
                windows, init=given.ray_init_config, options=options, threads=sub_threads
            ),
        )
        self._asked_for = False

    # -- actors ----------------------------------------------------------------------------------

    @property
    def remote_collectors(self) -> list[Any]:
        """The handles of the actors; empty after `shutdown`."""
        return self._backend.handles

    @property
    def num_collectors(self) -> int:
        """How many actors there are."""
        return self.num_workers

    @property
    def _backend(self) -> RayBackend:
        backend = self._engine.backend
        assert isinstance(backend, RayBackend)
        return backend

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Start over with more actors, before anything was asked of those there are.

        Later is not possible: trajectory ids are interleaved over all environments, frames shared
        out over all actors.

        Args:
            create_env_fn: What the new actors collect from: a list, or one for all.
            num_envs: How many actors, where one environment is given for all.
            policy: ``None`` or the collector's own: there is one for all actors.
            collector_kwargs: Further arguments of the new actors' collectors; or a list.
            remote_configs: Options of the new actors; or a list.

        Raises:
            RuntimeError: a batch, an update, a seed or a state was asked for already.
            ConfigError: another policy, or what the constructor would not accept.
        """
        given = SimpleNamespace(**vars(self._given))
        if self._asked_for or self._engine.closed:
            raise RuntimeError(
                "add_collectors() comes before the first batch, update, seed or state: workers "
                "share out frames and trajectory ids from then on; make a new collector"
            )
        if policy is not None and policy is not given.policy:
            raise ConfigError("add_collectors: all actors run the collector's own policy")
        new = _functions(create_env_fn, num_envs)
        before = len(given.create_env_fn)
        for name, value in (
            ("collector_kwargs", collector_kwargs),
            ("remote_configs", remote_configs),
        ):
            old = workers.per_worker(name, vars(given)[name] or {}, before)
            vars(given)[name] = [*old, *workers.per_worker(name, value or {}, len(new))]
        given.create_env_fn = [*given.create_env_fn, *new]
        session.enter(self, None)  # so that it does not end in between
        try:
            self.shutdown()
            self._start(given)
        finally:
            session.leave(self, True)

    def _gather(self, feed: bool = True) -> TensorDictBase | None:
        self._asked_for = True
        return super()._gather(feed)

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        self._asked_for = True
        super()._publish(models, worker_ids, version)

    def _restart(self, commands: dict[int, Any]) -> dict[int, Any]:
        self._asked_for = True
        return super()._restart(commands)

    # -- the end ---------------------------------------------------------------------------------

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
        *,
        shutdown_ray: bool = True,
    ) -> None:
        """Kill the actors. Idempotent; batches that were handed out stay valid.

        Args:
            timeout: Seconds it may take; 10 by default.
            close_env: Only ``True``: environments end with their actor.
            raise_on_error: Raise what closing an environment raised.
            shutdown_ray: Disconnect from Ray, where the collector had connected to it and no other
                collector uses it; ``False`` leaves that to you.
        """
        if not shutdown_ray:
            self._backend.ends_ray = False
        super().shutdown(timeout, close_env, raise_on_error)

    def async_shutdown(  # type: ignore[override]  # an awaitable, which can be ignored
        self,
        timeout: float | None = None,
        close_env: bool = True,
        *,
        shutdown_ray: bool = False,
    ) -> Settled:
        """Shut down; may be awaited, though everything has happened when it returns.

        Args:
            timeout: See `shutdown`.
            close_env: See `shutdown`.
            shutdown_ray: See `shutdown`.
        """
        self.shutdown(timeout, close_env, shutdown_ray=shutdown_ray)
        return Settled()

    def stop_remote_collectors(self) -> None:
        """Kill the actors and stay connected to Ray; the same as a `shutdown` that does so."""
        self.shutdown(shutdown_ray=False)


class Settled:
    """Something to await that has happened already."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


def _functions(create_env_fn: Any, count: int | None) -> list[Any]:
    """Return what each actor collects from.

    Raises:
        ConfigError: a number that is not that of the list.
    """
    several = isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str)
    if several and count not in (None, len(create_env_fn)):
        raise ConfigError(
            f"num_collectors ({count!r}) does not match create_env_fn, which lists "
            f"{len(create_env_fn)}"
        )
    count = 1 if count is None else check_int("num_collectors", count, least=1)
    return workers.env_functions(create_env_fn, None if several else count)
