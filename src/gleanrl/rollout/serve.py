"""What a worker process runs: build the source, then answer commands until told to end."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import GleanError, WorkerError, error_text
from gleanrl.memory.arena import map_window
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.channel import Channel
from gleanrl.rollout.inbox import Addressed, Queued, work
from gleanrl.rollout.wire import CommandReader, head_of, write_reply
from gleanrl.rollout.worker import Worker
from gleanrl.weights.board import Boards


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
class Bootstrap:
    """What a worker has to know before anything of the user's is unpickled in it."""

    worker: int
    surroundings: Surroundings
    threads: int
    factory: bytes
    """A pickled `SourceFactory`."""


@dataclass(frozen=True, slots=True)
class RemoteError:
    """An exception on its way to the learner."""

    error: bytes | None
    """Class, arguments and attributes, pickled, if they can be."""
    kind: str
    message: str
    traceback: str
    passed_on: bool = False
    """Whether it was raised in a worker of the worker: ``message`` says where, and what it is."""

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Take down ``error`` with its traceback."""
        try:
            pickled = cloudpickle.dumps((type(error), error.args, vars(error)))
        except Exception:  # whatever the user's exception does when pickled
            pickled = None
        try:
            text = "".join(traceback.format_exception(error))
        except Exception as err:
            text = f"(the traceback cannot be shown: {type(err).__name__})"
        if isinstance(error, WorkerError) and error.headline:
            return cls(pickled, type(error).__qualname__, error.headline, text, passed_on=True)
        return cls(pickled, type(error).__qualname__, error_text(error), text)


def main(connection_fd: int, arena_fd: int, control_fd: int) -> None:
    """Serve one learner over ``connection_fd`` until it says `Close` or goes away."""
    channel = Channel(socket.socket(fileno=connection_fd))
    try:
        boot: Bootstrap = pickle.loads(channel.wait()[0])
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
        self, channel: Channel, boot: Bootstrap, arena: SharedMemory, control: SharedMemory
    ) -> None:
        self._channel = channel
        self._boot = boot
        self._arena = arena
        self._control = control
        self._reader = CommandReader()
        self._queued = Queued()
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


def frame_of(reply: m.Reply) -> bytes:
    """Return ``reply`` as a frame; one that cannot be pickled becomes a failure that says so."""
    if isinstance(reply, m.Failed):
        remote = RemoteError.of(reply.error)
        reply = m.Failed(reply.worker, reply.ticket, remote)  # type: ignore[arg-type]
    try:
        return write_reply(reply)
    except Exception as err:  # whatever the user's objects do when pickled
        return frame_of(m.Failed(reply.worker, reply.ticket, unsendable(err)))


def unsendable(err: Exception) -> GleanError:
    """Return the error for an answer that could not be pickled."""
    return GleanError(
        f"the answer cannot be sent to the learner's process ({type(err).__name__}: "
        f"{error_text(err)}); ask for an attribute that can be pickled"
    )


def unreadable(err: Exception) -> GleanError:
    """Return the error for a command that could not be unpickled."""
    found = GleanError(
        f"what was sent cannot be loaded in the worker's process ({type(err).__name__}: "
        f"{error_text(err)}); send what can be unpickled there"
    )
    found.__cause__ = err
    return found
