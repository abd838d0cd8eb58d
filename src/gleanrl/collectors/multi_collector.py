"""Collectors with several workers, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from tensordict import TensorDictBase
from torch import nn

from gleanrl.collectors.arguments import Arguments, MultiArguments, documents_arguments, typed
from gleanrl.collectors.backend_choice import selects, unknown_backend, with_signature_of
from gleanrl.collectors.base_collector import BaseCollector
from gleanrl.collectors.central_setup import (
    call_sizes,
    central_plan,
    driver_processors,
    in_whole_rollouts,
    policy_process_plan,
    read_inference,
)
from gleanrl.collectors.in_process_collector import Collector
from gleanrl.collectors.nested import serve
from gleanrl.collectors.worker_plan import WorkerPlan, env_functions
from gleanrl.core import messages as m
from gleanrl.core.affinity import Processors, read_affinity
from gleanrl.core.errors import WORKER_NAME, ArgumentTypeError, ConfigError
from gleanrl.engine.session import MakeBackend
from gleanrl.policies.central_policy_calls import JointPolicy
from gleanrl.transport.central_inference import (
    BoundedJointBackend,
    CallSizes,
    InterleavedBackend,
    JointBackend,
)
from gleanrl.transport.inline import InlineBackend
from gleanrl.transport.process import ProcessBackend


class MultiCollector(BaseCollector):
    """Runs a policy in environments of several worker processes and yields batches.

    ``MultiCollector(..., sync=True)`` makes a `MultiSyncCollector`, ``sync=False`` a
    `MultiAsyncCollector`. Workers write into memory that this process maps too: a batch is a view
    of it, which is never overwritten while you hold a reference to it.

    A worker has a copy of the policy. It acts with the weights of the last
    `update_policy_weights_` before its rollout began, never with a mixture.
    """

    ARGUMENTS = MultiArguments
    _sync: ClassVar[bool] = True

    @documents_arguments(MultiArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[MultiArguments]
    ) -> None:
        """Start the workers; each builds its environments and resets them once.

        Workers are sent everything they need, including lambdas, closures and definitions in
        ``__main__``.

        Args:
            create_env_fn: The environments: a list with one entry per worker, or one entry for all
                together with ``num_workers``. `Collector` lists the kinds of entries.
            policy: The policy. Workers get copies.
            **kwargs: See `gleanrl.collectors.arguments.MultiArguments`.

        Raises:
            ConfigError: an argument is wrong or contradicts another (a `ValueError`).
            WorkerError: an exception of a worker; it is an instance of its own class as well.
            WorkerDied: a worker's process ended while starting.
            CollectorTimeout: workers did not come up in time.
        """
        super().__init__(create_env_fn, policy, kwargs)
        arguments = self._arguments
        functions = env_functions(create_env_fn, arguments["num_workers"])
        affinity = read_affinity("worker_affinity", arguments["worker_affinity"], len(functions))
        self._affinity = affinity
        if read_inference(arguments, self._sync):
            arguments = in_whole_rollouts(arguments, functions)
            sizes = call_sizes(arguments, functions)
            process, kind = arguments["policy_process"], _KINDS[self._sync]
            process = not self._sync if process is None else process
            driver = driver_processors(arguments, process)
            if process:
                plan = policy_process_plan(arguments, functions, kind, self._sync, affinity)
                self._start(plan, _make_backend(arguments, driver, "policy process"))
            else:
                self._start_here(central_plan(arguments, functions, self._sync, affinity), sizes)
            self.num_workers = len(functions)
            return
        kind = arguments["collector_class"]
        self._start(
            WorkerPlan(
                arguments,
                functions,
                sync=self._sync,
                collector_class=None if kind is Collector else kind,
                serve=serve,
            ),
            _make_backend(arguments, affinity),
        )

    def _start_here(self, plan: WorkerPlan, sizes: CallSizes) -> None:
        """Start with the policy in this process, and the environments in others."""
        make: MakeBackend = InterleavedBackend if len(plan.factories) > 1 else InlineBackend
        if not self._sync:
            kind = JointBackend if sizes.ahead is None else BoundedJointBackend
            make = partial(kind, sizes=sizes)
        self._start(plan, make)

    def explain(self) -> str:
        """List the parts that are called unmodified, and the processors of pinned workers."""
        pinned = enumerate(self._affinity or ())
        lines = [f"worker {worker}: processors {sorted(own)}" for worker, own in pinned]
        return "\n".join([super().explain(), *lines])

    def calls_of_policy(self, reset: bool = False) -> tuple[int, int]:
        """Return the calls of the central policy, and the environments in all of them.

        Only asynchronous collectors with ``inference="central"`` count them.

        Args:
            reset: Whether the counts begin anew.
        """
        acting = self.collection.plan.acting
        if isinstance(acting, JointPolicy):
            return acting.counted(reset)
        if self._arguments["inference"] != "central" or self._sync:
            raise ConfigError("only asynchronous central inference counts calls of the policy")
        calls, rows = self._engine.request(0, m.Call("calls_of_policy", (reset,)))
        return calls, rows

    def get_cached_weights(self, model_id: str) -> TensorDictBase | None:
        """Return the learner's weights, which the next update sends; ``None`` if it has none.

        Args:
            model_id: ``"policy"``; of other models there is nothing here.
        """
        known = model_id == "policy" and isinstance(self.learner_policy, nn.Module)
        return self.policy_weights if known else None

    @with_signature_of(__init__)
    def __new__(cls, *args: Any, sync: bool | None = None, **kwargs: Any) -> Any:
        """Choose the subclass.

        Raises:
            TypeError: `MultiCollector` itself without ``sync``, or a subclass with the other.
        """
        sync = typed(MultiArguments, {"sync": sync})["sync"]
        if cls is MultiCollector:
            if sync is None:
                raise ArgumentTypeError(
                    f"MultiCollector needs sync=True or sync=False, not {sync!r}"
                )
            return super().__new__(MultiSyncCollector if sync else MultiAsyncCollector)
        if sync is not None and sync != cls._sync:
            raise ArgumentTypeError(f"{cls.__name__} has sync={cls._sync}, not {sync!r}")
        return super().__new__(cls)


class MultiSyncCollector(MultiCollector):
    """A batch holds one rollout of every worker.

    Workers act with copies of the policy: call `update_policy_weights_` after each optimizer step.
    After `update_policy_weights_` the next batch is made with the new weights by all of them.

    Example:
        >>> from gleanrl.collectors import MultiSyncCollector
        >>> with MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=64, total_frames=128,
        ...                         backend="inline") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(2, 32), (2, 32)]
    """

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """A batch is one rollout of one worker, delivered on arrival.

    Workers act with copies of the policy: call `update_policy_weights_` after each optimizer step.
    Workers continue while you learn; each is at most two rollouts ahead. After
    `update_policy_weights_` every rollout that begins uses the new weights.

    Example:
        >>> from gleanrl.collectors import MultiAsyncCollector
        >>> with MultiAsyncCollector(["CartPole-v1"] * 2, frames_per_batch=32, total_frames=128,
        ...                          backend="inline") as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(32,), (32,), (32,), (32,)]
    """

    _sync = False


class AsyncCollector(MultiCollector):
    """One worker that collects while the learner learns.

    It acts with a copy of the policy: call `update_policy_weights_` after each optimizer step.

    Example:
        >>> from gleanrl.collectors import AsyncCollector
        >>> with AsyncCollector("CartPole-v1", frames_per_batch=32, total_frames=64) as collector:
        ...     [tuple(batch.shape) for batch in collector]
        [(32,), (32,)]
    """

    _sync = False

    @documents_arguments(MultiArguments)
    def __init__(
        self, create_env_fn: Any, policy: Any = None, **kwargs: Unpack[MultiArguments]
    ) -> None:
        """Start the worker.

        Args:
            create_env_fn: The environments; see `Collector`.
            policy: The policy.
            **kwargs: See `gleanrl.collectors.arguments.MultiArguments`; ``num_workers`` is 1.
        """
        if kwargs.get("num_workers") not in (None, 1):
            raise ConfigError(f"num_workers ({kwargs['num_workers']!r}) of an AsyncCollector is 1")
        super().__init__([create_env_fn], policy, **kwargs)


_KINDS = {True: MultiSyncCollector, False: MultiAsyncCollector}


def _make_backend(
    arguments: Arguments, affinity: Sequence[Processors] | None, worker_name: str = WORKER_NAME
) -> MakeBackend:
    """Return the function that builds the backend that ``arguments`` name."""
    name, start_timeout = arguments["backend"], arguments["start_timeout"]
    if name in (None, "process", "multiprocessing"):
        threads, replaces = arguments["num_sub_threads"], arguments["on_failure"] == "relaunch"
        return lambda windows: ProcessBackend(
            threads, start_timeout, replaces=replaces, affinity=affinity, worker_name=worker_name
        )
    if affinity is not None:
        raise ConfigError(f"worker_affinity needs workers in processes, not backend={name!r}")
    if name in ("inline", "direct"):
        return partial(InlineBackend, apart=True)
    raise unknown_backend(
        name,
        "'process' or 'inline'; for nodes there are DistributedCollector, RPCCollector and "
        "RayCollector, or Collector(backend=...)",
    )


MultiAsyncCollector.register(AsyncCollector)  # so that isinstance tells, as with TorchRL
selects(MultiCollector, "process", "multiprocessing")
