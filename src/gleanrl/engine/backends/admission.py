"""Where nodes knock: one port, and whoever shows that it knows the secret is let in."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gleanrl.core.errors import ConfigError
from gleanrl.rollout.handshake import HandshakeError, Introduction, Keys

LOOK = 0.5
"""Seconds between two looks at what became of nodes that have not joined yet."""
_INTRODUCTION = 2.0
"""Seconds a stranger on the port may take to show that it is a node."""
_NAP = 0.05
"""Seconds in which others may give descriptors back."""
_MOST = 128
"""Strangers that are listened to at a time; others wait until one of them was let in or left."""


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of ``ports`` that is free; warn if that is not the first.

    Raises:
        ConfigError: none is.
    """
    for port in ports:
        try:
            listener = socket.create_server((host, port), backlog=1024)
        except OSError as err:
            if err.errno == errno.EADDRINUSE and port != ports[-1]:
                continue
            where = f"{host}:{port}" if len(ports) == 1 else f"{host}:{ports[0]} to {port}"
            raise ConfigError(
                f"cannot listen for nodes on {where} ({err}); choose another tcp_port or "
                "interface, or leave them out"
            ) from err
        if port != ports[0]:
            warnings.warn(
                f"port {ports[0]} is taken; nodes connect to {port} instead", UserWarning, 3
            )
        return listener
    raise ConfigError("no port to listen for nodes on was given")


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A connection that has not shown yet who it is."""

    sock: socket.socket
    introduction: Introduction
    deadline: float


class Guest(NamedTuple):
    """A node that was let in."""

    node: int
    """Its index."""
    sock: socket.socket
    keys: Keys


class Admission:
    """Lets nodes in, any number at a time: whoever says nothing delays nobody.

    For one thread; `interrupt` is for others.
    """

    def __init__(self, listener: socket.socket, secret: bytes, patience: float) -> None:
        """Take over ``listener``.

        Args:
            listener: Listens.
            secret: What nodes have to know.
            patience: Told to nodes; see `Introduction`.
        """
        listener.setblocking(False)
        self._listener, self._secret, self._patience = listener, secret, patience
        self._strangers: dict[int, _Stranger] = {}
        """By descriptor, longest there first."""
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._bell, select.POLLIN)
        self._poller.register(listener, select.POLLIN)

    def wait(self, timeout: float) -> list[Guest]:
        """Return nodes that were let in; their connections become the caller's.

        Returns as soon as there is one, after ``timeout`` seconds or an `interrupt` with none.
        """
        let_in: list[Guest] = []
        deadline = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            self._turn_away_late(now)
            first = next(iter(self._strangers.values()), None)
            until = deadline if first is None else min(deadline, first.deadline)
            events = dict(self._poller.poll(1000 * max(0.0, until - now)))
            if events.pop(self._bell, None):
                os.eventfd_read(self._bell)
                deadline = now
            if events.pop(self._listener.fileno(), None):
                self._take_in()
            for fd in events:
                let_in += self._hear(fd)
            if let_in or time.monotonic() >= deadline:
                return let_in

    def _take_in(self) -> None:
        """Accept who knocks, as many as there is room for."""
        while len(self._strangers) < _MOST:
            try:
                sock, _ = self._listener.accept()
            except OSError as err:  # nobody any more
                if err.errno in (errno.EMFILE, errno.ENFILE):
                    time.sleep(_NAP)  # they go on knocking until there is a descriptor for them
                break
            try:
                introduction = Introduction(sock, self._secret, self._patience)
            except HandshakeError:
                sock.close()
                continue
            deadline = time.monotonic() + _INTRODUCTION
            self._strangers[sock.fileno()] = _Stranger(sock, introduction, deadline)
            self._poller.register(sock, select.POLLIN)
        self._mind_the_door()

    def _mind_the_door(self) -> None:
        room = len(self._strangers) < _MOST
        self._poller.modify(self._listener, select.POLLIN if room else 0)

    def _hear(self, fd: int) -> list[Guest]:
        introduction = self._strangers[fd].introduction
        try:
            index = introduction.hear()
        except HandshakeError:
            self._drop(fd).close()
            return []
        if index is None or introduction.keys is None:
            return []
        return [Guest(index, self._drop(fd), introduction.keys)]

    def _drop(self, fd: int) -> socket.socket:
        self._poller.unregister(fd)
        sock = self._strangers.pop(fd).sock
        self._mind_the_door()
        return sock

    def _turn_away_late(self, now: float) -> None:
        for fd in [fd for fd, stranger in self._strangers.items() if stranger.deadline <= now]:
            self._drop(fd).close()

    def interrupt(self) -> None:
        """Have `wait` return now, or the next one at once; safe in any thread until `close`."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let nobody in any more. Idempotent."""
        for fd in list(self._strangers):
            self._drop(fd).close()
        self._listener.close()
        if self._bell >= 0:
            os.close(self._bell)
        self._bell = -1
