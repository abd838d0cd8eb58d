"""Workers seen from the learner, and the common part of backends with workers elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import WORKER_NAME, ClosedError, CollectorTimeout, WorkerDied
from gleanrl.core.platforms import require_linux
from gleanrl.transport.authenticated_channel import Channel
from gleanrl.transport.wire import CommandWriter, reply_in


class RemoteFlag:
    """A stop byte of workers that share no memory with the learner; any thread may set it."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._value = 0
        self._tell = tell
        self._lock = threading.Lock()

    def __getitem__(self, index: int, /) -> int:
        return self._value

    def __setitem__(self, index: int, value: int, /) -> None:
        raised = int(bool(value))
        with self._lock:
            if raised != self._value:
                self._value = raised
                self._tell(raised)


class Peer(Protocol):
    """A worker seen from the learner."""

    index: int

    @property
    def gone(self) -> bool:
        """Whether nothing can be sent to it any more."""


P = TypeVar("P", bound=Peer)
C = TypeVar("C", bound="ChannelPeer")


class RemoteBackend(ABC, Generic[P]):
    """A `Backend` whose workers are not in the calling thread.

    A kind of worker says how a command is sent (`_post`), how replies come in (`_poll` puts their
    frames into `_arrived`), and what became of a worker that is gone (`_exit_reason`).
    """

    inline, worker_name = False, WORKER_NAME
    memory: Any = None
    _looks_first = False
    """Whether `receive` first receives without waiting, so that silence counts from then on."""

    def __init__(self) -> None:
        require_linux("workers in other processes")
        self._owner = os.getpid()
        self._peers: dict[int, P] = {}
        """By worker; empty before `start` and after `stop`."""
        self._arrived: deque[Any] = deque()
        """Frames of replies, in the order in which they came."""

    @abstractmethod
    def _post(self, peer: P, ticket: int, command: m.Command) -> None:
        """Send ``command``, without waiting; raises `_died` if ``peer`` is known to be gone."""

    @abstractmethod
    def _poll(self, timeout: float | None) -> float | None:
        """Wait at most ``timeout`` seconds for messages, and receive them.

        Returns:
            Seconds until the next call without a message; ``None`` for any time.

        Raises:
            WorkerDied: a worker is gone, after everything that it had sent.
        """

    @abstractmethod
    def _exit_reason(self, peer: P, reason: str) -> str:
        """Return how ``peer`` ended; by default ``reason``, the news of its connection.

        Only waits in it are `interruptible`, and lose nothing.
        """

    @abstractmethod
    def _drop(self, peer: P) -> None:
        """Forget ``peer``, which is gone. Idempotent."""

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Post ``command``; if the worker is gone, `receive` says so, after its last messages.

        Raises:
            WorkerDied: `receive` has said already that the worker is gone.
        """
        peer = self._peers.get(worker)
        if peer is None:
            raise ClosedError("the collector was shut down")
        self._post(peer, ticket, command)

    def receive(self, timeout: float | None) -> m.Reply:
        """Return the next reply of any worker, whose rollout is in its window by then."""
        if self._arrived and (frame := self._next()) is not None:
            return reply_in(frame, self.worker_name)
        deadline, wait = Deadline(timeout), 0.0 if self._looks_first else timeout
        while True:
            soon = self._poll(wait)
            if (frame := self._next()) is not None:
                return reply_in(frame, self.worker_name)
            if deadline.expired:
                raise CollectorTimeout(f"no worker replied within {timeout} s")
            wait = deadline.timeout if soon is None else min(soon, deadline.left)

    def _next(self) -> bytes | None:
        """Take the oldest reply whose data are here, if there is one."""
        return self._arrived.popleft() if self._arrived else None

    def _died(self, peer: P, reason: str) -> WorkerDied:
        """Forget ``peer``, which is gone; return the error that says so."""
        text = self._exit_reason(peer, reason)  # first: an interrupt must not lose the news
        self._drop(peer)
        return WorkerDied(f"{self.worker_name.format(peer.index)} {text}", worker=peer.index)

    def no_end_noticed(self) -> bool:
        """Return False: only `receive` can tell."""
        return False

    def end(self, worker: int) -> bool:
        """Forget ``worker``, whose process may still run for a while."""
        if worker in self._peers:
            self._drop(self._peers[worker])
        return False


class ChannelPeer:
    """A worker on the other end of a `Channel`."""

    def __init__(self, index: int, channel: Channel) -> None:
        self.index, self.channel = index, channel
        self.writer = CommandWriter()
        self.watched_for = 0
        """Events of the channel that are waited for."""
        self.gone = False
        """Whether its connection was closed here."""

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.flush()


class ChannelBackend(RemoteBackend[C]):
    """A `RemoteBackend` with a `Channel` to every worker; it waits for all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self._poller = select.epoll()
        self._by_fd: dict[int, C] = {}
        """Workers that are waited for, by descriptor."""

    def _watch(self, peer: C) -> None:
        """Wait for frames of ``peer``, and for room if frames for it are waiting."""
        fd = peer.channel.fileno()
        wanted = select.EPOLLIN | (select.EPOLLOUT if peer.channel.pending else 0)
        if not peer.watched_for:
            self._by_fd[fd] = peer
            self._poller.register(fd, wanted)
        elif wanted != peer.watched_for:
            self._poller.modify(fd, wanted)
        peer.watched_for = wanted

    def wait(self, timeout: float) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._poller.poll(timeout)

    def _drop(self, peer: C) -> None:
        if not peer.gone:
            fd, peer.gone = peer.channel.fileno(), True
            if self._by_fd.pop(fd, None) is not None:
                self._poller.unregister(fd)
            peer.channel.close()
