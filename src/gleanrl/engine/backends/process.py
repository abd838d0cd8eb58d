"""Workers in processes of their own: forked from a zygote, talking over one socket each."""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from gleanrl.core import messages as m
from gleanrl.core.errors import (
    ClosedError,
    CollectorTimeout,
    ConfigError,
    WorkerDied,
    WorkerError,
)
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.backends.zygote import Zygote
from gleanrl.memory.shared import SharedMemory
from gleanrl.rollout.serve import Bootstrap, RemoteError

_CONTROL_NBYTES = 4096
_FORK_TIMEOUT = 60.0
_zygote: Zygote | None = None


def zygote() -> Zygote:
    """Return this process's zygote, started on first use."""
    global _zygote
    if _zygote is None or not _zygote.alive:
        _zygote = Zygote()
        atexit.register(_zygote.close)
    return _zygote


class ProcessBackend:
    """One process per worker. Rollouts lie in memory both sides map; only messages travel."""

    def __init__(self, threads: int = 1) -> None:
        """Reserve what workers and learner share.

        Args:
            threads: torch threads of each worker.
        """
        self._threads = threads
        self.memory = SharedMemory()
        """The arena's memory; its size is set once the layout is known."""
        self._control = SharedMemory()
        self._control.resize(_CONTROL_NBYTES)
        self.stop_byte = memoryview(self._control.map())
        """The byte every worker's rollout looks at."""
        self._zygote = zygote()
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._generations: list[int] = []
        self._described: list[set[int]] = []
        self._replies: deque[m.Reply] = deque()

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Fork one worker per factory; all of them build their source at the same time.

        Raises:
            ConfigError: something that cannot be sent to another process.
        """
        pickled = [_pickle(worker, factory) for worker, factory in enumerate(factories)]
        for worker, blob in enumerate(pickled):
            self._fork(worker, blob)

    def _fork(self, worker: int, factory: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            fds = [theirs.fileno(), self.memory.fd, self._control.fd]
            pid = self._zygote.fork(fds, _FORK_TIMEOUT)
        connection = Connection(ours.detach())
        self._connections.append(connection)
        self._pids.append(pid)
        self._generations.append(0)
        self._described.append(set())
        boot = Bootstrap(
            worker=worker,
            generation=0,
            environment=dict(os.environ),
            directory=os.getcwd(),
            path=tuple(sys.path),
            threads=self._threads,
            factory=factory,
        )
        self._post(worker, pickle.dumps(boot))

    def send(self, worker: int, command: m.Command) -> None:
        """Post ``command``."""
        if not self._connections:
            raise ClosedError("the collector was shut down")
        if isinstance(command, m.Collect):
            command = self._abridged(worker, command)
        self._post(worker, cloudpickle.dumps(command))

    def _abridged(self, worker: int, command: m.Collect) -> m.Collect:
        """Leave out the description of a window the worker knows."""
        known, slot = self._described[worker], command.window.slot
        if slot in known:
            return replace(command, window=replace(command.window, blocks=()))
        known.add(slot)
        return command

    def _post(self, worker: int, message: bytes) -> None:
        try:
            self._connections[worker].send_bytes(message)
        except (BrokenPipeError, ConnectionError):
            raise self._died(worker) from None

    def receive(self, timeout: float | None) -> m.Reply:
        """Return the next reply of any worker.

        Raises:
            CollectorTimeout: none came within ``timeout`` seconds.
            WorkerDied: a worker's process ended.
        """
        if not self._replies:
            self._await(timeout)
        return self._replies.popleft()

    def _await(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._replies:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(self._connections, left)
            if not ready:
                raise CollectorTimeout(f"no worker replied within {timeout} s")
            for worker, connection in enumerate(self._connections):
                if connection in ready:
                    self._read(worker)

    def _read(self, worker: int) -> None:
        try:
            generation, reply = pickle.loads(self._connections[worker].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._died(worker) from None
        if generation != self._generations[worker]:
            return  # of a worker that was replaced
        if isinstance(reply, m.Failed):
            reply = m.Failed(worker, raised(worker, reply.error))  # type: ignore[arg-type]
        self._replies.append(reply)

    def _died(self, worker: int) -> WorkerDied:
        status = self._zygote.exit_status(self._pids[worker], 2.0)
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"was killed by signal {-status}"
        else:
            how = f"exited with code {status}"
        return WorkerDied(
            f"worker {worker} (process {self._pids[worker]}) {how}; what it printed last is above"
        )

    def open(self, payload: m.Payload) -> Any:
        """Return the rollout, which travelled with the reply."""
        return payload.handle

    def stop(self, timeout: float) -> None:
        """End all workers: let those that were asked go, kill the rest. Idempotent."""
        connections, self._connections = self._connections, []
        pids, self._pids = self._pids, []
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + timeout
        for pid in pids:
            left = max(0.05, deadline - time.monotonic())
            if self._zygote.exit_status(pid, min(left, 1.0)) is None:
                self._zygote.kill(pid)
        self._replies.clear()
        self.memory.close()
        self._control.close()


def _pickle(worker: int, factory: SourceFactory) -> bytes:
    try:
        return bytes(cloudpickle.dumps(factory))
    except Exception as err:  # whatever the user's objects do when pickled
        raise ConfigError(
            f"what worker {worker} needs cannot be sent to a process ({type(err).__name__}: "
            f"{err}); make it inside a function given as create_env_fn or policy_factory"
        ) from err


def raised(worker: int, remote: RemoteError) -> BaseException:
    """Return what a worker raised as an error of both its own class and `WorkerError`."""
    text = (
        f"worker {worker} raised {remote.kind}: {remote.message}\n\n"
        f"Traceback in worker {worker}:\n{remote.traceback}"
    )
    if remote.error is None:
        return WorkerError(text)
    try:
        kind, args, attributes = pickle.loads(remote.error)
        error: BaseException = _both(kind).__new__(_both(kind), *args)
    except Exception:  # classes that cannot be loaded here, or not combined
        return WorkerError(text)
    error.args = args
    vars(error).update(attributes, _text=text)
    return error


def _both(kind: type[BaseException]) -> type[BaseException]:
    if issubclass(kind, WorkerError):
        return kind
    body = {"__str__": _text, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (WorkerError, kind), body)


def _text(self: BaseException) -> str:
    return str(vars(self)["_text"])
