"""One worker: carries out commands on its source and answers each with one reply."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.protocols import Source, SourceFactory, Stop
from gleanrl.memory.arena import map_window
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.window import RolloutWindow
from gleanrl.transport.frames import CommandReader, frame_of, head_of, unreadable
from gleanrl.transport.stream import Channel
from gleanrl.weights.board import Boards

OpenWindow = Callable[[m.WindowRef], RolloutWindow]


class WeightReceiver(Protocol):
    """Where weights lie that nobody sent a message about."""

    def bind(self, model_id: str, board: m.BoardRef) -> None:
        """Look at ``board`` for the weights of ``model_id`` from now on."""
        ...

    def newest(self) -> m.Snapshot | None:
        """Return the newest snapshot if it was not returned before."""
        ...


class Worker:
    """A source and its number. Knows nothing of how messages travel."""

    def __init__(
        self,
        index: int,
        factory: SourceFactory,
        open_window: OpenWindow,
        stop: Stop,
        mailbox: WeightReceiver | None = None,
    ) -> None:
        """Build the source here."""
        self._index = index
        self._open_window = open_window
        self._stop = stop
        self._mailbox = mailbox
        self._serials: dict[str, int] = {}
        self._newest, self._version = 0, 0
        self.source: Source = factory(index)

    def ready(self) -> m.Ready:
        """Say what one step looks like."""
        return m.Ready(self._index, self.source.layout())

    def handle(self, ticket: int, command: m.Command) -> m.Reply:
        """Carry out ``command``; what the user's code raises becomes a `Failed` reply."""
        try:
            if not isinstance(command, m.Bind | m.Load | m.Close):
                self._refresh()  # whoever asks for the state gets what was published before
            if isinstance(command, m.Collect):
                return m.Rolled(self._index, ticket, self._collect(command))
            return m.Done(self._index, ticket, self._other(command))
        except Exception as err:
            return m.Failed(self._index, ticket, err)

    def _refresh(self) -> None:
        if self._mailbox is not None:
            snapshot = self._mailbox.newest()
            if snapshot is not None:
                self._load(snapshot)

    def _collect(self, command: m.Collect) -> m.Report:
        window = self._open_window(command.window)
        return self.source.collect(window, command.window.steps, self._stop, command.random)

    def _load(self, snapshot: m.Snapshot) -> None:
        """Load what is newer than what was loaded: messages and memory may overtake each other."""
        serial, models = snapshot.serial, snapshot.models
        version = snapshot.version if serial >= self._newest else self._version
        newer = {name: w for name, w in models.items() if serial >= self._serials.get(name, 0)}
        self.source.load(m.Snapshot(version, newer, serial))
        self._newest, self._version = max(serial, self._newest), version
        self._serials.update(dict.fromkeys(newer, serial))

    def _other(self, command: m.Command) -> Any:
        source = self.source
        match command:
            case m.Load(snapshot):
                return self._load(snapshot)
            case m.Bind(model_id, board) if self._mailbox is not None:
                return self._mailbox.bind(model_id, board)
            case m.Place(base, stride):
                return source.place(base, stride)
            case m.Seed(seed, static, stream):
                return source.seed(seed, static, stream)
            case m.Reset(envs, options):
                return source.reset(envs, options or {})
            case m.GetState():
                return source.state()
            case m.SetState(state, strict):
                return source.load_state(state, strict)
            case m.Call(path, args, kwargs):
                return source.call(path, *args, **(kwargs or {}))
            case m.Get(path):
                return source.get(path)
            case _:
                return source.close()


Addressed = tuple[int, m.Command]
"""A command and its ticket."""


class CommandQueue:
    """Commands in the order they are carried out: rollouts not begun yet come last."""

    def __init__(self) -> None:
        """Start empty."""
        self._collects: deque[Addressed] = deque()
        self._others: deque[Addressed] = deque()

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._others or self._collects)

    def put(self, ticket: int, command: m.Command) -> None:
        """Queue ``command``."""
        queue = self._collects if isinstance(command, m.Collect) else self._others
        queue.append((ticket, command))

    def pop(self) -> Addressed:
        """Return the next command."""
        return (self._others or self._collects).popleft()


class Inbox:
    """Commands that come in from any thread, for one thread to carry out."""

    def __init__(self) -> None:
        """Start empty."""
        self._queued = CommandQueue()
        self._arrived = threading.Condition()

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._queued)

    def put(self, ticket: int, command: m.Command) -> None:
        """Queue ``command``; safe in any thread."""
        with self._arrived:
            self._queued.put(ticket, command)
            self._arrived.notify()

    def next(self) -> Addressed:
        """Wait for a command, as long as it takes, and return it."""
        with self._arrived:
            while not self._queued:
                self._arrived.wait()
            return self._queued.pop()


