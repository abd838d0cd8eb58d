"""TorchRL's name and arguments for asynchronous central inference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict.nn import InteractionType

from gleanrl.collectors.multi_collector import MultiAsyncCollector, MultiCollector
from gleanrl.core.errors import ArgumentTypeError, ConfigError
from gleanrl.core.options import FrameLimits, check_int, seconds
from gleanrl.envs.factory import per_env
from gleanrl.parallel.inside_env_worker import MOST_GROUPS

_BACKENDS = (None, "threading", "multiprocessing")
_LEAST_CHUNK = 64


class AsyncBatchedCollector(MultiCollector):
    """A `MultiAsyncCollector` with ``inference="central"`` and TorchRL's arguments.

    Environments step in worker processes, each at its own pace, and a call of the policy acts for
    all that wait for it. A batch holds consecutive steps of the environments that were first, one
    after another: ``("collector", "traj_ids")`` tells trajectories apart.

    A ``policy`` acts in this process, while the collector is iterated: it is the learner's module
    itself. A ``policy_factory`` makes a policy in a process of its own, which collects while the
    learner learns: `update_policy_weights_` sends weights to it.

    Example:
        >>> from gleanrl.collectors import AsyncBatchedCollector
        >>> policy = lambda observation: (observation[..., 2] > 0).long()
        >>> collector = AsyncBatchedCollector(["CartPole-v1"] * 4, policy=policy,
        ...                                   frames_per_batch=64, total_frames=128)
        >>> [tuple(batch.shape) for batch in collector]
        [(64,), (64,)]
        >>> collector.shutdown()
    """

    _sync = False

    def __init__(  # noqa: D417  # ignored arguments share an entry
        self,
        create_env_fn: Sequence[Any],
        *,
        policy: Any = None,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        server_timeout: float | None = None,
        transport: Any = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        env_backend: str | None = None,
        env_exchange: str = "auto",
        envs_per_worker: int = 1,
        transition_chunk_size: int | str = "auto",
        policy_backend: str | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[Any], Any] | None = None,
        exploration_type: InteractionType = InteractionType.RANDOM,
        replay_buffer: Any = None,
        post_collect_hook: Callable[[Any], None] | None = None,
        yield_completed_trajectories: bool = False,
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        verbose: bool = False,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        worker_affinity: Any = None,
        driver_affinity: Any = None,
        server_config: Any = None,
        device_config: Any = None,
        policy_version: int = 0,
        policy_version_key: str | None = "policy_version",
        **options: Any,
    ) -> None:
        """Start the workers.

        Args:
            create_env_fn: A list with an id or a callable per environment.
            policy: The policy, which acts in this process; or
            policy_factory: makes the policy in a process of its own.
            frames_per_batch: Frames of a batch, rounded up to whole chunks.
            total_frames: Frames of all batches; -1 for endless collection.
            max_batch_size: The most environments that a call of the policy acts for.
            min_batch_size: The environments that the policy waits for, ``server_timeout`` seconds
                at most.
            server_timeout: See ``min_batch_size``; 0.01 by default.
            device: The device of the policy.
            envs_per_worker: Environments of each worker process, rounded down to a divisor of
                their number.
            transition_chunk_size: Steps that an environment contributes to a batch at a time; by
                default 64, or its even share of a batch if that is more, but at most a batch.
            reset_at_each_iter: Whether every chunk begins with a reset.
            postproc: Called on every batch.
            exploration_type: How the policy chooses actions.
            replay_buffer: The buffer that receives the batches instead of the user.
            post_collect_hook: Called with every batch.
            yield_completed_trajectories: Deliver whole trajectories, one after another in a batch
                of at least ``frames_per_batch`` frames; or one by one into a ``replay_buffer``.
                There, unfinished trajectories count among ``total_frames``.
            weight_sync: A `WeightSyncScheme` for the model ``weight_sync_model_id``.
            weight_sync_model_id: See ``weight_sync``.
            backend, env_backend, env_exchange, policy_backend, transport, verbose: Ignored.
                Environments are in processes, and data pass through shared memory. The arguments
                ``progress`` and ``logger`` show what happens.
            create_env_kwargs: Arguments of the callables, or of each of them.
            worker_affinity: The processors of each worker process; see `MultiAsyncCollector`.
            driver_affinity: The processors of the process with the policy (``policy_factory``).
            server_config: TorchRL's ``InferenceServerConfig``, in place of the batch sizes.
            device_config: TorchRL's ``InferenceDeviceConfig``, in place of ``device``.
            policy_version: Must be 0, with which versions begin.
            policy_version_key: ``"policy_version"``, or ``None`` for batches without versions.
            **options: Further arguments of `MultiAsyncCollector`.

        Raises:
            TypeError: no policy, or two; or no list of environments.
            ConfigError: an argument is wrong or contradicts another.
        """
        _check(create_env_fn, policy, policy_factory, (backend, env_backend, policy_backend))
        if policy_version != 0 or policy_version_key not in ("policy_version", None):
            raise ConfigError(
                f"policy_version ({policy_version}) must be 0, and policy_version_key "
                f"({policy_version_key!r}) 'policy_version' or None: versions count from 0 under "
                "that key"
            )
        if server_config is not None:
            max_batch_size = server_config.max_batch_size
            min_batch_size = server_config.min_batch_size
            server_timeout = server_config.timeout
        devices: dict[str, Any] = {"device": device}
        if device_config is not None:
            names = ("policy_device", "env_device", "storing_device")
            devices = {name: getattr(device_config, name) for name in names}
        limits = FrameLimits.from_arguments(frames_per_batch, total_frames, None)
        batch = frames = limits.frames_per_batch
        share = max(_LEAST_CHUNK, batch // len(create_env_fn))
        whole = yield_completed_trajectories
        counted = whole and replay_buffer is None  # as they are delivered, not as they are made
        chunk: Any = transition_chunk_size
        if chunk == "auto":
            chunk = share if whole else min(batch, share)
        if whole and chunk is not None:  # trajectories are put together, and not rollouts
            frames, chunk = check_int("transition_chunk_size", chunk, least=1), None
        schemes = None if weight_sync is None else {weight_sync_model_id: weight_sync}
        workers, each = _dealt(create_env_fn, create_env_kwargs, envs_per_worker)
        own = dict(
            policy_factory=policy_factory,
            inference="central",
            policy_process=policy_factory is not None,
            env_groups=each,
            frames_per_batch=frames,
            total_frames=-1 if counted else total_frames,
            transition_chunk_size=chunk,
            worker_affinity=worker_affinity,
            driver_affinity=driver_affinity,
            max_batch_size=max_batch_size,
            min_batch_size=1 if min_batch_size is None else min_batch_size,
            max_wait_s=seconds(
                "server_timeout", 0.01 if server_timeout is None else server_timeout
            ),
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            exploration_type=exploration_type,
            replay_buffer=replay_buffer,
            post_collect_hook=post_collect_hook,
            trajs_per_batch=1 if whole else None,
            traj_format="cat" if whole else "padded",
            weight_sync_schemes=schemes,
            track_policy_version=policy_version_key is not None,
            **devices,
        )
        if taken := own.keys() & options:
            raise ArgumentTypeError(
                f"AsyncBatchedCollector takes no {min(taken)}=, which its other arguments decide; "
                "MultiAsyncCollector with inference='central' takes it"
            )
        super().__init__(workers, policy, **own, **options)
        if counted:
            self.collection.pipeline.least_frames = batch
            most = limits.total_frames
            self.collection.counts.most_whole = math.inf if most is None else most

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_frames`` are reached; count those of whole trajectories."""
        batches, counts = super().iterator(), self.collection.counts
        while counts.whole < counts.most_whole:
            try:
                held = [next(batches)]
            except StopIteration:
                return
            counts.whole += held[0].numel() if counts.most_whole < math.inf else 0
            yield held.pop()  # nothing here keeps the memory of the batch

    def server_stats(self, reset: bool = False) -> dict[str, float]:
        """Return the numbers of calls of the policy and of environments that it acted for.

        Args:
            reset: Whether they count from 0 again.
        """
        calls, rows = self.calls_of_policy(reset)
        return {"batches": calls, "requests": rows, "avg_batch_size": rows / max(1, calls)}


