"""The in-process collector."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from gleanrl.collectors import checks, front_door, legacy, retired
from gleanrl.collectors.base import PostHook, PreHook
from gleanrl.collectors.running import RunningCollector
from gleanrl.collectors.settings import Setting
from gleanrl.core import messages as m
from gleanrl.core.options import (
    DevicePlan,
    EnvOptions,
    FrameBudget,
    InfoKeys,
    PolicyOptions,
    RolloutOptions,
    TrajectoryOptions,
    limit,
)
from gleanrl.engine.batches import BatchOptions
from gleanrl.engine.engine import Engine
from gleanrl.engine.interruptor import stop_byte
from gleanrl.engine.models import Models
from gleanrl.engine.pipeline import Pipeline, make_sink
from gleanrl.rollout.build import SourceBuilder
from gleanrl.transport.inline import InlineBackend
from gleanrl.weights.scheme import WeightSyncScheme
from gleanrl.weights.snapshot import PolicyVersion

Device = torch.device | str | int | None


class Collector(RunningCollector):
    """Runs a policy in environments, in this process, and yields batches of what happened.

    Each batch is a `TensorDict` of shape ``[T]`` for one environment or ``[n, T]`` for several, its
    last dimension named ``"time"``. Every environment makes exactly one real transition per step:
    ``("next", "observation")`` is the true final observation where an episode ends, and the root
    observation that follows is that of the reset.

    A batch is yours: it never changes after it was handed over. Its memory is used again once you
    have let go of its last tensor.

    Example:
        >>> from gleanrl.collectors import Collector
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=32, total_frames=64) as data:
        ...     [tuple(batch.shape) for batch in data]
        [(2, 16), (2, 16)]
    """

    _as_gathered = True
    return_same_td = Setting("Whether the same `TensorDict` is delivered each time.")

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int | None = -1,
        device: Device = None,
        storing_device: Device = None,
        policy_device: Device = None,
        env_device: Device = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        exploration_type: InteractionType | None = None,
        exploration_mode: str | None = None,
        return_same_td: bool = False,
        reset_when_done: bool = True,
        interruptor: Any = None,
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
        backend: str | None = None,
        num_collectors: int | None = None,
        sync: bool | None = None,
        backend_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Build the environments, reset each once and look at the policy's first answer.

        Args:
            create_env_fn: What to collect from: a Gymnasium id, a `gymnasium.Env`, a
                `gymnasium.vector.VectorEnv`, an environment with TensorDict methods, a callable
                returning one of these, or a sequence of ids or callables (one batch ``[n, T]``).
            policy: What acts: a TensorDict module, an `nn.Module` or a callable on tensors or
                TensorDicts; ``None`` acts at random.
            policy_factory: A callable that returns the policy, instead of ``policy``.
            frames_per_batch: Frames of one batch, over all environments; rounded up to whole steps.
            total_frames: Frames after which iteration ends, rounded up to whole batches; ``-1`` or
                ``None`` for endless collection.
            device: Fills in whichever of the three below is not given.
            storing_device: Where batches are delivered.
            policy_device: Where the policy runs; a copy is made if it lives elsewhere.
            env_device: Where the environment runs.
            create_env_kwargs: Arguments for ``create_env_fn`` or for `gymnasium.make`.
            max_frames_per_traj: Truncate and reset an episode after this many steps; zero, negative
                or ``None`` for no limit. Adds ``"step_count"``.
            init_random_frames: Act at random, without calling the policy, for this many frames
                (rounded up to whole batches). What else the policy writes is zero in them.
            reset_at_each_iter: Reset all environments before each batch.
            postproc: Applied to each batch, after ``split_trajs``.
            split_trajs: Deliver one padded row per trajectory with a mask.
            exploration_type: How a probabilistic policy acts; RANDOM by default.
            exploration_mode: Retired spelling of ``exploration_type``.
            return_same_td: Deliver the same `TensorDict` each time, overwritten by the next batch.
            reset_when_done: Retired; environments that end are always reset.
            interruptor: An `Interruptor` that can end rollouts early.
            set_truncated: Mark the last step of every batch as truncated.
            use_buffers: Accepted; memory is always preallocated.
            replay_buffer: Anything with ``extend`` (and ``add``): batches go there instead, and
                iteration yields ``None``.
            extend_buffer: Store whole batches; ``False`` stores step by step with ``add``.
            replay_buffer_chunk: Retired spelling of ``extend_buffer``.
            local_init_rb: Retired, changes nothing.
            trust_policy: Call the policy on a TensorDict as it is, without looking at it.
            compile_policy: Compile the policy with `torch.compile`; a mapping gives its arguments.
            cudagraph_policy: Run the policy as a CUDA graph; a mapping gives its arguments.
            no_cuda_sync: Accepted; nothing here synchronises explicitly.
            auto_register_policy_transforms: Provide ``"is_init"`` and zeroed recurrent states to
                policies that read them (the default); ``False`` leaves that to the environment.
            weight_updater: Retired: a `WeightUpdaterBase`, or what returns one, that sends weights.
            weight_sync_schemes: Per model id; a `NoWeightSyncScheme` keeps that model fixed.
            weight_recv_schemes: Models that a collector this one is a worker of may update; see
                `register_scheme_receiver`.
            track_policy_version: Deliver ``"policy_version"``; ``True`` or a `PolicyVersion`.
            worker_idx: This collector's index among its parent's workers.
            track_traj_ids: Deliver ``("collector", "traj_ids")``.
            trajs_per_batch: Deliver exactly this many whole trajectories per batch.
            trajs_per_write: With a replay buffer: whole trajectories per write, 1 by default.
            traj_format: ``"padded"`` (with a mask) or ``"cat"``, for ``trajs_per_batch``.
            traj_quota: ``"equal"``: each environment gives equally many trajectories to a batch, in
                the order in which it made them, so that short ones are not preferred; then
                ``trajs_per_batch`` is rounded up to a multiple of the environments.
            pre_collect_hook: Called before each batch is collected.
            post_collect_hook: Called with each batch before it is handed over.
            compact_obs: Leave out observations under ``"next"`` of batches. Where an episode ends,
                or a batch, the successor is in no other row then: it is lost. A buffer with a
                compact storage needs them, and stores each once.
            num_envs: Environments to make from one id or callable: a batch ``[num_envs, T]``.
            categorical_action_encoding: Discrete actions as indices; ``False`` for one-hot vectors.
            observation_dtype: Cast floating observations to this dtype.
            info_keys: Numeric ``info`` entries to deliver; a mapping gives their shapes and dtypes.
            check_finite: Raise on NaN or infinity in observations and rewards.
            fast: Leave out what is proven to make no difference to the data; `explain` says what.
                ``False``: environments and policies are called as they are, on TensorDicts.
            timeout: Seconds a batch may take; no effect within one process.
            backend: ``"inline"`` (alias ``"direct"``): in this process. ``"process"`` (alias
                ``"multiprocessing"``) makes a `MultiSyncCollector` or `MultiAsyncCollector`.
            num_collectors: How many worker processes; implies ``backend="process"``.
            sync: Whether their batches hold rollouts of all; ``False`` by default.
            backend_options: Arguments that only these collectors have.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            UnknownEnvError: the id is not registered (a `KeyError` too).
            PolicyError: the policy does not fit the environment.
        """
        given = dict(locals())
        super().__init__(pre_collect_hook, post_collect_hook)
        checks.check_updater(weight_updater, weight_sync_schemes)
        legacy.warn_updater(weight_updater)
        updater = legacy.read_updater(weight_updater)
        checks.check_trajectories(
            track_traj_ids, split_trajs, trajs_per_batch, return_same_td, set_truncated
        )
        checks.check_quota(traj_quota, reset_at_each_iter)
        checks.check_callables(
            policy_factory=policy_factory,
            postproc=postproc,
            pre_collect_hook=pre_collect_hook,
            post_collect_hook=post_collect_hook,
        )
        checks.check_timeout(timeout)
        checks.check_schemes(weight_sync_schemes)
        self.register_scheme_receiver(weight_recv_schemes or {})
        retired.check_reset_when_done(reset_when_done)
        retired.note_local_init_rb(local_init_rb)
        self.exploration_type = retired.read_exploration(exploration_type, exploration_mode)
        extend = retired.read_extend_buffer(extend_buffer, replay_buffer_chunk)
        self._show(given, extend)
        shaped = bool(split_trajs) or trajs_per_batch is not None or postproc is not None
        checks.check_buffer(replay_buffer, use_buffers, return_same_td, extend, shaped, compact_obs)
        devices = DevicePlan.from_arguments(device, storing_device, policy_device, env_device)
        self._worker_idx = worker_idx
        self.replay_buffer = replay_buffer
        self.storing_device, self.policy_device = devices.storing, devices.policy
        self.env_device = devices.env
        self.interruptor = interruptor
        self._timeout = timeout
        self._version = checks.read_version(track_policy_version)
        self._pipeline = Pipeline(
            TrajectoryOptions.from_arguments(
                split_trajs,
                trajs_per_batch,
                traj_format,
                trajs_per_write,
                replay_buffer,
                traj_quota,
            ),
            postproc,
            make_sink(replay_buffer, extend),
            devices.storing,
            episodes_end=reset_at_each_iter,
        )
        builder = SourceBuilder(
            env=EnvOptions(
                create_env_fn=create_env_fn,
                create_env_kwargs=dict(create_env_kwargs or {}),
                num_envs=num_envs,
                categorical=categorical_action_encoding,
                observation_dtype=observation_dtype,
                info_keys=info_keys,
                device=devices.env,
            ),
            policy=PolicyOptions(
                policy=policy,
                policy_factory=policy_factory,
                trust_policy=trust_policy,
                compile_policy=compile_policy,
                cudagraph_policy=cudagraph_policy,
                device=devices.policy,
                fast=fast,
                provide_inputs=auto_register_policy_transforms is not False,
            ),
            rollout=RolloutOptions(
                max_frames_per_traj=limit(max_frames_per_traj),
                reset_at_each_iter=reset_at_each_iter,
                track_traj_ids=track_traj_ids,
                set_truncated=set_truncated,
                exploration=self.exploration_type,
                track_policy_version=bool(track_policy_version),
                check_finite=check_finite,
                mask=interruptor is not None,
                compact=compact_obs,
            ),
        )
        limits = FrameBudget.from_arguments(frames_per_batch, total_frames, init_random_frames)
        self._user_policy = policy
        self._engine = Engine(
            lambda windows: InlineBackend(windows, stop_byte(interruptor)), [builder]
        )
        with self._starting():
            self._models = Models(self._engine, policy, weight_sync_schemes, self._version)
            options = BatchOptions(device=devices.storing, same_memory=return_same_td)
            self._budget = self._engine.plan(limits, [limits.frames_per_batch], options)
            self._pipeline.share_out(self._engine.num_envs)
            self.weight_updater = updater

    def _prepare_background(self) -> None:
        if isinstance(self._user_policy, nn.Module) and self.policy is self._user_policy:
            self._engine.request(0, m.Call("own_policy"))

    @front_door.shows(__init__)
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a collector over worker processes if the selectors ask for one.

        Subclasses are what they are, and refuse such selectors.

        Raises:
            TypeError: a selector of the wrong type, or on a subclass.
            ConfigError: a selector that makes no sense.
            NotImplementedError: a backend this version does not have.
        """
        if cls is not Collector:
            front_door.check_subclass(cls, kwargs)
        elif front_door.elsewhere(kwargs):
            return front_door.several(cls.__init__, args, kwargs)
        front_door.check_here(kwargs)
        return super().__new__(cls)
