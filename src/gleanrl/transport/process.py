"""Workers in processes of their own: forked from a zygote, talking over one socket each."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import (
    ClosedError,
    CollectorTimeout,
    WorkerDied,
)
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.memory.available import check_memory
from gleanrl.memory.shared import SharedMemory
from gleanrl.transport.frames import CommandWriter, reply_in
from gleanrl.transport.pickling import pickled
from gleanrl.transport.stream import Channel
from gleanrl.transport.waiting import interruptible
from gleanrl.transport.worker import ProcessBoot, Surroundings
from gleanrl.transport.zygote import Zygote
from gleanrl.weights.board import Board, plan_board

_FORK_TIMEOUT = 60.0
_GRACE = 1.0
"""Seconds within which a worker that was told to end has to be gone."""
_zygote: Zygote | None = None
_starting = threading.RLock()
"""Held while the zygote is started: there is one, whoever asks for it first."""


def _forget() -> None:
    global _zygote, _starting
    if _zygote is not None:  # which has to hear of the end of its owner
        _zygote.close()
    _zygote, _starting = None, threading.RLock()


# Of the threads that may hold the lock, a forked child has none; nor is the zygote its own.
os.register_at_fork(after_in_child=_forget)


class _AtExit:
    """Something to hang a finalizer on that lives as long as the interpreter."""


_AT_EXIT = _AtExit()


def zygote() -> Zygote:
    """Return this process's zygote, started on first use."""
    global _zygote
    with _starting:
        if _zygote is None or not _zygote.alive:
            _zygote = Zygote()
            # At the end of the interpreter finalizers run last made first: collectors, which were
            # made after their zygote, close before it does.
            weakref.finalize(_AT_EXIT, _zygote.close)
        return _zygote


