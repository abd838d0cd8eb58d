"""A node seen from the learner: what comes on its connection, and data on their way."""

from __future__ import annotations

import contextlib
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout
from gleanrl.core.window import Array
from gleanrl.transport.data_plane import ROLLOUT_TAG, WEIGHTS_TAG, DataPlane, Pair, Transfer
from gleanrl.transport.frames import BEAT, KEY, LEAVE, WEIGHTS, head_of, key_frame, read_key
from gleanrl.transport.handshake import Guest
from gleanrl.transport.landing import Arrival, Landing
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.peer import ChannelPeer
from gleanrl.transport.stream import SealedChannel
from gleanrl.transport.worker import Boot, OpenWindow

NEWS = 2.0
"""Seconds within which a launcher has heard how a process ended that is gone."""
_IN_FLIGHT = 1.0
"""Seconds that what a node had sent may take to arrive once its connection has ended."""


class Node(ChannelPeer):
    """A node, seen from the learner."""

    def __init__(
        self,
        guest: Guest,
        *,
        boot: Callable[[int, int], Boot],
        plane: DataPlane,
        open_window: OpenWindow,
        launcher: Launcher,
        timeout_s: float,
    ) -> None:
        """Take over the connection of ``guest``.

        Args:
            guest: A node that was let in.
            boot: Says what node ``index`` is to be that was lost ``life`` times.
            plane: Carries data.
            open_window: Maps windows of the learner's arenas.
            launcher: Knows how nodes ended.
            timeout_s: Seconds that the node may take to agree on how data travel.

        Raises:
            OSError: the connection has ended.
        """
        sock, keys = guest.sock, guest.keys
        super().__init__(guest.node, SealedChannel(sock, keys.learner, keys.node))
        self._boot, self._plane, self._launcher = boot, plane, launcher
        self._open_window, self._timeout_s = open_window, timeout_s
        self.address = str(sock.getpeername()[0])
        self.here = str(sock.getsockname()[0])
        self.heard = time.monotonic()
        """When it last gave a sign of life."""
        self.leaving: str | None = None
        """Why it ends, if it has said so or this side ends it."""
        self.problem = ""
        """What this side found to be wrong with it."""
        self.announced: deque[bytes] = deque()
        """Replies that have come, of which not all that belongs to them may be here."""
        self._ended: float | None = None
        """When its connection was seen to have ended."""
        self._sending = threading.Lock()
        self._keys: dict[str, bytes] = {}
        self._pair: Pair | None = None
        self._landings: dict[int, Landing] = {}
        """Where rollouts land, by slot."""
        self._arriving: dict[int, Arrival] = {}
        """Rollouts that are due, by ticket."""
        self._weights: deque[tuple[Transfer, Callable[[], None]]] = deque()
        """Those on their way, oldest first, and whom to tell that they were taken."""

    # -- joining ---------------------------------------------------------------------------------

    def greet(self, life: int) -> None:
        """Tell it what to be; returns once it and this side have agreed on how data travel."""
        self.channel.send(pickle.dumps(self._boot(self.index, life)))
        self._pair = self._plane.pair(self)

    def tell(self, key: str, value: bytes) -> None:
        self.channel.send(key_frame(key, value))

    def key(self, key: str) -> bytes:
        """Return what the node tells of ``key``; what else comes meanwhile is kept for later.

        Raises:
            CollectorTimeout: it did not in time.
            EOFError: it is gone.
        """
        self._read_until(lambda: key in self._keys, self._timeout_s)
        return self._keys[key]

    def await_start(self) -> None:
        """Wait until the node has said that it is up, or why it is not.

        It has no deadline of its own: whoever gives the node up hangs up on it.

        Raises:
            EOFError: it is gone.
        """
        self._read_until(lambda: any(head_of(frame)[0] == 0 for frame in self.announced), None)

    def _read_until(self, there: Callable[[], bool], timeout: float | None) -> None:
        readable = select.poll()
        readable.register(self.channel, select.POLLIN)
        deadline = None if timeout is None else time.monotonic() + timeout
        while not there():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise CollectorTimeout(f"node {self.index} did not answer in time")
            readable.poll(None if left is None else 1000 * left)
            self.read()

    # -- messages --------------------------------------------------------------------------------

    def post(self, ticket: int, command: m.Command) -> None:
        """Send ``command`` as far as the connection takes it, and expect its rollout."""
        frame = self.writer.write(ticket, command)  # it raises what the user's objects raise
        try:
            if isinstance(command, m.Collect) and command.window.blocks:
                self._arriving[ticket] = self._expect(ticket, command.window)
            self.put(frame)
        except BaseException:  # an interrupt: the two sides may expect different rollouts now
            self.hang_up()
            raise

    def put(self, frame: bytes) -> None:
        """Send ``frame`` as far as the connection takes it; any thread may."""
        with self._sending, contextlib.suppress(OSError):  # whoever reads next is told
            self.channel.post(frame)

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        with self._sending:
            super().flush()

    def read(self) -> None:
        """Take in what has come.

        Raises:
            EOFError: the connection has ended.
            ForgedFrameError: it is not the node's alone.
        """
        for frame in self.channel.read():
            kind = frame[:1]
            if kind == KEY:
                name, value = read_key(frame)
                self._keys[name] = value
            elif kind == LEAVE:
                self.leaving = frame[1:].decode()
            elif kind == WEIGHTS:
                self._weights_taken()
            elif kind != BEAT:
                self.announced.append(frame)
        self.heard = time.monotonic()

    # -- data ------------------------------------------------------------------------------------

    def _expect(self, ticket: int, reference: m.WindowRef) -> Arrival:
        assert self._pair is not None
        landing = self._landings.get(reference.slot)
        if landing is None:
            landing = Landing(self._open_window(reference), reference)
            self._landings[reference.slot] = landing
        pair = self._pair
        return Arrival(
            ticket, landing, lambda piece, whole: pair.receive(piece, ROLLOUT_TAG, whole)
        )

    def is_here(self, ticket: int) -> bool:
        """Whether `land` would not have to wait."""
        arrival = self._arriving.get(ticket)
        return arrival is None or arrival.here

    def land(self, ticket: int) -> Array | None:
        """If ``ticket`` is that of a rollout, see to it that it is in its window.

        Returns:
            Where the rollout is, if it has arrived elsewhere.

        Raises:
            RuntimeError: the node was lost meanwhile.
        """
        arrival = self._arriving.get(ticket)
        if arrival is None:
            return None
        block = arrival.finish()
        del self._arriving[ticket]
        return block

    def send_weights(self, buffer: torch.Tensor, taken: Callable[[], None]) -> bool:
        """Send ``buffer``, which must not change before ``taken`` is called; False: it is gone."""
        assert self._pair is not None
        try:
            transfer = self._pair.send(buffer, WEIGHTS_TAG)
        except RuntimeError:  # whoever waits for a rollout is told
            return False
        self._weights.append((transfer, taken))
        self.put(WEIGHTS)
        return True

    def _weights_taken(self) -> None:
        transfer, taken = self._weights.popleft()
        with contextlib.suppress(RuntimeError):  # the node has them, whatever was lost afterwards
            transfer.finish()
        taken()

    # -- the end ---------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the connection for both sides; whoever waits for it is told. Any thread may."""
        self.channel.hang_up()

    def fail(self, reason: str) -> None:
        self.problem = reason
        self.hang_up()

    def in_flight(self) -> bool:
        """Whether what it sent before its connection ended may still be on its way."""
        now = time.monotonic()
        self._ended = self._ended or now
        return bool(self.announced) and now - self._ended < _IN_FLIGHT

    def exit_reason(self, reason: str, timeout: float = NEWS) -> str:
        """Return why it is gone: its own word, its launcher's within a while, or ``reason``."""
        return self.leaving or self._launcher.exit_reason(self.index, timeout) or reason

    def listen(self) -> None:
        """Look whether the node has said that it ends, in what nobody has read yet."""
        with contextlib.suppress(EOFError, OSError):
            self.read()

    def close(self, *, drop: bool = True) -> None:
        """Close the connection, by which a node that is still there ends.

        Args:
            drop: Let go of what carries data as well, which a forked child cannot do.
        """
        self.channel.close()
        if drop:
            self._pair = None
            self._arriving.clear()
            self._weights.clear()
