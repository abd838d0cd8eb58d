"""The in-process collector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from gleanrl.collectors import backend_choice
from gleanrl.collectors.arguments import (
    CollectorArguments,
    argument_property,
    check_in_process,
    documents_arguments,
    read_index,
)
from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.state_types import OF_ALL
from gleanrl.collectors.worker_plan import WorkerPlan
from gleanrl.core import messages as m
from gleanrl.core.errors import ConfigError, MissingEntryError, for_users
from gleanrl.engine.engine import Engine
from gleanrl.engine.replacing_workers import reseeded
from gleanrl.engine.session import CLOSE_TIMEOUT_S
from gleanrl.transport.inline import InlineBackend
from gleanrl.transport.process import ProcessBackend


class Collector(BaseCollector):
    """Runs a policy in environments, in this process, and yields batches of frames.

    Each batch is a `TensorDict` of shape ``[T]`` for one environment or ``[n, T]`` for several, its
    last dimension named ``"time"``. Every environment makes exactly one real transition per step:
    ``("next", "observation")`` is the true final observation where an episode ends, and the root
    observation that follows is that of the reset.

    A batch is never overwritten while you hold a reference to it. Its memory is reused after you
    drop its last tensor.

    Example:
        >>> from gleanrl.collectors import Collector
        >>> with Collector("CartPole-v1", num_envs=2, frames_per_batch=32, total_frames=64) as data:
        ...     [tuple(batch.shape) for batch in data]
        [(2, 16), (2, 16)]
    """

    ARGUMENTS = CollectorArguments
    return_same_td = argument_property("return_same_td")

    @documents_arguments(CollectorArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[CollectorArguments]
    ) -> None:
        """Build the environments, reset each once and check the policy's first output.

        Args:
            create_env_fn: The environments: a Gymnasium id, a `gymnasium.Env`, a
                `gymnasium.vector.VectorEnv`, an environment with TensorDict methods, a callable
                returning one of these, or a sequence of ids or callables (one batch ``[n, T]``).
            policy: The policy: a TensorDict module, an `nn.Module` or a callable on tensors or
                TensorDicts; ``None`` acts at random.
            **kwargs: See `gleanrl.collectors.arguments.CollectorArguments`.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            UnknownEnvError: the id is not registered (a `KeyError` too).
            PolicyError: the policy does not fit the environment.
        """
        super().__init__(create_env_fn, policy, kwargs)
        check_in_process(self._arguments)
        plan = WorkerPlan(self._arguments, [create_env_fn], in_process=True)
        self._start(plan, InlineBackend)
        self.policy_device, self.env_device = self.policy_device[0], self.env_device[0]

    @backend_choice.with_signature_of(__init__)
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a collector over worker processes if the selectors ask for one.

        Subclasses are never exchanged, and refuse such selectors.

        Raises:
            TypeError: a selector of the wrong type, or on a subclass.
            ConfigError: a selector that makes no sense.
            NotImplementedError: a backend this version does not have.
        """
        if cls is not Collector:
            backend_choice.check_subclass(cls, kwargs)
            return super().__new__(cls)
        other = backend_choice.with_workers(args, kwargs)
        return super().__new__(cls) if other is None else other

    # -- in the background: in a worker ----------------------------------------------------------

    def start(self) -> None:
        """Collect into the replay buffer in the background, in a worker process.

        The worker gets copies of environment, policy, hooks and ``postproc``; the objects of this
        process do not change until `shutdown`. Weights, versions, counters, trajectory ids, seeds
        and the state of an environment that has one continue in the worker, in fresh episodes.
        Without `set_seed`, its random streams are made from torch's generator. Training changes
        your policy only; `update_policy_weights_` sends its weights to the worker. `getattr_env`,
        `cascade_execute` and others ask the worker.

        Raises:
            RuntimeError: there is no replay buffer.
            ConfigError: something that the worker needs cannot be pickled, such as an environment
                that holds a connection: give a function that makes it.
            ClosedError: after `shutdown`.
        """
        super().start()

    def _leave_process(self) -> None:
        collection = self.collection
        if not collection.plan.in_process:
            return
        state, number = super().state_dict(), collection.weights.number
        plan = self._plan_in_worker()
        try:
            engine = Engine(
                lambda windows: ProcessBackend(),
                plan.factories,
                start_timeout=self._arguments["start_timeout"],
            )
        except Exception as err:
            err.add_note("start() has a worker process collect; iterating collects in this process")
            raise
        kept, weights = dict(vars(collection)), dict(vars(collection.weights))
        try:
            engine.plan(plan.limits, plan.frames, plan.batches)
            self._engine.exchange(engine)
            collection.serve(plan)
            self._continue_in_worker(state["worker0"], number)
        except BaseException:
            if self._engine.set_aside is not None:
                self._engine.exchange(engine)
            engine.close(CLOSE_TIMEOUT_S)
            vars(collection).update(kept)
            vars(collection.weights).update(weights)
            raise
        self._hooks = collection.hooks
        self._attributes.away = self._engine

    def _plan_in_worker(self) -> WorkerPlan:
        """Return the function that starts the worker."""
        arguments = self._arguments
        if self.profile_config is not None:
            raise ConfigError(
                "enable_profile() profiles this process, and start() has a worker process collect: "
                "call disable_profile() first, or profile a collector with workers"
            )
        # The policy factory was called, and has made this policy.
        made = arguments["policy_factory"] is not None
        own = {
            "policy": self.policy if made else arguments["policy"],
            "policy_factory": None,
            "weight_updater": None,
            "pre_collect_hook": self.pre_collect_hook,
            "post_collect_hook": self.post_collect_hook,
        }
        plan = WorkerPlan({**arguments, **own}, self.collection.plan.functions, sync=False)
        # The user was warned when these were rounded.
        plan.limits = replace(self.collection.counts.limits, total_frames=None)
        return plan

    def _continue_in_worker(self, state: Mapping[str, Any], number: int) -> None:
        """Make the worker continue from the ``state`` of this process."""
        engine, collection, worker = self._engine, self.collection, state["worker"]
        if self.interruptor is not None:
            self.interruptor.attach(engine.backend.stop_byte)
        streams = worker["streams"]
        if "torch" not in streams:  # the worker has streams of its own, which nobody shares
            own = engine.request(0, m.GetState())["streams"]
            streams = own | {name: one for name, one in streams.items() if one is not None}
        worker = {**worker, "env": state["env_state_dict"], "streams": streams, "episodes": None}
        engine.request(0, m.SetState(worker))
        if seed := collection.seeds.get(0):  # generators of environments cannot be carried over
            engine.request(0, reseeded(seed, 1) if collection.moved else seed)
        collection.weights.models.restore({0: (state["policy_state_dict"], number)})
        if not number:  # else the user knows that weights are to be sent
            collection.weights.warn_if_never_sent()

    # -- state -----------------------------------------------------------------------------------

    def _env_to_record(self) -> Any:
        return self.env

    @for_users
    def reset(  # type: ignore[override]  # environments, where others name workers
        self, index: Sequence[int] | torch.Tensor | None = None, **kwargs: Any
    ) -> None:
        """Reset environments; they start new trajectories.

        Args:
            index: Which environments, by position in the batch; all by default.
            **kwargs: Arguments of the environment's ``reset``; Gymnasium's takes ``options={...}``.
        """
        chosen = None if index is None else read_index(index, self._engine.num_envs)
        self.collection.restart({0: m.Reset(chosen, kwargs)})

    def state_dict(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        state = super().state_dict(allow_pickle=allow_pickle)
        return {**state.pop("worker0"), **state}

    def _restore(self, state_dict: Mapping[str, Any], strict: bool, **options: Any) -> None:
        if "worker0" in state_dict:  # of workers
            super()._restore(state_dict, strict, **options)
            return
        expected = ("policy_state_dict", "env_state_dict", "frames", "iter", "worker")
        missing = [name for name in expected if name not in state_dict]
        if strict and missing:
            raise MissingEntryError(
                f"state_dict lacks {missing}; load with strict=False to keep what is there"
            )
        own = {name: state_dict[name] for name in OF_ALL if name in state_dict}
        super()._restore({"worker0": state_dict, **own}, strict, **options)
