"""Which weights travel, and over which channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import BaseContext
from threading import Condition
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from gleanrl.core.errors import ConfigError
from gleanrl.weights.standalone import Link, MapFn, Receiver, Sender, sources_of


class WeightSyncScheme:
    """How one model's weights reach the workers that use it.

    A scheme is a description: one and the same object can be given to several collectors. Weights
    are sent by ``update_policy_weights_``; every copy is complete and carries one version, and a
    worker changes over between two rollouts, never within one.

    In one process nothing has to be sent: the scheme only says whether updates apply.

    Without a collector, the scheme itself is an argument of the processes that get weights:

    ```python
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(model=policy, num_workers=1)
    multiprocessing.Process(target=work, args=(scheme,)).start()
    scheme.connect()
    scheme.send()  # the policy as it is now; returns when the worker's model has it


    def work(scheme):
        scheme.init_on_receiver(model_id="policy", worker_idx=0, model=policy)
        scheme.connect()  # from here on a thread loads what is sent
        with scheme.lock:  # weights of one version
            policy(observation)
    ```
    """

    applies = True
    """Whether updates reach the model."""
    shared = True
    """Whether weights are published in shared memory, where the workers can share any."""
    _standalone = False

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        """Describe the scheme.

        Args:
            strategy: ``"tensordict"`` or ``"state_dict"``: what callers used to have to choose;
                weights of either kind are accepted by every scheme.
            sync: Accepted for compatibility. What it stood for always holds: once
                ``update_policy_weights_`` has returned, rollouts that begin use the new weights.

        Raises:
            ConfigError: an unknown strategy.
        """
        if strategy not in ("tensordict", "state_dict"):
            raise ConfigError(f"strategy ({strategy!r}) must be 'tensordict' or 'state_dict'")
        self.strategy = strategy
        self.sync = sync
        self.model_id: str | None = None
        self.worker_idx: int | None = None
        self._links: dict[int, Link] = {}
        self._side: Sender | Receiver | None = None
        self._connected = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        return {**self.__dict__, "_side": None, "_connected": False}

    @staticmethod
    def from_backend(backend: str, **kwargs: Any) -> WeightSyncScheme:
        """Return the scheme that fits a backend.

        Args:
            backend: ``"none"`` or ``"direct"`` (nothing is sent), ``"inline"``, ``"shared"``,
                ``"thread"``, ``"process"``, ``"multiprocessing"``, ``"distributed"``, ``"rpc"`` or
                ``"ray"``.
            **kwargs: Arguments of the scheme.

        Raises:
            ConfigError: no such backend.
        """
        if backend not in _SCHEMES:
            raise ConfigError(
                f"Unsupported weight-sync backend {backend!r}: it must be one of {sorted(_SCHEMES)}"
            )
        return _SCHEMES[backend](**kwargs)

    # -- without a collector ---------------------------------------------------------------------

    def init_on_sender(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: nn.Module | None = None,
        weights: Any = None,
        params_map: Mapping[int, Any] | None = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: MapFn | None = None,
        num_workers: int | None = None,
        ctx: BaseContext | None = None,
    ) -> None:
        """Make this process the one that sends, before the others start.

        Args:
            model_id: A name for the model.
            context: Not supported: give ``model`` or ``weights``.
            model: What to send.
            weights: The same as a `TensorDict` or a state dict.
            params_map: The same for each worker by itself.
            devices: One per worker, which says how many there are. Weights travel through host
                memory and end on the device of the worker's model.
            device_map_fn: ``(worker, weights) -> weights``: what that worker gets.
            num_workers: How many workers there are.
            ctx: What starts the processes; ``multiprocessing.get_context()``.

        Raises:
            ConfigError: arguments that contradict each other, or too few.
            NotImplementedError: a scheme that only works in a collector, or a ``context``.
        """
        self._check_standalone(context)
        given = (model, weights, params_map, devices, device_map_fn, num_workers)
        self._side = sender = Sender(sources_of(*given), self.shared, ctx)
        self._links, self._connected = sender.links, False
        self.model_id = model_id

    def init_on_receiver(
        self,
        *,
        model_id: str,
        context: Any = None,
        worker_idx: int | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Make this process one that gets weights.

        Args:
            model_id: A name for the model.
            context: Not supported: give ``worker_idx`` and ``model``.
            worker_idx: Which worker this is.
            model: What the weights are loaded into; without it they are only in `weights`.

        Raises:
            ConfigError: a worker that the sender does not know.
            NotImplementedError: a scheme that only works in a collector, or a ``context``.
        """
        self._check_standalone(context)
        if worker_idx not in self._links:
            raise ConfigError(
                f"worker_idx ({worker_idx}) must be one of {sorted(self._links)}: those of the "
                "sender, which calls init_on_sender before the scheme goes to another process"
            )
        self._side, self._connected = Receiver(self._links[worker_idx], model), False
        self.model_id, self.worker_idx = model_id, worker_idx

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Send the first weights, or wait for them and load them.

        Args:
            worker_idx: Accepted for compatibility: `init_on_receiver` has it.
            weights: On the sender: what to send in place of the weights it was given.

        Raises:
            RuntimeError: neither side was initialised, or it is connected.
            CollectorTimeout: no weights came within 60 s.
            WeightsError: they do not fit the model.
        """
        if self._connected:
            raise RuntimeError("connect was called before: use send from now on")
        if isinstance(self._side, Sender):
            self._side.connect(weights)
        else:
            self._receiver().connect()
        self._connected = True

    synchronize_weights = connect

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send weights; with ``sync=True``, return when the workers' models have them.

        Args:
            weights: A module, a `TensorDict` or a state dict, or one of them per worker
                (``{0: ..., 1: ...}``). ``None``: what `init_on_sender` was given, as it is now.
            worker_ids: Who gets them; ``None``: everybody.

        Raises:
            RuntimeError: this is not a sender that is connected.
            WeightsError: the weights do not fit those before; nothing was sent.
            WorkerError: a worker could not load them.
            WorkerDied: a worker has ended.
            ClosedError: a worker takes no more weights.
            CollectorTimeout: a worker has not loaded them within 60 s.
        """
        if not (isinstance(self._side, Sender) and self._connected):
            raise RuntimeError("send needs init_on_sender and connect before")
        self._side.send(weights, worker_ids, self.sync)

    def receive(self, timeout: float | None = None) -> TensorDictBase | None:
        """Return weights that arrived since the last call, ``None`` if there are none.

        They are in the model already.

        Args:
            timeout: Seconds to wait for some; ``None``: do not wait.

        Raises:
            RuntimeError: this is not a receiver that is connected.
        """
        if not self._connected:
            raise RuntimeError("receive needs init_on_receiver and connect before")
        return self._receiver().receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Load ``weights`` into the receiver's model.

        Args:
            weights: See `send`.
            inplace: Accepted for compatibility: the model keeps its tensors.

        Raises:
            WeightsError: they do not fit, or there is no model.
        """
        self._receiver().apply(weights)

    def shutdown(self) -> None:
        """Send or take no more weights. What was sent before still arrives."""
        side, self._side, self._connected = self._side, None, False
        if side is not None:
            side.shutdown()

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process sends."""
        return isinstance(self._side, Sender)

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this process gets weights."""
        return isinstance(self._side, Receiver)

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether this process sends and is connected."""
        return self.initialized_on_sender and self._connected

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether this process gets weights and is connected."""
        return self.initialized_on_receiver and self._connected

    @property
    def weights(self) -> TensorDictBase | None:
        """What would be sent now, or what arrived last."""
        return None if self._side is None else self._side.weights

    @property
    def model(self) -> nn.Module | None:
        """The receiver's model."""
        return self._side.model if isinstance(self._side, Receiver) else None

    @property
    def version(self) -> int:
        """On the receiver: the number of the `send` whose weights arrived last; at first 0."""
        return self._receiver().version

    @property
    def lock(self) -> Condition:
        """On the receiver: held while weights are loaded; hold it to use weights of one version."""
        return self._receiver().lock

    def _receiver(self) -> Receiver:
        if not isinstance(self._side, Receiver):
            raise RuntimeError("this process has not called init_on_receiver")
        return self._side

    def _check_standalone(self, context: Any) -> None:
        name = type(self).__name__
        if not self._standalone:
            raise NotImplementedError(
                f"{name} sends only in a collector, which sets it up itself: give it as "
                "weight_sync_schemes={'policy': ...} and call update_policy_weights_. Between "
                "processes of one machine use SharedMemWeightSyncScheme or "
                "MultiProcessWeightSyncScheme"
            )
        if context is not None:
            raise NotImplementedError(
                f"{name} takes no context: a collector sets up its schemes itself. Without one "
                "give model= or weights= and num_workers=, or worker_idx= and model="
            )


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Publish weights in shared memory; workers copy them when their next rollout begins.

    The default. Publishing costs one copy, whatever the number of workers, and waits for nobody.
    """

    _standalone = True

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        Args:
            strategy: See `WeightSyncScheme`.
            sync: See `WeightSyncScheme`.
            per_worker_weights: Accepted for compatibility: ``weights={0: ..., 1: ...}`` always
                gives each worker its own.
        """
        super().__init__(strategy, sync)
        self.per_worker_weights = per_worker_weights


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Send weights to each worker as a message."""

    shared = False
    _standalone = True


class DistributedWeightSyncScheme(WeightSyncScheme):
    """Send weights to nodes as one flat tensor, over torch.distributed.

    The default of distributed collectors. A node gets the next weights while it works, and acts
    with them from its next rollout on.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        backend: str = "gloo",
        timeout: float = 3600.0,
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        Args:
            strategy: See `WeightSyncScheme`.
            sync: See `WeightSyncScheme`.
            backend: Accepted for compatibility: the collector's is used.
            timeout: Accepted for compatibility: no update waits, and a node that takes no weights
                counts as dead when it shows no sign of life.
        """
        super().__init__(strategy, sync)
        self.backend, self.timeout = backend, timeout


class RPCWeightSyncScheme(WeightSyncScheme):
    """Send weights to nodes as one flat tensor, by torch.distributed.rpc.

    The default of RPC collectors. A node acts with them from its next rollout on.
    """


class RayWeightSyncScheme(WeightSyncScheme):
    """Put weights into Ray's object store once per update, for all actors.

    The default of Ray collectors. An actor fetches the newest ones when its next rollout begins.
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, backend: str = "gloo"
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        Args:
            strategy: See `WeightSyncScheme`.
            sync: See `WeightSyncScheme`.
            backend: Accepted for compatibility: there is no process group.
        """
        super().__init__(strategy, sync)
        self.backend = backend


class NoWeightSyncScheme(WeightSyncScheme):
    """Never update the model: a fixed policy. All methods do nothing."""

    applies = False

    def init_on_sender(self, *, model_id: str | None = None, **_: Any) -> None:
        """Remember the name."""
        self.model_id = model_id

    def init_on_receiver(self, *, model_id: str, worker_idx: int | None = None, **_: Any) -> None:
        """Remember the name and the number."""
        self.model_id, self.worker_idx = model_id, worker_idx

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Do nothing."""

    synchronize_weights = connect

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Do nothing."""

    def receive(self, timeout: float | None = None) -> None:
        """Return ``None``."""


_SCHEMES: Mapping[str, type[WeightSyncScheme]] = {
    "none": NoWeightSyncScheme,
    "direct": NoWeightSyncScheme,
    "inline": WeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "thread": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "multiprocessing": MultiProcessWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
    "ray": RayWeightSyncScheme,
}
