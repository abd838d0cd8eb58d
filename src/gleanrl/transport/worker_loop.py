"""The loop of a worker: it builds a source, then answers commands until `Close`."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import platform
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol, TypeAlias, cast

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core import paths
from gleanrl.core.affinity import Processors
from gleanrl.core.errors import ConfigError
from gleanrl.core.protocols import InlineSource, JointAct, Source, SourceFactory, Stop
from gleanrl.core.streams import enter_life
from gleanrl.core.window import Window
from gleanrl.memory.batch_arena import map_window
from gleanrl.memory.shared import SharedMemory
from gleanrl.transport.authenticated_channel import Channel
from gleanrl.transport.data_plane import Connect
from gleanrl.transport.verifying import difference
from gleanrl.transport.wire import CommandReader, frame_of
from gleanrl.weights.published_buffers import SharedWeightReceiver

Received: TypeAlias = m.Command | m.Failed
"""The next thing for a worker: a command, or the answer to one that could not be loaded."""
OpenWindow = Callable[[m.WindowRef], Window]
_IMPORTING = "<frozen importlib._bootstrap>"
"""The file of Python's functions that import."""
_is_worker = False
"""Whether this process is a worker."""


class WeightReceiver(Protocol):
    """The place of weights that are published without messages."""

    def bind(self, model_id: str, ref: m.WeightsRef) -> None:
        """Look at ``ref`` for the weights of ``model_id`` from now on."""

    def newest(self) -> m.Snapshot | None:
        """Return the newest snapshot if it was not returned before."""


