"""How weights reach workers: the schemes of collectors, and schemes used without a collector.

Without a collector, per worker:

    sender -- (number, extra state) --> queue -> the receiver's thread -> model
    sender <- (number, pid, error) -- pipe

Message 0 is `connect`'s, and ``None`` ends the thread. Tensors lie in shared memory, whatever the
scheme. Those of one message become the model's under the receiver's lock.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from threading import Condition
from typing import Any, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from gleanrl.core.errors import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    GleanError,
    WeightsError,
    WorkerDied,
    WorkerError,
    for_users,
)
from gleanrl.core.messages import WeightsRef
from gleanrl.memory.shared import SharedMemory
from gleanrl.weights.buffers import SharedWeightPublisher, SharedWeightReceiver, reserve_shared
from gleanrl.weights.snapshot import (
    Weights,
    by_worker,
    check_tensors,
    cloned,
    load_weights,
    shapes_of,
    weights_of,
)

_WAIT_S = 60.0
"""How long a process waits for the other one."""
_LOOK_S = 0.2
_HELLO = -1
_MOST_TEXT = 2000
"""Characters of an error: a pipe takes so many at once or not at all."""
_MapFn: TypeAlias = Callable[[int, TensorDictBase], Any]


class WeightSyncScheme:
    """The way of one model's weights to the workers that use it.

    A scheme is a description: one and the same object can be given to several collectors. Weights
    are sent by ``update_policy_weights_``; every copy is complete and carries one version, and a
    worker changes over between two rollouts, never within one.

    In one process nothing has to be sent: the scheme only says whether updates apply.

    Without a collector, the scheme itself is an argument of the processes that get weights::

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
    """

    applies = True
    """Whether updates reach the model."""
    shared = True
    """Whether weights are published in shared memory, if the workers can share any."""
    _standalone = False

    @for_users
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
        self._links: dict[int, _Link] = {}
        self._workers: dict[int, _Worker] = {}
        """On the sender: all workers."""
        self._receiving: _Receiver | None = None
        self._number = 0
        """Of the latest `send`."""
        self._connected = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the attributes of this process."""
        return {**self.__dict__, "_workers": {}, "_receiving": None, "_connected": False}

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
        device_map_fn: _MapFn | None = None,
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
        sources = [value for value in (model, weights, params_map) if value is not None]
        if len(sources) != 1:
            raise ConfigError(f"give one of model, weights and params_map, not {len(sources)}")
        if params_map is None:
            count = _count_workers(devices, num_workers)
            params_map = dict.fromkeys(range(count), sources[0])
        elif any(value is not None for value in (devices, device_map_fn, num_workers)):
            raise ConfigError("params_map says it all: no devices, device_map_fn, num_workers")
        ctx, memory = ctx or multiprocessing.get_context(), SharedMemory()
        self._workers = {
            worker: _Worker(worker, source, device_map_fn, memory, ctx)
            for worker, source in params_map.items()
        }
        self._links = {index: worker.link for index, worker in self._workers.items()}
        self._receiving, self._number, self._connected = None, 0, False
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
        self._receiving, self._connected = _Receiver(self._links[worker_idx], model), False
        self._workers = {}
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
        if not self._workers:
            self._receiver().connect()
        for worker in self._workers.values():  # waits for none: they may start later
            worker.post(worker.ready(weights), 0)
        self._connected = True

    synchronize_weights = connect

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send weights; with ``sync=True``, return when the workers' models have them.

        Args:
            weights: A module, a `TensorDict` or a state dict, or one of them per worker
                (``{0: ..., 1: ...}``). ``None``: what `init_on_sender` was given, as it is now.
            worker_ids: Which workers get them; ``None``: all.

        Raises:
            RuntimeError: this is not a sender that is connected.
            WeightsError: the weights do not fit those before; nothing was sent.
            WorkerError: a worker could not load them.
            WorkerDied: a worker has ended.
            ClosedError: a worker takes no more weights.
            CollectorTimeout: a worker has not loaded them within 60 s.
        """
        workers = self._workers
        if not (workers and self._connected):
            raise RuntimeError("send needs init_on_sender and connect before")
        per_worker = by_worker(weights)
        if worker_ids is None:
            worker_ids = list(weights) if per_worker else list(workers)
        chosen = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        unknown = [w for w in chosen if w not in workers or (per_worker and w not in weights)]
        if unknown:
            raise ConfigError(f"no weights for, or no workers {unknown}: {list(workers)}")
        for index in chosen:
            workers[index].settle()
        ready = [workers[w].ready(weights[w] if per_worker else weights) for w in chosen]
        self._number += 1
        for index, values in zip(chosen, ready, strict=True):
            workers[index].post(values, self._number)
        end = time.monotonic() + _WAIT_S
        for index in chosen if self.sync else ():
            workers[index].wait(end)

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
        """Send or receive no more weights. Weights sent before still arrive."""
        workers, receiver = self._workers, self._receiving
        self._workers, self._receiving, self._connected = {}, None, False
        end = time.monotonic() + _WAIT_S
        for worker in workers.values():
            worker.end(end)
        if receiver is not None:
            receiver.shutdown()

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this process sends."""
        return bool(self._workers)

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this process gets weights."""
        return self._receiving is not None

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
        """The weights to send now (to the first worker), or the weights that arrived last."""
        for worker in self._workers.values():
            return _tree_of(worker.weights())
        return None if self._receiving is None else self._receiving.weights

    @property
    def model(self) -> nn.Module | None:
        """The receiver's model."""
        return None if self._receiving is None else self._receiving.model

    @property
    def version(self) -> int:
        """On the receiver: the number of the `send` whose weights arrived last; at first 0."""
        return self._receiver().version

    @property
    def lock(self) -> Condition:
        """On the receiver: held while weights are loaded; hold it to use weights of one version."""
        return self._receiver().lock

    def _receiver(self) -> _Receiver:
        if self._receiving is None:
            raise RuntimeError("this process has not called init_on_receiver")
        return self._receiving

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

    The default. Publishing costs one copy, whatever the number of workers, and never waits.
    """

    _standalone = True

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        """Describe the scheme; see `WeightSyncScheme`.

        ``per_worker_weights`` is accepted for compatibility: ``weights={0: ..., 1: ...}`` always
        gives each worker its own.
        """
        super().__init__(strategy, sync)
        self.per_worker_weights = per_worker_weights


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Send weights to each worker of a collector as a message of its own."""

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

        ``backend`` and ``timeout`` are accepted for compatibility: the collector's backend is used,
        and no update waits.
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
        """Describe the scheme; see `WeightSyncScheme`. ``backend`` has no effect."""
        super().__init__(strategy, sync)
        self.backend = backend


