"""Weights from one process to others without a collector, as a scheme's own methods send them.

Per worker:

    sender -- (number, values) --> queue -> the receiver's thread -> model
    sender <- (number, pid, error) -- pipe

Message 0 is `connect`'s, and ``None`` ends the thread. With shared memory the tensors lie
there, and the message only has what is no tensor. The tensors of one message become the model's
under the receiver's lock.
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
from multiprocessing.reduction import DupFd
from typing import Any

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
)
from gleanrl.core.messages import WeightsRef
from gleanrl.memory.shared import SharedMemory
from gleanrl.weights.shared import SharedWeightPublisher, SharedWeightReceiver, reserve_shared
from gleanrl.weights.snapshot import (
    Weights,
    check_shapes,
    check_values,
    cloned,
    load_weights,
    shapes_of,
    weights_of,
)

WAIT_S = 60.0
"""How long a process waits for the other one."""
_LOOK_S = 0.2
_HELLO = -1
_MOST_TEXT = 2000
"""Characters of an error: a pipe takes so many at once or not at all."""

MapFn = Callable[[int, TensorDictBase], Any]


class _Memory(SharedMemory):
    """Shared memory that can be an argument of a process."""

    def __reduce__(self) -> Any:
        return _adopt, (DupFd(self.fd),)


def _adopt(handle: Any) -> _Memory:
    return _Memory(handle.detach())


@dataclass
class Link:
    """What both processes have of one worker; it travels as an argument of its process."""

    messages: Queue[bytes | None]
    acks: Connection
    replies: Connection
    memory: _Memory | None
    ref: WeightsRef | None


@dataclass
class Source:
    """Where the weights of one worker come from."""

    given: Any
    map_fn: MapFn | None
    worker: int

    def weights(self, given: Any = None) -> Weights:
        """Return the weights in ``given``, or those of the source as they are now."""
        given = self.given if given is None else given
        if self.map_fn is not None:
            given = self.map_fn(self.worker, tree_of(weights_of(given)))
        return weights_of(given)


def tree_of(weights: Mapping[str, Any]) -> TensorDictBase:
    """Return the tensors as a `TensorDict` that is nested by module."""
    tensors = {n: value for n, value in weights.items() if isinstance(value, torch.Tensor)}
    return TensorDict(tensors).unflatten_keys(".")


def sources_of(
    model: nn.Module | None,
    weights: Any,
    params_map: Mapping[int, Any] | None,
    devices: Sequence[Any] | None,
    device_map_fn: MapFn | None,
    num_workers: int | None,
) -> dict[int, Source]:
    """Return the source of every worker; see `WeightSyncScheme.init_on_sender`.

    Raises:
        ConfigError: arguments that contradict each other, or too few.
    """
    given = [value for value in (model, weights, params_map) if value is not None]
    if len(given) != 1:
        raise ConfigError(f"give one of model, weights and params_map, not {len(given)}")
    if params_map is not None:
        if any(value is not None for value in (devices, device_map_fn, num_workers)):
            raise ConfigError("params_map says it all: no devices, device_map_fn, num_workers")
        return {worker: Source(value, None, worker) for worker, value in params_map.items()}
    counts = {n for n in (num_workers, None if devices is None else len(devices)) if n is not None}
    if len(counts) != 1 or min(counts) < 1:
        raise ConfigError(
            f"num_workers ({num_workers}) or devices ({devices}) must say how many workers there "
            "are, at least one, and not contradict each other"
        )
    return {worker: Source(given[0], device_map_fn, worker) for worker in range(counts.pop())}


class Sender:
    """The side that has the weights."""

    def __init__(
        self, sources: Mapping[int, Source], shared: bool, ctx: BaseContext | None
    ) -> None:
        """Make the links; nothing is sent yet."""
        ctx = multiprocessing.get_context() if ctx is None else ctx
        firsts = {worker: source.weights() for worker, source in sources.items()}
        memory = _Memory() if shared else None
        self.links: dict[int, Link] = {}
        for worker, first in firsts.items():
            acks, replies = ctx.Pipe(duplex=False)
            ref = None if memory is None else reserve_shared(memory, _tensors(first))
            self.links[worker] = Link(ctx.Queue(), acks, replies, memory, ref)
        self._workers = {
            worker: _Worker(sources[worker], firsts[worker], self.links[worker])
            for worker in sources
        }
        self._number = 0

    @property
    def weights(self) -> TensorDictBase:
        """The first worker's weights as they would be sent now."""
        return tree_of(next(iter(self._workers.values())).source.weights())

    def connect(self, given: Any = None) -> None:
        """Send the first weights; waits for nobody, so the workers may start later."""
        for worker in self._workers.values():
            worker.post(worker.ready(given), 0)

    def send(self, given: Any, worker_ids: int | Sequence[int] | None, wait: bool) -> None:
        """Send weights; with ``wait``, until the workers' models have them."""
        targets = self._targets(given, worker_ids)
        for worker, _ in targets:
            worker.settle()
        ready = [(worker, worker.ready(own)) for worker, own in targets]
        self._number += 1
        for worker, weights in ready:
            worker.post(weights, self._number)
        end = time.monotonic() + WAIT_S
        for worker, _ in targets:
            if wait:
                worker.wait(end)

    def _targets(
        self, given: Any, worker_ids: int | Sequence[int] | None
    ) -> list[tuple[_Worker, Any]]:
        each = type(given) is dict and bool(given) and all(isinstance(key, int) for key in given)
        if worker_ids is None:
            worker_ids = list(given) if each else list(self._workers)
        chosen = [worker_ids] if isinstance(worker_ids, int) else list(worker_ids)
        unknown = [w for w in chosen if w not in self._workers or (each and w not in given)]
        if unknown:
            raise ConfigError(f"no weights for, or no workers {unknown}: {list(self._workers)}")
        return [(self._workers[w], given[w] if each else given) for w in chosen]

    def shutdown(self) -> None:
        """End the receivers' threads once they have taken what was sent to them."""
        end = time.monotonic() + WAIT_S
        for worker in self._workers.values():
            worker.end(end)


