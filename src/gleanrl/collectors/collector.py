"""The in-process collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, cast

import torch
from torch import nn

from gleanrl.collectors import dispatch
from gleanrl.collectors.arguments import (
    Arguments,
    CollectorArguments,
    Options,
    Shown,
    check_callables,
    read,
    read_index,
    shows,
)
from gleanrl.collectors.engine_collector import EngineCollector
from gleanrl.core import messages as m
from gleanrl.core.errors import ArgumentTypeError, for_users
from gleanrl.core.options import DevicePlan, FrameBudget
from gleanrl.engine.batches import BatchOptions
from gleanrl.engine.interruptor import stop_byte
from gleanrl.engine.models import Models
from gleanrl.transport.inline import InlineBackend


class Collector(EngineCollector):
    """Runs a policy in environments, in this process, and yields batches of what happened.

    Each batch is a `TensorDict` of shape ``[T]`` for one environment or ``[n, T]`` for several, its
    last dimension named ``"time"``. Every environment makes exactly one real transition per step:
    ``("next", "observation")`` is the true final observation where an episode ends, and the root
    observation that follows is that of the reset.

    A batch is never overwritten while you hold a reference to it. Its memory is used again once
    you have let go of its last tensor.

    Example:
        >>> from gleanrl.collectors import Collector
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=32, total_frames=64) as data:
        ...     [tuple(batch.shape) for batch in data]
        [(2, 16), (2, 16)]
    """

    ARGUMENTS = CollectorArguments
    _as_gathered = True
    return_same_td = Shown()

    @shows(CollectorArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[CollectorArguments]
    ) -> None:
        """Build the environments, reset each once and look at the policy's first answer.

        Args:
            create_env_fn: What to collect from: a Gymnasium id, a `gymnasium.Env`, a
                `gymnasium.vector.VectorEnv`, an environment with TensorDict methods, a callable
                returning one of these, or a sequence of ids or callables (one batch ``[n, T]``).
            policy: What acts: a TensorDict module, an `nn.Module` or a callable on tensors or
                TensorDicts; ``None`` acts at random.
            **kwargs: See `gleanrl.collectors.arguments.CollectorArguments`.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            UnknownEnvError: the id is not registered (a `KeyError` too).
            PolicyError: the policy does not fit the environment.
        """
        arguments = read(CollectorArguments, type(self).__name__, kwargs)
        shared = cast("Arguments", arguments)
        super().__init__(shared)
        check_callables(policy_factory=arguments["policy_factory"])
        options = Options.of(shared, same_td=arguments["return_same_td"])
        devices = DevicePlan.from_arguments(
            arguments["device"],
            arguments["storing_device"],
            arguments["policy_device"],
            arguments["env_device"],
        )
        self._take(shared, options, devices.storing)
        self.policy_device, self.env_device = devices.policy, devices.env
        self.interruptor = interruptor = arguments["interruptor"]
        source = options.source
        builder = replace(
            source,
            env=replace(
                source.env,
                create_env_fn=create_env_fn,
                create_env_kwargs=dict(arguments["create_env_kwargs"] or {}),
                device=devices.env,
            ),
            policy=replace(
                source.policy,
                policy=policy,
                policy_factory=arguments["policy_factory"],
                device=devices.policy,
            ),
            rollout=replace(source.rollout, mask=interruptor is not None),
        )
        limits = FrameBudget.from_arguments(
            arguments["frames_per_batch"],
            arguments["total_frames"],
            arguments["init_random_frames"],
        )
        self._user_policy = policy
        engine = self._build_engine(
            lambda windows: InlineBackend(windows, stop_byte(interruptor)), [builder]
        )
        with self._starting(options):
            self._models = Models(engine, policy, arguments["weight_sync_schemes"], self._version)
            batches = BatchOptions(device=devices.storing, same_memory=arguments["return_same_td"])
            self._budget = engine.plan(limits, [limits.frames_per_batch], batches)
            self._pipeline.share_out(engine.num_envs)

    @dispatch.like(__init__)
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a collector over worker processes if the selectors ask for one.

        Subclasses are what they are, and refuse such selectors.

        Raises:
            TypeError: a selector of the wrong type, or on a subclass.
            ConfigError: a selector that makes no sense.
            NotImplementedError: a backend this version does not have.
        """
        if cls is not Collector:
            dispatch.check_subclass(cls, kwargs)
        elif dispatch.elsewhere(kwargs):
            return dispatch.several(args, kwargs)
        dispatch.check_here(kwargs)
        return super().__new__(cls)

    def _prepare_background(self) -> None:
        if isinstance(self._user_policy, nn.Module) and self.policy is self._user_policy:
            self._engine.request(0, m.Call("own_policy"))

    # -- weights and state -----------------------------------------------------------------------

    def _update_weights(
        self, models: Mapping[str, Any], worker_ids: Any, kwargs: Mapping[str, Any]
    ) -> None:
        if worker_ids is not None and self.weight_updater is None:
            raise ArgumentTypeError(
                "worker_ids needs a collector with several workers; this one has none"
            )
        super()._update_weights(models, worker_ids, kwargs)

    def _publish(
        self, models: Mapping[str, Any], worker_ids: Any, version: int | None = None
    ) -> None:
        with self._engine.turn(None):
            self._models.update(models, version)

    @for_users
    def reset(self, index: Sequence[int] | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset environments; they start new trajectories.

        Args:
            index: Which environments, by position in the batch; all by default.
            **kwargs: Options for `gymnasium.Env.reset`.
        """
        chosen = None if index is None else read_index(index, self._engine.num_envs)
        self._restart({0: m.Reset(chosen, kwargs)})

    def state_dict(self) -> dict[str, Any]:
        """Return policy and environment state, counters, versions and random streams."""
        worker = self._engine.request(0, m.GetState())
        return {
            "policy_state_dict": self._models.policy_state(),
            "env_state_dict": worker.pop("env"),
            "frames": self._budget.delivered,
            "iter": self._batches,
            "policy_version": worker["policy_version"],
            "worker": worker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore what `state_dict` returned; environments restart on fresh resets.

        Raises:
            KeyError: ``strict`` and an entry is missing.
            WeightsError: the policy's weights do not fit.
        """
        expected = ("policy_state_dict", "env_state_dict", "frames", "iter", "worker")
        missing = [name for name in expected if name not in state_dict]
        if strict and missing:
            raise KeyError(
                f"state_dict lacks {missing}; load with strict=False to keep what is there"
            )
        policy = state_dict.get("policy_state_dict") or {}
        self._models.check_policy_state(policy)
        if "worker" in state_dict:
            worker = {**state_dict["worker"], "env": state_dict.get("env_state_dict", {})}
            self._restart({0: m.SetState(worker, strict)})
            self._models.continue_from(int(worker["policy_version"]))
        if policy:
            self._models.load_policy_state(policy)
        self._budget.delivered = int(state_dict.get("frames", self._budget.delivered))
        self._batches = int(state_dict.get("iter", self._batches))

    # -- remote access ---------------------------------------------------------------------------

    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Resolve a path such as ``"env.transform[0]"`` and call it; return it if not callable.

        Raises:
            AttributeError: an attribute is missing.
            ValueError: arguments for something that is not callable.
        """
        with self._engine.turn(None):  # nothing is collected meanwhile
            return super().cascade_execute(attr_path, *args, **kwargs)

    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a method once per entry of the argument lists; see `BaseCollector.map_fn`."""
        with self._engine.turn(None):
            return super().map_fn(method_name, list_of_args, list_of_kwargs)