class Worker:
    """A source and its number, independent of the way of messages."""

    def __init__(
        self,
        index: int,
        factory: SourceFactory,
        open_window: OpenWindow,
        stop: Stop,
        receiver: WeightReceiver | None = None,
    ) -> None:
        self._index = index
        self._open_window = open_window
        self._stop = stop
        self._receiver = receiver
        self._serials: dict[str, int] = {}
        self._newest, self._version = 0, 0
        self._factory = factory
        self.source: Source = factory(index)
        self._waited, self._idle_since, self._counted_until = 0.0, monotonic(), 0.0
        self._loading, self._loaded_at = 0.0, 0.0
        self._shares: tuple[float, float, float] = 0.0, 0.0, 0.0
        """Of environment and policy in the time of the last rollout that was measured."""

    def ready(self) -> m.Ready:
        """Return the layout of one step."""
        process = os.getpid(), platform.node()
        return m.Ready(self._index, self.source.layout(), process=process)

    def handle(self, ticket: int, command: Received) -> m.Reply:
        """Carry out ``command``; an exception of the user's code becomes a `Failed` reply."""
        began = monotonic()
        self._waited += began - self._idle_since
        try:
            if self._receiver is not None and not isinstance(command, m.NoWeights):
                snapshot = self._receiver.newest()  # a state contains earlier publications
                if snapshot is not None:
                    self._load(snapshot)
            if isinstance(command, m.Collect):
                window, steps = self._window(command.window), command.window.steps
                report = self.source.collect(window, steps, self._stop, command.random)
                self._complete(report, began)
                return m.Rolled(self._index, ticket, report)
            if isinstance(command, m.Failed):
                return command
            return m.Done(self._index, ticket, self._other(command))
        except Exception as err:
            return m.Failed(self._index, ticket, err)
        finally:
            self.answered()

    def collecting(
        self, ticket: int, command: m.Collect, stop: Stop | None = None
    ) -> Generator[JointAct | None, None, m.Rolled | m.Failed]:
        """Collect as `handle` does, but yield as `InlineSource.collecting` does.

        ``stop`` ends this rollout, in place of what ends those of all workers.
        """
        began = monotonic()
        self._waited += began - self._idle_since
        source, steps = cast("InlineSource", self.source), command.window.steps
        try:
            window = self._window(command.window)
            stop = self._stop if stop is None else stop
            report = yield from source.collecting(window, steps, stop, command.random)
            self._complete(report, began)
            return m.Rolled(self._index, ticket, report)
        except Exception as err:
            return m.Failed(self._index, ticket, err)
        finally:
            self.answered()

    def answered(self) -> None:
        """Note that the answer is on its way and the worker waits from now on."""
        self._idle_since = monotonic()

    def _complete(self, report: m.Report, taken: float) -> None:
        """Write into ``report`` how the seconds since the last rollout were spent."""
        end = monotonic()
        if not self._counted_until:  # before the first rollout there was nothing to do
            self._waited, self._counted_until = 0.0, taken
        total, self._counted_until = end - self._counted_until, end
        # Calls of `max` would take half the time of all this: caches are cold.
        begin = taken if taken > self._loaded_at else self._loaded_at
        took, measured = end - begin, report.measured
        if measured is not None:
            env, policy, resets = measured
            whole = took or 1.0
            self._shares = env / whole, policy / whole, resets / whole
        env, policy, resets = self._shares
        env, policy, resets = env * took, policy * took, resets * took
        waited, report.weights_s = self._waited, self._loading
        self._waited = self._loading = 0.0
        report.times = taken, begin, end
        rest = total - waited - env - policy
        report.seconds = env, policy, rest if rest > 0.0 else 0.0, waited, resets

    def _window(self, reference: m.WindowRef) -> Window:
        if reference.blocks:
            return self._open_window(reference)
        return Window({}, reference.envs, reference.steps)  # the rollout will lie elsewhere

    def _load(self, snapshot: m.Snapshot) -> None:
        """Load the models that are newer here: messages and memory may overtake each other."""
        began = monotonic()
        serial, models = snapshot.serial, snapshot.models
        version = snapshot.version if serial >= self._newest else self._version
        newer = {name: w for name, w in models.items() if serial >= self._serial_of(name)}
        self.source.load(m.Snapshot(version, newer, serial))
        self._newest, self._version = max(serial, self._newest), version
        self._serials.update(dict.fromkeys(newer, serial))
        self._loaded_at = monotonic()
        self._loading += self._loaded_at - began

    def _serial_of(self, name: str) -> int:
        """Return the serial number of the newest weights that contain those of model ``name``."""
        known = self._serials.items()
        return max((s for whole, s in known if paths.is_within(name, whole)), default=0)

    def _other(self, command: m.Command) -> Any:
        source = self.source
        match command:
            case m.Load(snapshot):
                return self._load(snapshot)
            case m.Bind(model_id, ref) if self._receiver is not None:
                return self._receiver.bind(model_id, ref)
            case m.Place(base, stride):
                return source.place(base, stride)
            case m.Seed(seed, static, stream):
                return source.seed(seed, static, stream)
            case m.Reset(envs, options):
                return source.reset(envs, options or {})
            case m.SetState(state, strict, pickles):
                return source.load_state(state, strict, pickles)
            case _:
                return self._answer(command)

    def _answer(self, command: m.Command) -> Any:
        """Carry out a command that changes nothing by itself, or the last one."""
        source = self.source
        match command:
            case m.GetState(pickles):
                return source.state(pickles)
            case m.Verify():
                return difference(source, self._factory, self._index, command)
            case m.Call(path, args, kwargs):
                return source.call(path, *args, **(kwargs or {}))
            case m.Get(path):
                return source.get(path)
            case _:
                return source.close()


class Inbox:
    """Commands in the order they are carried out, by one thread: rollouts not begun come last."""

    def __init__(self) -> None:
        self._collects: deque[tuple[int, Received]] = deque()
        self._others: deque[tuple[int, Received]] = deque()
        self._arrived = threading.Condition()

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._others or self._collects)

    def put(self, ticket: int, command: Received) -> None:
        """Queue ``command``; safe in any thread."""
        with self._arrived:
            queue = self._collects if isinstance(command, m.Collect) else self._others
            queue.append((ticket, command))
            self._arrived.notify()

    def next(self) -> tuple[int, Received]:
        """Wait for a command, as long as it takes, and return it and its ticket."""
        with self._arrived:
            while not self:
                self._arrived.wait()
            return (self._others or self._collects).popleft()