class ProcessBackend:
    """One process per worker. Rollouts lie in memory both sides map; only messages travel."""

    inline = False

    def __init__(self, threads: int = 1) -> None:
        """Reserve what workers and learner share.

        Args:
            threads: torch threads of each worker.
        """
        self._threads = threads
        self._owner = os.getpid()
        self._workers: list[_Process] = []
        self._by_fd: dict[int, _Process] = {}
        self._frames: deque[bytes] = deque()
        with contextlib.ExitStack() as undo:
            self._zygote = zygote()
            self.memory = SharedMemory()
            """The arena's memory."""
            undo.callback(self.memory.close)
            self._control = SharedMemory()  # the stop byte, and boards of weights after it
            undo.callback(self._control.close)
            self._control.reserve(1)
            self._stop_byte: Stop = memoryview(self._control.map())
            self._poller = select.epoll()
            self._ends = select.poll()  # of connections; replies do not show in it
            undo.pop_all()

    @property
    def stop_byte(self) -> Stop:
        """The byte that running rollouts look at; a forked child of the learner gets another."""
        return self._stop_byte if self._owner == os.getpid() else bytearray(1)

    def board(self, weights: Mapping[str, torch.Tensor]) -> Board:
        """Reserve a board in the memory that learner and workers share.

        Raises:
            ConfigError: there is not that much memory.
        """
        nbytes = 3 * sum(tensor.nbytes for tensor in weights.values())
        check_memory(nbytes, "three copies of a model's weights", "use a smaller model")
        return Board(self._control, plan_board(self._control, weights))

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Fork one worker per factory; all of them build their source at the same time.

        Raises:
            ConfigError: something that cannot be sent to another process.
        """
        blobs = [pickled(worker, factory) for worker, factory in enumerate(factories)]
        for worker, blob in enumerate(blobs):
            self._fork(worker, blob)

    def _fork(self, worker: int, factory: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                fds = [theirs.fileno(), self.memory.fd, self._control.fd]
                pid = self._zygote.fork(fds, _FORK_TIMEOUT)
        except BaseException:
            ours.close()
            raise
        process = _Process(worker, pid, Channel(ours), CommandWriter())
        self._workers.append(process)
        self._by_fd[process.channel.fileno()] = process
        self._poller.register(process.channel.fileno(), select.EPOLLIN)
        self._ends.register(process.channel.fileno(), 0)
        boot = ProcessBoot(
            worker=worker,
            surroundings=Surroundings.here(),
            threads=self._threads,
            factory=factory,
        )
        self._post(process, pickle.dumps(boot))

    @property
    def pids(self) -> list[int]:
        """Process ids in worker order."""
        return [process.pid for process in self._workers]

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Post ``command``; if the worker is gone, `receive` says so, after what it had sent.

        Raises:
            ClosedError: after `stop`.
            WorkerDied: `receive` has said already that the worker's process ended.
        """
        if not self._workers:
            raise ClosedError("the collector was shut down")
        process = self._workers[worker]
        self._post(process, process.writer.write(ticket, command))

    def _post(self, process: _Process, frame: bytes) -> None:
        if process.channel.fileno() < 0:
            raise self._died(process)
        with contextlib.suppress(ConnectionError):
            process.channel.post(frame)
        if process.channel.pending:
            self._poller.modify(process.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def receive(self, timeout: float | None) -> m.Reply:
        """Return the next reply of any worker; replies that came earlier come first.

        Raises:
            CollectorTimeout: none came within ``timeout`` seconds.
            WorkerDied: a worker's process ended.
        """
        if not self._frames:
            self._await(timeout)
        reply = reply_in(self._frames[0])
        self._frames.popleft()  # now: an interrupt while it was being read must not lose it
        return reply

    def sound(self) -> bool:
        """Whether no worker's end of its connection is closed."""
        return not self._ends.poll(0)

    def wait(self, timeout: float) -> None:
        """Wait until there may be a reply; safe while another thread uses the backend."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._poller.poll(timeout)

    def _await(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._frames:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = interruptible(self._poller.poll, left)
            if not ready and (left is not None and left <= 0.0):
                raise CollectorTimeout(f"no worker replied within {timeout} s")
            for fd, events in ready:
                self._serve(self._by_fd[fd], events)

    def _serve(self, process: _Process, events: int) -> None:
        channel = process.channel
        # Read first: what a worker sent before it ended is whole, and so is what it is about.
        if events & ~select.EPOLLOUT:
            try:
                self._frames.extend(channel.read())
            except EOFError:
                raise self._died(process) from None
        if events & select.EPOLLOUT:
            with contextlib.suppress(ConnectionError):
                channel.flush()
            if not channel.pending:
                self._poller.modify(channel.fileno(), select.EPOLLIN)

    def _died(self, process: _Process) -> WorkerDied:
        # First: an interrupt meanwhile must not lose the news.
        status = interruptible(self._zygote.exit_status, process.pid, 2.0)
        if process.channel.fileno() >= 0:
            self._poller.unregister(process.channel.fileno())
            self._ends.unregister(process.channel.fileno())
            self._by_fd.pop(process.channel.fileno())
            process.channel.close()
        if status is None:
            how = "closed its connection"
        elif status < 0:
            how = f"was killed by signal {-status}"
        else:
            how = f"exited with code {status}"
        error = WorkerDied(
            f"worker {process.worker} (process {process.pid}) {how}; what it printed last is above"
        )
        error.worker = process.worker
        return error

    def open(self, payload: m.Payload) -> Any:
        """Return the rollout, which travelled with the reply."""
        return payload.handle

    def stop(self, timeout: float) -> None:
        """End all workers: let those that were asked go, kill the rest. Idempotent."""
        processes, self._workers = self._workers, []
        self._frames.clear()
        self._by_fd.clear()
        for process in processes:
            process.channel.close()
        deadline = time.monotonic() + min(timeout, _GRACE)
        # In a forked child of the learner they are somebody else's workers.
        for process in processes if self._owner == os.getpid() else ():
            left = max(0.0, deadline - time.monotonic())
            if self._zygote.exit_status(process.pid, left) is None:
                self._zygote.kill(process.pid)
        self._poller.close()
        self.memory.close()
        self._control.close()


@dataclass(frozen=True, slots=True)
class _Process:
    """One worker, seen from here."""

    worker: int
    pid: int
    channel: Channel
    writer: CommandWriter
