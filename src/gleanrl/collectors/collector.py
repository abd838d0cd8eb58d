"""The in-process collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from gleanrl.collectors import selectors
from gleanrl.collectors.arguments import (
    CollectorArguments,
    read_index,
    shown,
    shows,
)
from gleanrl.collectors.base import BaseCollector
from gleanrl.collectors.launch import WorkerPlan, launch_workers
from gleanrl.core import messages as m
from gleanrl.core.errors import ArgumentTypeError, for_users
from gleanrl.engine.interruptor import stop_byte
from gleanrl.transport.inline import InlineBackend


class Collector(BaseCollector):
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
    return_same_td = shown("return_same_td")

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
        super().__init__(kwargs)
        interruptor = self._arguments["interruptor"]
        plan = WorkerPlan(
            create_env_fn=create_env_fn,
            functions=[create_env_fn],
            policy=policy,
            here=True,
            interruptor=interruptor,
            num_threads=torch.get_num_threads(),  # as they are: there is no other process
        )
        self._start(
            launch_workers(self._arguments, plan),
            lambda windows: InlineBackend(windows, stop_byte(interruptor)),
        )
        self.policy_device, self.env_device = self.policy_device[0], self.env_device[0]

    @selectors.like(__init__)
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a collector over worker processes if the selectors ask for one.

        Subclasses are what they are, and refuse such selectors.

        Raises:
            TypeError: a selector of the wrong type, or on a subclass.
            ConfigError: a selector that makes no sense.
            NotImplementedError: a backend this version does not have.
        """
        if cls is not Collector:
            selectors.check_subclass(cls, kwargs)
            return super().__new__(cls)
        other = selectors.elsewhere(args, kwargs)
        return super().__new__(cls) if other is None else other

    def _prepare_background(self) -> None:
        # A function's network cannot be updated in a copy: it acts with the one that is trained.
        if isinstance(self._plan.policy, nn.Module) and self.policy is self._plan.policy:
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

    @for_users
    def reset(self, index: Sequence[int] | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Reset environments; they start new trajectories.

        Args:
            index: Which environments, by position in the batch; all by default.
            **kwargs: Options for `gymnasium.Env.reset`.
        """
        chosen = None if index is None else read_index(index, self._engine.num_envs)
        self._restart({0: m.Reset(chosen, kwargs)})

    def _states(self) -> dict[str, Any]:
        worker = self._engine.request(0, m.GetState())
        return {
            "policy_state_dict": self._models.policy_state(),
            "env_state_dict": worker.pop("env"),
            "policy_version": worker["policy_version"],
            "worker": worker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        expected = ("policy_state_dict", "env_state_dict", "frames", "iter", "worker")
        missing = [name for name in expected if name not in state_dict]
        if strict and missing:
            raise KeyError(
                f"state_dict lacks {missing}; load with strict=False to keep what is there"
            )
        counts = {name: state_dict[name] for name in ("frames", "iter") if name in state_dict}
        super().load_state_dict({"worker0": state_dict, **counts}, strict)