class NoWeightSyncScheme(WeightSyncScheme):
    """Never update the model: a fixed policy. Methods that would send or receive do nothing."""

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


# -- without a collector -------------------------------------------------------------------------


@dataclass
class _Link:
    """The shared part of both processes of one worker; travels as an argument of its process."""

    messages: Queue[bytes | None]
    acks: Connection
    replies: Connection
    memory: SharedMemory
    ref: WeightsRef


def _tree_of(weights: Mapping[str, Any]) -> TensorDictBase:
    """Return the tensors as a `TensorDict` that is nested by module."""
    return TensorDict(_tensors(weights)).unflatten_keys(".")


def _tensors(weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def _count_workers(devices: Sequence[Any] | None, num_workers: int | None) -> int:
    counts = {n for n in (num_workers, None if devices is None else len(devices)) if n is not None}
    if len(counts) != 1 or min(counts) < 1:
        raise ConfigError(
            f"num_workers ({num_workers}) or devices ({devices}) must say how many workers there "
            "are, at least one, and not contradict each other"
        )
    return counts.pop()


class _Worker:
    """The sender's side of one worker."""

    def __init__(
        self,
        index: int,
        source: Any,
        map_fn: _MapFn | None,
        memory: SharedMemory,
        ctx: BaseContext,
    ) -> None:
        self.index, self._source, self._map_fn = index, source, map_fn
        self._first = first = self.weights()
        tensors = _tensors(first)
        if isinstance(source, nn.Module) and map_fn is None:
            self._shapes = shapes_of(source)
        else:
            self._shapes = {n: (tuple(t.shape), t.dtype, True) for n, t in tensors.items()}
        acks, replies = ctx.Pipe(duplex=False)
        ref = reserve_shared(memory, tensors)
        self._publisher = SharedWeightPublisher(memory, ref)
        self.link = _Link(ctx.Queue(), acks, replies, memory, ref)
        self.link.messages.cancel_join_thread()  # a lost worker must not keep this process
        self._sent, self._acked = _HELLO, _HELLO
        self._pid: int | None = None
        self._left = False

    def weights(self, source: Any = None) -> Weights:
        """Return the weights in ``source``, or those of this worker as they are now."""
        source = self._source if source is None else source
        if self._map_fn is not None:
            source = self._map_fn(self.index, _tree_of(weights_of(source)))
        return weights_of(source)

    def ready(self, source: Any) -> Weights:
        """Return the weights in ``source`` as the worker needs them."""
        weights = self.weights(source)
        check_tensors("the worker's model", self._shapes, weights)
        whole = {name: weights.get(name, value) for name, value in self._first.items()}
        return {n: torch.as_tensor(v) if n in self._shapes else v for n, v in whole.items()}

    def post(self, weights: Weights, number: int) -> None:
        """Send them without waiting."""
        self._publisher.publish(list(_tensors(weights).values()), number, number)
        extra = {n: v for n, v in weights.items() if not isinstance(v, torch.Tensor)}
        self._sent = number
        self.link.messages.put(pickle.dumps((number, extra)))

    def settle(self) -> None:
        """Read the answers that have arrived."""
        while self.link.acks.poll():
            self._take()
        self._check()

    def wait(self, end: float) -> None:
        """Wait until all that was sent is in the worker's model."""
        while self._acked < self._sent:
            left = end - time.monotonic()
            if self.link.acks.poll(max(0.0, min(_LOOK_S, left))):
                self._take()
                continue
            self._check()
            if left <= 0:
                raise CollectorTimeout(
                    f"worker {self.index} has not taken the weights within {_WAIT_S:g} s: it must "
                    "call init_on_receiver and connect"
                )

    def _check(self) -> None:
        name = f"worker {self.index}"
        if self._left:
            raise ClosedError(f"{name} has called shutdown: it takes no more weights")
        if self._pid is not None and _has_ended(self._pid):
            raise WorkerDied(f"{name} (process {self._pid}) has ended: it takes no more weights")

    def _take(self) -> None:
        number, self._pid, error = self.link.acks.recv()
        self._left = number is None
        if number is not None:
            self._acked = max(self._acked, number)
        if error is not None:
            raise WorkerError(f"worker {self.index} could not load the weights: {error}")

    def end(self, end: float) -> None:
        self.link.messages.put(None)
        with suppress(GleanError, OSError, EOFError):
            self.settle()
            if self._pid is not None:
                self.wait(end)
        self.link.messages.close()


class _Receiver:
    """The side that has the model. A thread of its own loads weights on arrival."""

    def __init__(self, link: _Link, model: nn.Module | None) -> None:
        """Report the start of this process to the sender."""
        self.model = model
        self.version = 0
        """The number of the `send` whose weights the model has; 0: those of `connect`."""
        self.lock = threading.Condition(threading.RLock())
        """Held while weights are loaded: under it the weights are of one version."""
        self._link = link
        self._receiver = SharedWeightReceiver(link.memory)
        self._receiver.bind("", link.ref)
        self._weights: Weights = {}
        self._returned = 0
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        link.messages.cancel_join_thread()
        self._reply(_HELLO)

    @property
    def weights(self) -> TensorDictBase:
        """A copy of the weights that arrived last."""
        with self.lock:
            return _tree_of(cloned(self._weights))

    def connect(self) -> None:
        """Wait for the first weights, load them and begin to take others."""
        try:
            message = self._link.messages.get(timeout=_WAIT_S)
        except queue.Empty:
            raise CollectorTimeout(
                f"no weights came within {_WAIT_S:g} s: the sender must call connect"
            ) from None
        if message is None:
            raise ClosedError("the sender has called shutdown")
        self._load(message)
        self._thread.start()

    def receive(self, timeout: float | None) -> TensorDictBase | None:
        """Return weights that arrived since the last call, waiting up to ``timeout`` seconds."""
        with self.lock:
            if not self.lock.wait_for(lambda: self.version > self._returned, timeout or 0.0):
                return None
            self._returned = self.version
            return self.weights

    def apply(self, weights: Any) -> None:
        """Load ``weights`` into the model."""
        if self.model is None:
            raise WeightsError("there is no model to load weights into: init_on_receiver(model=)")
        with self.lock:
            load_weights(self.model, weights_of(weights))

    def _run(self) -> None:
        for message in iter(self._link.messages.get, None):
            with suppress(Exception):  # the sender got the error
                self._load(message)
        self._reply(None)

    def _load(self, message: bytes) -> None:
        number, extra = pickle.loads(message)
        error: str | None = None
        try:
            with self.lock:
                newest = self._receiver.newest()  # none if a message before this one found them
                if newest is not None:
                    self._weights, version = dict(newest.models[""]), newest.version
                else:
                    version = self.version
                self._weights.update(extra)
                if self.model is not None:
                    load_weights(self.model, self._weights)
                self.version = version
                self.lock.notify_all()
        except Exception as err:
            error = f"{type(err).__name__}: {err}"[:_MOST_TEXT]
            raise
        finally:
            self._reply(number, error)

    def _reply(self, number: int | None, error: str | None = None) -> None:
        with suppress(OSError):  # the sender has ended
            self._link.replies.send((number, os.getpid(), error))

    def shutdown(self) -> None:
        """Take no more weights."""
        if self._thread.is_alive():
            self._link.messages.put(None)
            self._thread.join(_WAIT_S)


def _has_ended(pid: int) -> bool:
    multiprocessing.active_children()  # those that ended are no longer processes after this
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs, as another user
        pass
    return False
