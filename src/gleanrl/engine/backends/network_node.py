"""One node, seen from the learner."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout
from gleanrl.memory.landing import Landing
from gleanrl.rollout import link
from gleanrl.rollout.channel import Channel
from gleanrl.rollout.node import BOARD_TAG, ROLLOUT_TAG
from gleanrl.rollout.pair import LEARNER, ConnectionStore, Pair, Transfer
from gleanrl.rollout.wire import CommandWriter
from gleanrl.rollout.worker import OpenWindow


class RemoteNode:
    """A connection to a node, its process group, and what it has been asked for."""

    def __init__(self, index: int, sock: socket.socket, open_window: OpenWindow) -> None:
        """Take over ``sock``, on which the node was let in."""
        self.index = index
        self.address = str(sock.getpeername()[0])
        self._here = str(sock.getsockname()[0])
        self.channel = Channel(sock)
        self.heard = time.monotonic()
        """When it last gave a sign of life."""
        self._sending = threading.Lock()
        self._writer = CommandWriter()
        self._open_window = open_window
        self._keys: dict[str, bytes] = {}
        self._pair: Pair | None = None
        self._windows: dict[int, m.WindowRef] = {}
        self._landings: dict[int, Landing] = {}
        self._arriving: tuple[int, Transfer] | None = None

    # -- joining ---------------------------------------------------------------------------------

    def connect(self, kind: str, patience: float) -> None:
        """Make the process group, which the node does at the same time.

        Raises:
            EOFError: the node is gone.
            RuntimeError: it cannot be reached.
        """
        deadline = time.monotonic() + patience

        def tell(key: str, value: bytes) -> None:
            self.channel.send(link.key_frame(key, value))

        def wait_for(key: str) -> bytes:
            return self._key(key, deadline)

        store = ConnectionStore(tell, wait_for)
        self._pair = Pair(kind, store, LEARNER, self._here, patience)

    def _key(self, key: str, deadline: float) -> bytes:
        """Read until the node has told ``key``; nothing else comes but signs of life."""
        readable = select.poll()
        readable.register(self.channel, select.POLLIN)
        while key not in self._keys:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectorTimeout(f"node {self.index} did not answer in time")
            readable.poll(1000 * left)
            for frame in self.channel.read():
                if frame[:1] == link.KEY:
                    name, value = link.read_key(frame)
                    self._keys[name] = value
        return self._keys[key]

    # -- messages --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether it has been asked for a rollout that has not come yet."""
        return bool(self._windows)

    def post(self, ticket: int, command: m.Command) -> None:
        """Send ``command`` as far as the connection takes it."""
        if isinstance(command, m.Collect):
            self._windows[ticket] = command.window
        self.put(self._writer.write(ticket, command))

    def put(self, frame: bytes) -> None:
        """Send ``frame`` as far as the connection takes it; any thread may."""
        with self._sending, contextlib.suppress(ConnectionError):  # whoever reads next is told
            self.channel.post(frame)

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        with self._sending, contextlib.suppress(ConnectionError):
            self.channel.flush()

    def replied(self, ticket: int) -> None:
        """Note that the reply to ``ticket`` is there."""
        self._windows.pop(ticket, None)

    # -- data ------------------------------------------------------------------------------------

    def land(self, ticket: int) -> None:
        """Receive the rollout of ``ticket`` into its window.

        Raises:
            RuntimeError: the node was lost meanwhile.
        """
        reference = self._windows[ticket]
        if not reference.blocks:
            return
        landing = self._landings.get(reference.slot)
        if landing is None:
            landing = Landing(self._open_window(reference), reference)
            self._landings[reference.slot] = landing
        assert self._pair is not None
        if self._arriving is None:  # else: an interrupt came between
            self._arriving = ticket, self._pair.receive(landing.flat, ROLLOUT_TAG)
        self._arriving[1].finish()
        self._arriving = None
        landing.settle()

    def send_weights(self, board: int, buffer: torch.Tensor) -> Transfer:
        """Send ``buffer``, which must not change until the node says that it has taken it."""
        assert self._pair is not None
        transfer = self._pair.send(buffer, BOARD_TAG + board)
        self.put(link.weights_frame(board))
        return transfer

    def close(self) -> None:
        """Close the connection, by which a node that is still there ends."""
        self.channel.close()
        self._pair = None
