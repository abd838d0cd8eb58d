"""What a worker process runs: build the source, then answer commands until told to end."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from gleanrl.core import messages as m
from gleanrl.memory.arena import map_window
from gleanrl.memory.shared import SharedMemory
from gleanrl.memory.window import RolloutWindow
from gleanrl.rollout.worker import Worker


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """What a worker has to know before anything of the user's is unpickled in it."""

    worker: int
    generation: int
    environment: Mapping[str, str]
    directory: str
    path: tuple[str, ...]
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

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Take down ``error`` with its traceback."""
        try:
            pickled = cloudpickle.dumps((type(error), error.args, vars(error)))
        except Exception:  # whatever the user's exception does when pickled
            pickled = None
        text = "".join(traceback.format_exception(error))
        return cls(pickled, type(error).__qualname__, str(error), text)


def main(connection_fd: int, arena_fd: int, control_fd: int) -> None:
    """Serve one learner over ``connection_fd`` until it says `Close` or goes away."""
    connection = Connection(connection_fd)
    try:
        boot: Bootstrap = pickle.loads(connection.recv_bytes())
        _settle(boot)
        serving = _Serving(connection, boot, SharedMemory(arena_fd), SharedMemory(control_fd))
        serving.run()
    except (EOFError, ConnectionError):
        return  # the learner is gone: nobody is left to tell


def _settle(boot: Bootstrap) -> None:
    """Take over what may have changed in the learner since this process was forked."""
    os.environ.clear()
    os.environ.update(boot.environment)
    os.chdir(boot.directory)
    sys.path[:] = boot.path
    torch.set_num_threads(boot.threads)


class _Serving:
    """The command loop of one worker."""

    def __init__(
        self, connection: Connection, boot: Bootstrap, arena: SharedMemory, control: SharedMemory
    ) -> None:
        self._connection = connection
        self._boot = boot
        self._arena = arena
        self._memory: mmap.mmap | None = None
        self._references: dict[int, m.WindowRef] = {}
        self._windows: dict[int, RolloutWindow] = {}
        self._stop = memoryview(control.map())

    def run(self) -> None:
        """Build the source and answer commands."""
        try:
            factory = cloudpickle.loads(self._boot.factory)
            worker = Worker(self._boot.worker, factory, self._open, self._stop)
            self._answer(worker.ready())
        except Exception as err:
            self._answer(m.Failed(self._boot.worker, err))
            return
        while True:
            command = self._receive()
            self._answer(worker.handle(command))
            if isinstance(command, m.Close):
                return

    def _receive(self) -> m.Command:
        command: m.Command = cloudpickle.loads(self._connection.recv_bytes())
        if isinstance(command, m.Collect):
            # A window is described in full the first time only.
            reference = command.window
            if reference.blocks:
                self._references[reference.slot] = reference
            command = replace(command, window=self._references[reference.slot])
        return command

    def _open(self, reference: m.WindowRef) -> RolloutWindow:
        window = self._windows.get(reference.slot)
        if window is None:
            if self._memory is None:
                self._memory = self._arena.map()
            window = self._windows[reference.slot] = map_window(self._memory, reference)
        return window

    def _answer(self, reply: m.Reply) -> None:
        message: Any = reply
        if isinstance(reply, m.Failed):
            message = m.Failed(reply.worker, RemoteError.of(reply.error))  # type: ignore[arg-type]
        self._connection.send_bytes(cloudpickle.dumps((self._boot.generation, message)))
