"""The stop byte of workers that share no memory with the learner."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout
from gleanrl.transport.frames import (
    BEAT,
    KEY,
    LEAVE,
    CommandWriter,
    head_of,
    key_frame,
    read_key,
    weights_frame,
)
from gleanrl.transport.handshake import Guest
from gleanrl.transport.landing import Arrival, Landing
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.node import BOARD_TAG, ROLLOUT_TAG
from gleanrl.transport.process_group import (
    LEARNER_RANK,
    ConnectionStore,
    ProcessGroupPair,
    Transfer,
)
from gleanrl.transport.stream import SealedChannel
from gleanrl.transport.worker import OpenWindow


class RemoteFlag:
    """A byte that tells somebody when it is raised or taken back; any thread may set it."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        """Begin with zero; ``tell`` is called with 1 or 0 whenever that changes."""
        self._value = 0
        self._tell = tell
        self._lock = threading.Lock()

    def __getitem__(self, index: int, /) -> int:
        """Return the byte."""
        return self._value

    def __setitem__(self, index: int, value: int, /) -> None:
        """Set the byte: anything but zero raises it."""
        raised = int(bool(value))
        with self._lock:
            if raised != self._value:
                self._value = raised
                self._tell(raised)


NEWS = 2.0
"""Seconds within which a launcher has heard how a process ended that is gone."""


class RemoteNode:
    """A connection to a node, its process group, and what it has been asked for."""

    def __init__(self, guest: Guest, open_window: OpenWindow) -> None:
        """Take over the connection on which the node was let in."""
        sock, keys = guest.sock, guest.keys
        self.index = guest.node
        self.address = str(sock.getpeername()[0])
        self._here = str(sock.getsockname()[0])
        self.channel = SealedChannel(sock, sends=keys.learner, receives=keys.node)
        self.heard = time.monotonic()
        """When it last gave a sign of life."""
        self.leaving: str | None = None
        """Why it ends, if it has said so or this side ends it."""
        self._ended: float | None = None
        """When its connection was seen to have ended."""
        self._sending = threading.Lock()
        self._writer = CommandWriter()
        self._open_window = open_window
        self._keys: dict[str, bytes] = {}
        self.early: list[bytes] = []
        """Replies that came while it joined."""
        self._pair: ProcessGroupPair | None = None
        self._landings: dict[int, Landing] = {}
        self._arriving: dict[int, Arrival] = {}
        """Rollouts that are due, by ticket."""

    # -- joining ---------------------------------------------------------------------------------

    def connect(self, kind: str, patience: float) -> None:
        """Make the process group, which the node does at the same time.

        Raises:
            EOFError: the node is gone.
            RuntimeError: it cannot be reached.
        """
        deadline = time.monotonic() + patience

        def tell(key: str, value: bytes) -> None:
            self.channel.send(key_frame(key, value))

        def wait_for(key: str) -> bytes:
            return self._key(key, deadline)

        store = ConnectionStore(tell, wait_for)
        self._pair = ProcessGroupPair(kind, store, LEARNER_RANK, self._here, patience)

    def _key(self, key: str, deadline: float) -> bytes:
        """Read until the node has told ``key``; what else comes is kept for later."""
        readable = select.poll()
        readable.register(self.channel, select.POLLIN)
        while key not in self._keys:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CollectorTimeout(f"node {self.index} did not answer in time")
            readable.poll(1000 * left)
            self._hear_early()
        return self._keys[key]

    def await_start(self) -> None:
        """Wait until the node has said that it is up, or why it is not; keep what it said.

        It has no deadline of its own: whoever gives the node up hangs up on it.

        Raises:
            EOFError: it is gone.
        """
        readable = select.poll()
        readable.register(self.channel, select.POLLIN)
        while not any(head_of(frame)[0] == 0 for frame in self.early):
            readable.poll()
            self._hear_early()

    def _hear_early(self) -> None:
        """Read what has come while the node joins."""
        for frame in self.channel.read():
            if frame[:1] == KEY:
                name, value = read_key(frame)
                self._keys[name] = value
            elif frame[:1] == LEAVE:
                self.leaving = frame[1:].decode()
            elif frame[:1] != BEAT:
                self.early.append(frame)

    # -- messages --------------------------------------------------------------------------------

    def post(self, ticket: int, command: m.Command) -> None:
        """Send ``command`` as far as the connection takes it."""
        frame = self._writer.write(ticket, command)  # it raises what the user's objects raise
        try:
            if isinstance(command, m.Collect):
                self._arriving[ticket] = self._expect(ticket, command.window)
            self.put(frame)
        except BaseException:  # an interrupt: the two sides may expect different rollouts now
            self.channel.hang_up()
            raise

    def put(self, frame: bytes) -> None:
        """Send ``frame`` as far as the connection takes it; any thread may."""
        with self._sending, contextlib.suppress(OSError):  # whoever reads next is told
            self.channel.post(frame)

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        with self._sending, contextlib.suppress(OSError):
            self.channel.flush()

    def in_flight(self, seconds: float) -> bool:
        """Note that the connection has ended; tell whether that is less than ``seconds`` ago."""
        now = time.monotonic()
        self._ended = self._ended or now
        return now - self._ended < seconds

    def fate(self, launcher: Launcher, how: str, patience: float = NEWS) -> str:
        """Return what became of the node, which is lost.

        Args:
            launcher: Its launcher, which may know.
            how: What is said if neither the node nor the launcher has said more.
            patience: Seconds the launcher may take to hear of it.
        """
        return self.leaving or launcher.fate(self.index, patience) or how

    def listen(self) -> None:
        """Look whether the node has said that it ends, in what nobody has read yet."""
        with contextlib.suppress(EOFError, OSError):
            while frames := self.channel.read():
                for frame in frames:
                    if frame[:1] == LEAVE:
                        self.leaving = frame[1:].decode()

    # -- data ------------------------------------------------------------------------------------

    def _expect(self, ticket: int, reference: m.WindowRef) -> Arrival:
        """Have a rollout arrive, whatever this process does meanwhile."""
        if not reference.blocks:  # it will travel with the reply
            return Arrival(ticket)
        landing = self._landings.get(reference.slot)
        if landing is None:
            landing = Landing(self._open_window(reference), reference)
            self._landings[reference.slot] = landing
        assert self._pair is not None
        try:
            transfers = [self._pair.receive(piece, ROLLOUT_TAG) for piece in landing.pieces]
        except RuntimeError as err:
            return Arrival(ticket, error=err)
        return Arrival(ticket, landing, transfers)

    def is_here(self, ticket: int) -> bool:
        """Whether `land` would not have to wait."""
        arrival = self._arriving.get(ticket)
        return arrival is None or arrival.here

    def land(self, ticket: int) -> None:
        """If ``ticket`` is that of a rollout, see to it that it is in its window.

        Raises:
            RuntimeError: the node was lost meanwhile.
        """
        arrival = self._arriving.get(ticket)
        if arrival is not None:
            arrival.finish()
            del self._arriving[ticket]

    def send_weights(self, board: int, buffer: torch.Tensor) -> Transfer | None:
        """Send ``buffer``, which must not change until the node says that it has taken it.

        ``None`` if the node is gone.
        """
        assert self._pair is not None
        try:
            transfer = self._pair.send(buffer, BOARD_TAG + board)
        except RuntimeError:  # whoever waits for a rollout is told
            return None
        self.put(weights_frame(board))
        return transfer

    def close(self, *, drop: bool = True) -> None:
        """Close the connection, by which a node that is still there ends.

        Args:
            drop: Let go of the process group as well, which a forked child cannot do.
        """
        self.channel.close()
        if drop:
            self._pair = None
            self._arriving.clear()
