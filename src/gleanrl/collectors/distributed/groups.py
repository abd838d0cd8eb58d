"""Collectors over nodes that talk through torch.distributed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from gleanrl.collectors import workers
from gleanrl.collectors.base import PostHook, PreHook
from gleanrl.collectors.checks import read_seed
from gleanrl.collectors.distributed.nodes import NodesCollector, with_defaults
from gleanrl.collectors.multi import NOT_ARGUMENTS, Devices
from gleanrl.core.errors import ConfigError
from gleanrl.core.options import InfoKeys, check_int, seconds
from gleanrl.engine.replacing import Replacements
from gleanrl.transport.launchers import Launcher, check_replaces, make_launcher, serve_elsewhere
from gleanrl.transport.network import NetworkBackend, NodeBackend
from gleanrl.transport.process_group import check_kind
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion

_PORT = 10003
_PORTS = 1 << 16
_MOST_PORTS = 100
_SHORTEST_BEAT = 0.1


class DistributedCollector(NodesCollector):
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

    _can_replace = True
    """Whether nodes can be let in later on."""
    _most: int
    _replacements: Replacements | None = None

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
        slurm_kwargs: Mapping[str, Any] | None = None,
        backend: str = "gloo",
        update_after_each_batch: bool = False,
        max_weight_update_interval: int | None = -1,
        update_interval: int | None = None,
        launcher: str | Launcher = "submitit",
        tcp_port: int | str | None = None,
        num_sub_threads: int = 1,
        cat_results: str | int | None = None,
        set_truncated: bool = False,
        replay_buffer: Any = None,
        extend_buffer: bool = True,
        trust_policy: bool | None = None,
        compile_policy: bool | Mapping[str, Any] | None = None,
        weight_updater: Any = None,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None,
        track_policy_version: bool | PolicyVersion = False,
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
        heartbeat: float = 60.0,
        on_failure: str = "raise",
        max_relaunches: int = 3,
        host: str | None = None,
    ) -> None:
        """Have the nodes started; each builds its environments and resets them once.

        `MultiCollector` and `Collector` explain the arguments that are not explained here.

        Args:
            create_env_fn: What each node collects from: a list with one entry per node, or one
                environment for a single node.
            policy: What acts. Nodes get copies.
            policy_factory: Called on each node to make its policy; or a list, one per node.
            frames_per_batch: Frames of one batch. With ``sync=True`` nodes share them out;
                otherwise each makes whole batches. A list gives every node its own.
            total_frames: Frames over all nodes after which iteration ends; -1 for no end.
            device: As for `Collector`; or a list, one per node. So are the three below.
            storing_device: Where batches are delivered here.
            env_device: Where environments run.
            policy_device: Where policies run.
            create_env_kwargs: Arguments of environments; or a list, one per node.
            max_frames_per_traj: See `Collector`.
            init_random_frames: Frames, over all nodes, that are acted at random.
            reset_at_each_iter: See `Collector`.
            postproc: Applied here to every batch.
            split_trajs: See `Collector`.
            exploration_type: See `Collector`.
            exploration_mode: Retired.
            collector_class: What runs on a node: ``"single"`` (default), ``"sync"``, ``"async"``,
                or a class.
            collector_kwargs: Further arguments of the nodes' collectors; or a list, one per node.
            num_workers_per_collector: Workers of a node's ``"sync"`` or ``"async"`` collector.
            sync: Whether a batch is made of rollouts of all nodes.
            slurm_kwargs: Parameters of the jobs, for ``launcher="submitit"``, as
                `submitit.AutoExecutor` takes them; besides ``cluster`` (``"local"`` for processes
                of this machine) and ``folder`` (of logs; by default ``gleanrl_jobs`` here).
            backend: ``"gloo"``, ``"nccl"``, ``"mpi"`` or ``"ucc"``, of torch.distributed.
            update_after_each_batch: Send the policy's weights when the next batch is asked for:
                to all nodes, or with ``sync=False`` to the one that the last batch came from.
            max_weight_update_interval: Batches after which a node gets new weights at the latest;
                -1 for never.
            update_interval: Another name of ``max_weight_update_interval``.
            launcher: ``"mp"``: processes of this machine. ``"submitit"``: Slurm jobs.
                ``"submitit_delayed"``: jobs that `submitit_delayed_launcher` has started.
                ``"torchrun"``: the other ranks of this very job. ``"manual"``: whoever runs the
                commands that are printed.
            tcp_port: The port nodes connect to. By default that in the environment variable
                ``TCP_PORT``, or 10003, or the next one that is free.
            num_sub_threads: torch threads of each node.
            cat_results: See `MultiSyncCollector`; for ``sync=True``.
            set_truncated: See `Collector`.
            replay_buffer: Anything with ``extend``, here; batches go there and ``None`` is yielded.
            extend_buffer: ``False`` adds step by step, one element per step and node.
            trust_policy: See `Collector`.
            compile_policy: See `Collector`.
            weight_updater: Retired; see `MultiCollector`.
            weight_sync_schemes: Per model id; `DistributedWeightSyncScheme` by default.
            weight_recv_schemes: See `MultiCollector`.
            track_policy_version: Deliver ``"policy_version"``; or the counter to use.
            track_traj_ids: See `Collector`.
            trajs_per_batch: See `Collector`.
            trajs_per_write: See `Collector`.
            traj_format: See `Collector`.
            traj_quota: See `Collector`.
            pre_collect_hook: Called in every node before each of its rollouts.
            post_collect_hook: Called in every node with each of its rollouts; see
                `MultiCollector`.
            init_fn: Called first on every node.
            num_envs: Environments of each node.
            categorical_action_encoding: See `Collector`.
            observation_dtype: See `Collector`.
            info_keys: See `Collector`.
            check_finite: See `Collector`.
            fast: See `Collector`.
            compact_obs: See `Collector`.
            timeout: Seconds one rollout may take. By default a node is waited for as long as it
                shows signs of life, with a warning every minute.
            start_timeout: Seconds all nodes together may take to join, time in a queue included;
                and then to build their environments.
            heartbeat: Seconds without a sign of life after which a node, or for a node its
                learner, counts as dead.
            on_failure: What to do when a node is lost: ``"raise"``; ``"continue"``: warn and go on
                with the others, which collect what it had not delivered; or ``"relaunch"``: do
                that, and have the launcher start another in its place, which takes part as soon
                as it is up. The last two are for ``sync=False``; ``"torchrun"`` and
                ``"submitit_delayed"`` cannot start nodes again.
            max_relaunches: Replacements of each node, those that fail included; after as many,
                it is gone on without the node.
            host: Address of this machine to listen on, which nodes can reach; the launcher's
                choice by default (the loopback interface for ``"mp"``).

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            WorkerError: what a node raised; it is an instance of its own class as well.
            WorkerDied: a node ended while starting.
            CollectorTimeout: nodes did not come up in time.
        """
        given = with_defaults(**{k: v for k, v in locals().items() if k not in NOT_ARGUMENTS})
        if update_interval is not None:
            if max_weight_update_interval not in (None, -1):
                raise ConfigError("update_interval is max_weight_update_interval: give one of them")
            given.max_weight_update_interval = check_int(
                "update_interval", update_interval, least=1
            )
        if on_failure == "relaunch":
            check_replaces(launcher)
        serve_elsewhere(launcher, start_timeout)
        super().__init__(pre_collect_hook, post_collect_hook)
        functions = self._read_nodes(given)
        check_kind(backend)
        if seconds("heartbeat", heartbeat) < _SHORTEST_BEAT:
            raise ConfigError(f"heartbeat ({heartbeat}) must be at least {_SHORTEST_BEAT} seconds")
        self._check(given)
        self._read(given)
        threads = workers.Threads(torch.get_num_threads(), self.num_workers)
        self._threads = weakref.finalize(self, threads.restore)
        started = make_launcher(launcher, slurm_kwargs)
        ports = ports_to_try(tcp_port)
        self._launch(
            given,
            functions,
            lambda windows: self._make_backend(
                windows,
                started,
                kind=backend,
                host=host,
                ports=ports,
                threads=check_int("num_sub_threads", num_sub_threads, least=1),
                timeout_s=heartbeat,
                start_timeout=start_timeout,
            ),
        )

    def _make_backend(self, *args: Any, **kwargs: Any) -> NodeBackend[Any]:
        """Return what starts the nodes and carries messages and data."""
        return NetworkBackend(*args, replaces=self._replaces, **kwargs)

    def _read_failure(self, given: SimpleNamespace) -> None:
        self._most = check_int("max_relaunches", given.max_relaunches, least=0)
        self._replaces = self._can_replace and given.on_failure == "relaunch" and not self._sync
        if not self._replaces:
            super()._read_failure(given)
            return
        self._tolerant = True

    def _begin(self, given: SimpleNamespace) -> None:
        super()._begin(given)
        backend = self._engine.backend
        if isinstance(backend, NodeBackend) and self._replaces:
            self._replacements = Replacements(self._engine, backend, self._models, self._most)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed environments, action spaces and random streams, and reset all environments.

        See `BaseCollector.set_seed`. Nodes that take the place of lost ones get seeds that follow
        from these, which no node before had.
        """
        with self._engine.turn(None):
            if self._replacements is not None:
                self._replacements.seeds = self._seeds(read_seed(seed), static_seed)
            return super().set_seed(seed, static_seed)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned; environments restart on fresh resets.

        See `MultiCollector.load_state_dict`.
        """
        with self._engine.turn(None):
            super().load_state_dict(state_dict, strict)
            if self._replacements is not None:  # streams are those of the state now
                self._replacements.seeds = {}


class DistributedSyncCollector(DistributedCollector):
    """A `DistributedCollector` with ``sync=True`` that sends weights by itself.

    Example:
        >>> from gleanrl.collectors import DistributedSyncCollector
        >>> with DistributedSyncCollector(["CartPole-v1"] * 2, frames_per_batch=64,
        ...                               total_frames=128, launcher="mp") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, update_interval: int = 1, **kwargs: Any
    ) -> None:
        """Have the nodes started.

        Args:
            create_env_fn: See `DistributedCollector`.
            policy: See `DistributedCollector`.
            update_interval: Batches after which the policy's weights are sent to all nodes, when
                the next batch is asked for.
            **kwargs: Further arguments of `DistributedCollector`.

        Raises:
            TypeError: an argument that this class decides.
            ConfigError: see `DistributedCollector`.
        """
        decided = {"sync", "update_after_each_batch", "max_weight_update_interval"} & set(kwargs)
        if decided:
            raise TypeError(
                f"DistributedSyncCollector takes no {', '.join(sorted(decided))}; update_interval= "
                "says when weights are sent"
            )
        interval = check_int("update_interval", update_interval, least=1)
        super().__init__(
            create_env_fn, policy, sync=True, max_weight_update_interval=interval, **kwargs
        )


def ports_to_try(given: int | str | None) -> Sequence[int]:
    """Return the port that was asked for; else that in the environment, and those after it.

    Raises:
        ConfigError: no port number.
    """
    wanted = given if given is not None else os.environ.get("TCP_PORT", _PORT)
    try:
        port = int(wanted)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port < _PORTS:
        raise ConfigError(f"tcp_port ({wanted!r}) must be a port number")
    if given is not None or port == 0:
        return (port,)
    return range(port, min(port + _MOST_PORTS, _PORTS))