class _Worker:
    """One worker, as the sender sees it."""

    def __init__(self, source: Source, first: Weights, link: Link) -> None:
        self.source = source
        self._first = first
        if isinstance(source.given, nn.Module) and source.map_fn is None:
            self._shapes = shapes_of(source.given)
        else:
            self._shapes = {name: (tuple(t.shape), True) for name, t in _tensors(first).items()}
        self._dtypes = {name: t.dtype for name, t in _tensors(first).items()}
        self._link = link
        shared = link.memory is not None and link.ref is not None
        self._publisher = SharedWeightPublisher(link.memory, link.ref) if shared else None  # type: ignore[arg-type]
        link.messages.cancel_join_thread()  # a worker that is gone must not keep this process
        self._sent, self._acked = _HELLO, _HELLO
        self._pid: int | None = None
        self._left = False

    def ready(self, given: Any) -> Weights:
        """Return the weights in ``given`` as the worker needs them."""
        weights = self.source.weights(given)
        check_shapes("the worker's model", self._shapes, weights)
        check_values("the worker's model", weights, self._dtypes)
        whole = {name: weights.get(name, value) for name, value in self._first.items()}
        return {n: torch.as_tensor(v) if n in self._dtypes else v for n, v in whole.items()}

    def post(self, weights: Weights, number: int) -> None:
        """Send them without waiting."""
        if self._publisher is not None:
            self._publisher.publish(list(_tensors(weights).values()), number, number)
            values = {n: v for n, v in weights.items() if not isinstance(v, torch.Tensor)}
        else:
            values = {
                name: value.cpu() if isinstance(value, torch.Tensor) else value
                for name, value in cloned(weights).items()
            }
        self._sent = number
        self._link.messages.put(pickle.dumps((number, values)))

    def settle(self) -> None:
        """Look at the answers that are there."""
        while self._link.acks.poll():
            self._take()
        self._check()

    def wait(self, end: float) -> None:
        """Wait until all that was sent is in the worker's model."""
        while self._acked < self._sent:
            left = end - time.monotonic()
            if self._link.acks.poll(max(0.0, min(_LOOK_S, left))):
                self._take()
                continue
            self._check()
            if left <= 0:
                raise CollectorTimeout(
                    f"worker {self.source.worker} has not taken the weights within {WAIT_S:g} s: "
                    "it must call init_on_receiver and connect"
                )

    def _check(self) -> None:
        name = f"worker {self.source.worker}"
        if self._left:
            raise ClosedError(f"{name} has called shutdown: it takes no more weights")
        if self._pid is not None and _is_gone(self._pid):
            raise WorkerDied(f"{name} (process {self._pid}) has ended: it takes no more weights")

    def _take(self) -> None:
        number, self._pid, error = self._link.acks.recv()
        self._left = number is None
        if number is not None:
            self._acked = max(self._acked, number)
        if error is not None:
            raise WorkerError(f"worker {self.source.worker} could not load the weights: {error}")

    def end(self, end: float) -> None:
        self._link.messages.put(None)
        with suppress(GleanError, OSError, EOFError):
            self.settle()
            if self._pid is not None:
                self.wait(end)
        self._link.messages.close()