def work(
    index: int,
    build: Callable[[], Worker],
    following: Callable[[], Addressed],
    answer: Callable[[m.Reply], None],
) -> None:
    """Build a worker and have it carry out commands until `Close`.

    Args:
        index: The worker's.
        build: Builds it here; what that raises is answered under ticket 0.
        following: Waits for the next command.
        answer: Is given every reply.
    """
    try:
        worker = build()
        answer(worker.ready())
    except Exception as err:
        answer(m.Failed(index, 0, err))
        return
    while True:
        ticket, command = following()
        if not isinstance(command, m.Collect):
            answer(m.Begun(index, ticket))
        answer(worker.handle(ticket, command))
        if isinstance(command, m.Close):
            return


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process may have changed since the one it starts workers from was forked."""

    environment: Mapping[str, str]
    directory: str
    path: tuple[str, ...]
    authkey: bytes
    """What `multiprocessing` authenticates with: proxies of a user's manager connect by it."""

    @classmethod
    def here(cls) -> Surroundings:
        """Take down those of this process."""
        authkey = bytes(multiprocessing.current_process().authkey)
        return cls(dict(os.environ), os.getcwd(), tuple(sys.path), authkey)

    def enter(self) -> None:
        """Make them those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path[:] = self.path
        multiprocessing.current_process().authkey = self.authkey


@dataclass(frozen=True, slots=True)
class ProcessBoot:
    """What a worker has to know before anything of the user's is unpickled in it."""

    worker: int
    surroundings: Surroundings
    threads: int
    factory: bytes
    """A pickled `SourceFactory`."""


def main(connection_fd: int, arena_fd: int, control_fd: int) -> None:
    """Serve one learner over ``connection_fd`` until it says `Close` or goes away."""
    channel = Channel(socket.socket(fileno=connection_fd))
    try:
        boot: ProcessBoot = pickle.loads(channel.wait()[0])
        boot.surroundings.enter()
        settle(boot.threads)
        _Serving(channel, boot, SharedMemory(arena_fd), SharedMemory(control_fd)).run()
    except (EOFError, ConnectionError):
        return  # the learner is gone: nobody is left to tell


def settle(threads: int) -> None:
    """Prepare this process for running what users wrote."""
    torch.set_num_threads(threads)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what is printed last must not be lost
            stream.reconfigure(line_buffering=True)


class _Serving:
    """The command loop of one worker."""

    def __init__(
        self, channel: Channel, boot: ProcessBoot, arena: SharedMemory, control: SharedMemory
    ) -> None:
        self._channel = channel
        self._boot = boot
        self._arena = arena
        self._control = control
        self._reader = CommandReader()
        self._queued = CommandQueue()
        self._windows: dict[int, RolloutWindow] = {}

    def run(self) -> None:
        """Build the source and answer commands."""
        work(self._boot.worker, self._build, self._next, self._answer)

    def _build(self) -> Worker:
        stop, boards = memoryview(self._control.map()), Boards(self._control)
        factory = cloudpickle.loads(self._boot.factory)
        return Worker(self._boot.worker, factory, self._open, stop, boards)

    def _next(self) -> Addressed:
        """Return the next command: rollouts not begun yet are overtaken by everything else."""
        if self._queued:
            self._take_in(self._channel.read())
        while not self._queued:
            self._take_in(self._channel.wait())
        return self._queued.pop()

    def _take_in(self, frames: list[bytes]) -> None:
        """Queue the commands in ``frames``; one that cannot be loaded is answered at once."""
        for frame in frames:
            ticket, _ = head_of(frame)
            try:
                command = self._reader.read(frame)
            except Exception as err:  # whatever the user's objects do when unpickled
                self._answer(m.Failed(self._boot.worker, ticket, unreadable(err)))
                continue
            self._queued.put(ticket, command)

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        if not reference.blocks:  # of a source whose rollouts lie elsewhere
            return RolloutWindow({}, reference.envs, reference.steps)
        window = self._windows.get(reference.slot)
        if window is None:
            window = map_window(self._arena.map(), reference)
            self._windows[reference.slot] = window
        return window

    def _answer(self, reply: m.Reply) -> None:
        self._channel.send(frame_of(reply))