def _check(
    create_env_fn: Any, policy: Any, policy_factory: Any, backends: Sequence[str | None]
) -> None:
    if isinstance(create_env_fn, str) or not isinstance(create_env_fn, Sequence):
        raise ArgumentTypeError(
            f"create_env_fn ({create_env_fn!r:.80}) must be a list with an entry per environment"
        )
    if not create_env_fn:
        raise ConfigError("create_env_fn is empty: give an entry per environment")
    if policy is not None and policy_factory is not None:
        raise ArgumentTypeError("policy and policy_factory are mutually exclusive")
    if policy is None and policy_factory is None:
        raise ArgumentTypeError("policy or policy_factory must be provided")
    for name in backends:
        if name not in _BACKENDS:
            raise ConfigError(
                f"backend ({name!r}) must be 'threading' or 'multiprocessing'; for Ray use "
                "RayCollector"
            )


def _dealt(factories: Sequence[Any], kwargs: Any, most: int) -> tuple[list[list[Any]], int]:
    """Return the environments of each worker, and their number."""
    own = per_env("create_env_kwargs", kwargs or {}, len(factories), "create_env_fn")
    made = [
        partial(one, **given) if given else one for one, given in zip(factories, own, strict=True)
    ]
    each = check_int("envs_per_worker", most, least=1)
    each = max(n for n in range(1, min(each, MOST_GROUPS) + 1) if len(made) % n == 0)
    return [made[first : first + each] for first in range(0, len(made), each)], each


MultiAsyncCollector.register(AsyncBatchedCollector)  # so that isinstance tells