class Receiver:
    """The side that has the model. A thread of its own loads what arrives."""

    def __init__(self, link: Link, model: nn.Module | None) -> None:
        """Tell the sender that this process is there."""
        self.model = model
        self.version = 0
        """The number of the `send` whose weights the model has; 0: those of `connect`."""
        self.lock = threading.Condition(threading.RLock())
        """Held while weights are loaded: whoever holds it sees weights of one version."""
        self._link = link
        self._receiver: SharedWeightReceiver | None = None
        if link.memory is not None and link.ref is not None:
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
            return tree_of(cloned(self._weights))

    def connect(self) -> None:
        """Wait for the first weights, load them and begin to take others."""
        try:
            message = self._link.messages.get(timeout=WAIT_S)
        except queue.Empty:
            raise CollectorTimeout(
                f"no weights came within {WAIT_S:g} s: the sender must call connect"
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
            with suppress(Exception):  # the sender was told
                self._load(message)
        self._reply(None)

    def _load(self, message: bytes) -> None:
        number, values = pickle.loads(message)
        error: str | None = None
        try:
            with self.lock:
                version = self._look(number, values)
                if self.model is not None:
                    load_weights(self.model, self._weights)
                self.version = version
                self.lock.notify_all()
        except Exception as err:
            error = f"{type(err).__name__}: {err}"[:_MOST_TEXT]
            raise
        finally:
            self._reply(number, error)

    def _look(self, number: int, values: Weights) -> int:
        """Take the newest weights; return their number."""
        if self._receiver is None:
            self._weights = values
            return number
        newest = self._receiver.newest()
        if newest is None:  # a message before this one found them
            self._weights.update(values)
            return self.version
        self._weights = {**newest.models[""], **values}
        return newest.version

    def _reply(self, number: int | None, error: str | None = None) -> None:
        with suppress(OSError):  # the sender is gone
            self._link.replies.send((number, os.getpid(), error))

    def shutdown(self) -> None:
        """Take no more weights."""
        if self._thread.is_alive():
            self._link.messages.put(None)
            self._thread.join(WAIT_S)


def _tensors(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: value for name, value in weights.items() if isinstance(value, torch.Tensor)}


def _is_gone(pid: int) -> bool:
    multiprocessing.active_children()  # those that ended are no longer processes after this
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, and there
        pass
    return False