class Endpoint(Protocol):
    """A worker's end of its connection to the learner."""

    stop: Stop
    weights: WeightReceiver | None

    def next(self) -> tuple[int, Received]:
        """Wait for the next command; return its ticket and it."""

    def window(self, reference: m.WindowRef) -> Window:
        """Return memory for a rollout into ``reference``; may wait until it is free."""

    def answer(self, reply: m.Reply) -> None:
        """Send a reply, and the rollout it is about."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The properties of this process that may have changed since its zygote was started."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    authkey: bytes = field(default_factory=lambda: bytes(multiprocessing.current_process().authkey))
    """The key of `multiprocessing`, with which proxies of a user's manager connect."""

    def enter(self) -> None:
        """Make them those of the process that this was sent to."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path[:] = self.path
        multiprocessing.current_process().authkey = self.authkey


@dataclass(frozen=True, slots=True)
class Boot:
    """The first message to a worker, without objects of the user's."""

    worker: int
    factory: bytes
    """A pickled `SourceFactory`."""
    threads: int
    """torch threads of the worker."""
    life: int = 0
    """How often this worker was lost before."""
    connect: Connect | None = None
    """Makes a node's side of the transport of data."""
    surroundings: Surroundings | None = None
    """Of the learner, where the worker takes them over."""
    processors: Processors | None = None
    """Those that the worker may use; ``None`` for those of the zygote."""
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    """Where the learner imports from."""

    def prepare(self) -> None:
        """Prepare this process for the user's code."""
        if self.processors is not None:
            os.sched_setaffinity(0, self.processors)
        if self.surroundings is not None:
            self.surroundings.enter()
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        torch.set_num_threads(self.threads)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # the last line must not be lost
                stream.reconfigure(line_buffering=True)
        enter_life(self.life)
        global _is_worker
        _is_worker = True


def refuse_at_import() -> None:
    """Refuse to start workers while a worker imports a module: these would import it in turn."""
    frame = sys._getframe() if _is_worker else None
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING and frame.f_code.co_name == "_find_and_load":
            name = frame.f_locals["name"]
            raise ConfigError(
                f"the import of {name!r} starts workers, each of which imports {name!r} and would "
                "start more: start workers in a function, or under if __name__ == '__main__':"
            )
        frame = frame.f_back


def serve(boot: Boot, endpoint: Endpoint) -> m.Reply:
    """Build the worker and carry out commands until `Close`; exceptions become answers.

    Returns:
        The last answer, which the caller sends: the learner may go away once it has it.
    """
    try:
        factory = cloudpickle.loads(boot.factory)
        worker = Worker(boot.worker, factory, endpoint.window, endpoint.stop, endpoint.weights)
        endpoint.answer(worker.ready())
    except Exception as err:
        return m.Failed(boot.worker, 0, err)
    while True:
        ticket, command = endpoint.next()
        if not isinstance(command, m.Collect):
            endpoint.answer(m.Begun(boot.worker, ticket))
        reply = worker.handle(ticket, command)
        if isinstance(command, m.Close):
            return reply
        endpoint.answer(reply)
        worker.answered()


# -- in a process on the learner's machine ---------------------------------------------------------


def main(connection_fd: int, arena_fd: int, control_fd: int) -> None:
    """Serve one learner over ``connection_fd`` until it says `Close` or goes away."""
    channel = Channel(socket.socket(fileno=connection_fd))
    try:
        boot: Boot = pickle.loads(channel.wait()[0])
        boot.prepare()
        arena, control = SharedMemory(arena_fd), SharedMemory(control_fd)
        endpoint = ProcessEndpoint(channel, boot.worker, arena, control)
        endpoint.answer(serve(boot, endpoint))
    except (EOFError, ConnectionError):
        return  # the learner is gone


class ProcessEndpoint:
    """An `Endpoint`: messages over a socket, rollouts and weights in memory both sides map."""

    def __init__(
        self, channel: Channel, worker: int, arena: SharedMemory, control: SharedMemory
    ) -> None:
        self._channel, self._arena = channel, arena
        self.stop: Stop = memoryview(control.map())
        self.weights: WeightReceiver | None = SharedWeightReceiver(control)
        self._reader = CommandReader(worker)
        self._queue = Inbox()
        self._windows: dict[int, Window] = {}

    def next(self) -> tuple[int, Received]:
        if self._queue:
            self._take_in(self._channel.read())
        while not self._queue:
            self._take_in(self._channel.wait())
        return self._queue.next()

    def _take_in(self, frames: list[bytes]) -> None:
        for frame in frames:
            self._queue.put(*self._reader.read(frame))

    def window(self, reference: m.WindowRef) -> Window:
        window = self._windows.get(reference.slot)
        if window is None:
            window = self._windows[reference.slot] = map_window(self._arena.map(), reference)
        return window

    def answer(self, reply: m.Reply) -> None:
        self._channel.send(frame_of(reply))
