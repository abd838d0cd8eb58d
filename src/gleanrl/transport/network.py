"""Nodes, seen from the learner: commands and replies over connections, data on a data plane."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from gleanrl.core import messages as m
from gleanrl.core.deadline import Deadline
from gleanrl.core.errors import CollectorTimeout, WorkerDied
from gleanrl.core.protocols import SourceFactory, Stop
from gleanrl.transport.authenticated_channel import Channel, ForgedFrameError
from gleanrl.transport.data_plane import Arrival, DataPlane, Landing, Pair, Transfer
from gleanrl.transport.handshake import Guest
from gleanrl.transport.interrupts import Deferred, interruptible
from gleanrl.transport.joining import NodeAdmitter
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.peer import ChannelBackend, ChannelPeer, RemoteFlag
from gleanrl.transport.pickling import pickled_each
from gleanrl.transport.process_group import ProcessGroups
from gleanrl.transport.wire import (
    BEAT,
    KEY,
    LEAVE,
    STOP,
    WEIGHTS,
    check_reply,
    head_of,
    key_frame,
    read_key,
    reply_in,
)
from gleanrl.transport.worker_loop import Boot, OpenWindow
from gleanrl.weights.published_buffers import FlatBuffer, planned

_NODE_EXIT_S = 1.0
"""Seconds after which a node that was told to end is given up."""
_NAPS_S = 50e-6, 1e-3
"""Shortest and longest pause, in seconds, between two looks for an announced rollout."""
_NEWS_S = 2.0
"""Seconds until a launcher knows how a process has ended."""
_IN_FLIGHT_S = 1.0
"""Seconds that data may take to arrive after the end of a node's connection."""


class Node(ChannelPeer):
    """A node, seen from the learner."""

    def __init__(self, guest: Guest, backend: NetworkBackend) -> None:
        """Take over the connection of ``guest``; raise `OSError` if it has ended."""
        sock = guest.sock
        super().__init__(guest.node, Channel(sock, guest.keys))
        self.channel.keep_alive(backend.timeout_s)
        self._backend = backend
        self.address: str = sock.getpeername()[0]
        self.own_address = str(sock.getsockname()[0])
        self.silence = Deadline(backend.timeout_s)
        """The time by which it must give a sign of life."""
        self.end_reason: str | None = None
        """The reason for its end, given by the node or by this side."""
        self.replies: deque[bytes] = deque()
        """Takes its replies; once it has joined, the queue of the backend."""
        self.in_flight: Deadline | None = None
        """Once its connection has ended: until then, data that it has sent may arrive."""
        self._sending = threading.Lock()
        self._keys: dict[str, bytes] = {}
        self._pair: Pair | None = None
        self._landings: dict[int, Landing] = {}
        """Where rollouts land, by slot."""
        self._arriving: dict[int, Arrival] = {}
        """Rollouts that are due, by ticket."""
        self._weights: deque[tuple[Transfer, FlatBuffer]] = deque()
        """Those on their way, oldest first."""

    # -- joining ---------------------------------------------------------------------------------

    def bring_up(self, life: int) -> None:
        """Boot the node and make its `Pair` for data; wait until a replacement is up.

        The wait has no deadline of its own: giving the node up hangs up on it.

        Raises:
            EOFError: the node is gone, without a word.
        """
        self.channel.send(pickle.dumps(self._backend.boot(self.index, life)))
        try:
            self._pair = self._backend.plane.pair(self)
        except Exception:  # also where the node could not build its source and has ended
            with contextlib.suppress(EOFError, OSError, CollectorTimeout):
                self._read_until(self._has_failed, _IN_FLIGHT_S)
            if not self._has_failed():
                raise
            return
        if life:  # the learner continues with the others meanwhile
            self._read_until(lambda: any(head_of(frame)[0] == 0 for frame in self.replies), None)

    def _has_failed(self) -> bool:
        """Whether the node has said why it ends."""
        return any(isinstance(reply_in(frame), m.Failed) for frame in self.replies)

    def tell(self, key: str, value: bytes) -> None:
        self.channel.send(key_frame(key, value))

    def key(self, key: str) -> bytes:
        """Return the node's value of ``key``; other frames are kept for later."""
        self._read_until(lambda: key in self._keys, self._backend.timeout_s)
        return self._keys[key]

    def _read_until(self, there: Callable[[], bool], timeout: float | None) -> None:
        readable = select.poll()
        readable.register(self.channel, select.POLLIN)
        deadline = Deadline(timeout)
        while not there():
            if deadline.expired:
                raise CollectorTimeout(f"node {self.index} did not answer within {timeout} s")
            readable.poll(None if timeout is None else 1000 * deadline.left)
            self.read()

    # -- messages --------------------------------------------------------------------------------

    def post(self, ticket: int, command: m.Command) -> None:
        """Send ``command`` as far as the connection takes it, and expect its rollout."""
        frame = self.writer.write(ticket, command)  # may raise errors of the user's objects
        try:
            if isinstance(command, m.Collect) and command.window.blocks:
                self._arriving[ticket] = self._expect(ticket, command.window)
            self.put(frame)
        except BaseException:  # an interrupt: the two sides may expect different rollouts now
            self.hang_up()
            raise

    def put(self, frame: bytes) -> None:
        """Send ``frame`` as far as the connection takes it; any thread may."""
        with self._sending, contextlib.suppress(OSError):  # the next `read` raises it
            self.channel.post(frame)

    def flush(self) -> None:
        with self._sending:
            super().flush()

    def read(self) -> None:
        """Receive the available frames.

        Raises:
            EOFError: the connection has ended.
            ForgedFrameError: a frame is not from the node.
        """
        for frame in self.channel.read():
            try:
                self._take(frame)
            except Exception as err:
                raise ForgedFrameError(
                    f"it sent what no node sends ({type(err).__name__}: {err})"
                ) from err
        self.silence = Deadline(self._backend.timeout_s)

    def _take(self, frame: bytes) -> None:
        kind = frame[:1]
        if kind == KEY:
            name, value = read_key(frame)
            self._keys[name] = value
        elif kind == LEAVE:
            self.end_reason = frame[1:].decode()
        elif kind == WEIGHTS:
            self._weights_taken()
        elif kind != BEAT:
            check_reply(frame, self.index)
            self.replies.append(frame)

    # -- data ------------------------------------------------------------------------------------

    def _expect(self, ticket: int, reference: m.WindowRef) -> Arrival:
        assert self._pair is not None
        landing = self._landings.get(reference.slot)
        if landing is None:
            landing = Landing(self._backend.open_window(reference), reference)
            self._landings[reference.slot] = landing
        return Arrival(ticket, landing, self._pair)

    def has_arrived(self, ticket: int) -> bool:
        """Whether `land` would not have to wait."""
        arrival = self._arriving.get(ticket)
        return arrival is None or arrival.arrived

    def land(self, ticket: int) -> None:
        """If ``ticket`` is of a rollout, wait until the rollout is in its window.

        Raises:
            RuntimeError: the node was lost meanwhile.
        """
        arrival = self._arriving.get(ticket)
        if arrival is not None:
            arrival.finish()
            del self._arriving[ticket]

    def send_weights(self, buffer: FlatBuffer) -> None:
        """Send ``buffer``, which must not change while it `is_sent`."""
        assert self._pair is not None
        with contextlib.suppress(RuntimeError):  # the node is gone, as the next `read` will tell
            self._weights.append((self._pair.send(buffer.bytes), buffer))
            self.put(WEIGHTS)

    def is_sent(self, buffer: FlatBuffer | None = None) -> bool:
        """Tell whether weights are on their way to the node, those in ``buffer`` or any."""
        return any(buffer is None or each is buffer for _, each in self._weights)

    def _weights_taken(self) -> None:
        transfer, _ = self._weights.popleft()
        with contextlib.suppress(RuntimeError):  # of a connection that was lost afterwards
            transfer.finish()

    # -- the end ---------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the connection for both sides. Any thread may."""
        self.channel.hang_up()

    def exit_reason(self, reason: str, timeout: float = _NEWS_S) -> str:
        """Return why the node is gone, told by itself, by its launcher, or else ``reason``."""
        with contextlib.suppress(EOFError, OSError):
            if not self.gone:  # its own word may not be read yet
                self.read()
        told = self.end_reason or self._backend.launcher.exit_reason(self.index, timeout)
        return f"on node {self.address} {told or reason}"

    def close(self, *, drop: bool = True) -> None:
        """Close the connection, which ends a running node; nothing lands any more.

        A forked child cannot ``drop`` the pair.
        """
        self.gone = True
        self.channel.close()
        if drop:
            self._pair = None
            self._arriving.clear()
            self._weights.clear()


class FlatWeightPublisher:
    """Publishes the weights of one model to nodes: one copy here, one transfer to each.

    A node that has taken its weights is sent the newest, if it lacks them. Before a command the
    newest are sent at once, because the worker carries out the command with all weights that were
    published before. So frequent updates cost a connection at most two transfers per rollout.
    """

    def __init__(self, ref: m.WeightsRef) -> None:
        """Publish to no node yet; `include` adds nodes. ``ref`` says where tensors lie."""
        self.ref = ref
        self._buffers: list[FlatBuffer] = []
        self._newest: FlatBuffer | None = None
        self._number = 0
        """Of the newest publication."""
        self._sent: dict[Node, int] = {}
        """Per node, the publication that it was sent last."""

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and begin to send them."""
        with Deferred():  # a frame that is sent in part, or twice, ends the connection
            buffer = self._unused()
            buffer.fill(tensors, version, serial)
            self._newest, self._number = buffer, self._number + 1
            for node in self._sent:
                self.supply(node)

    def _unused(self) -> FlatBuffer:
        """Return a buffer that no transfer reads from."""
        for buffer in self._buffers:
            if not any(node.is_sent(buffer) for node in self._sent):
                return buffer
        self._buffers.append(FlatBuffer(self.ref))
        return self._buffers[-1]

    def include(self, node: Node) -> None:
        """Publish to ``node`` as well, from the newest on."""
        self._sent[node] = 0
        self.supply(node, at_once=True)

    def supply(self, node: Node, *, at_once: bool = False) -> None:
        """Send the newest weights that ``node`` lacks, ``at_once`` or when it has taken others."""
        lacks = self._sent.get(node, self._number) < self._number
        if lacks and self._newest is not None and (at_once or not node.is_sent()):
            self._sent[node] = self._number
            node.send_weights(self._newest)

    def forget(self, node: Node) -> None:
        """Publish to ``node`` no more; a buffer that it may still be sent is not used again."""
        self._buffers = [buffer for buffer in self._buffers if not node.is_sent(buffer)]
        self._sent.pop(node, None)


class NetworkBackend(ChannelBackend[Node]):
    """One node per worker, wherever a launcher starts them.

    Nodes connect here and authenticate. Commands, replies and signs of life travel on that
    connection, so that it tells at once when a node's process or host is gone. Data travel on a
    data plane.
    """

    _looks_first = True

    def __init__(
        self,
        open_window: OpenWindow,
        launcher: Launcher,
        plane: DataPlane | None = None,
        *,
        host: str | None = None,
        ports: Sequence[int] = (0,),
        threads: int = 1,
        timeout_s: float = 60.0,
        start_timeout: float = 120.0,
        replaces: bool = False,
    ) -> None:
        """Listen for nodes.

        Args:
            open_window: Maps windows of the learner's arenas.
            launcher: Starts the nodes.
            plane: Carries data; gloo's process groups by default.
            host: Address to listen on, and that nodes are told; the launcher's choice by default.
            ports: To listen on the first of these that is free; any by default.
            threads: torch threads of each node.
            timeout_s: Seconds without a sign of life after which a node counts as dead.
            start_timeout: Seconds all nodes together may take to join.
            replaces: Whether `replace` will be called: the port stays open for that.
        """
        super().__init__()
        self.open_window, self.launcher, self.timeout_s = open_window, launcher, timeout_s
        self.plane = ProcessGroups(timeout_s=timeout_s) if plane is None else plane
        self._threads, self._start_timeout, self._replaces = threads, start_timeout, replaces
        self._factories: list[bytes] = []
        self._publisher: FlatWeightPublisher | None = None
        self._closed = False
        self.stop_byte: Stop = RemoteFlag(self._send_stop)
        self._nap = _NAPS_S[0]
        self.admitter = NodeAdmitter(
            host or launcher.address(),
            ports,
            launcher,
            lambda guest: Node(guest, self),
            heartbeat=timeout_s,
            timeout_s=start_timeout,
        )

    # -- start -----------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        self._factories = pickled_each(factories, same_machine=False)
        self.admitter.launch_first(len(factories))
        self._poller.register(self.admitter.bell, select.EPOLLIN)
        deadline = Deadline(self._start_timeout)
        while missing := [worker for worker in range(len(factories)) if worker not in self._peers]:
            if deadline.expired:
                place = self.admitter.invitation(0)
                raise CollectorTimeout(
                    f"nodes {missing} did not join {place.host}:{place.port} within "
                    f"{self._start_timeout} s"
                )
            for fd, events in interruptible(self._poller.poll, min(deadline.left, self.timeout_s)):
                self._turn_to(fd, events)
        if not self._replaces:
            self._poller.unregister(self.admitter.bell)
            self.admitter.stop(_NODE_EXIT_S)
            self.admitter.listener.close()

    def boot(self, index: int, life: int) -> Boot:
        """Return the first message to node ``index``, which was lost ``life`` times."""
        connect = self.plane.connect(index)
        return Boot(index, self._factories[index], self._threads, life, connect)

    def replace(self, worker: int, life: int, delay: float) -> None:
        """Have another node started in place of ``worker``, without waiting.

        It was ended, as were ``life - 1`` before it. Once the node is up, which is started after
        ``delay`` seconds, `receive` returns its `Ready`; else `receive` raises `WorkerDied`.
        """
        self.admitter.want(worker, life, delay)

    def weight_publisher(self, weights: Mapping[str, torch.Tensor]) -> FlatWeightPublisher:
        """Prepare to send weights like these to all nodes that are told of it by `Bind`."""
        self._publisher = FlatWeightPublisher(planned(weights))
        return self._publisher

    # -- messages --------------------------------------------------------------------------------

    def _post(self, peer: Node, ticket: int, command: m.Command) -> None:
        if peer.gone:
            raise self._died(peer, "is gone")
        publisher = self._publisher
        if publisher is not None and not isinstance(command, m.NoWeights):
            publisher.supply(peer, at_once=True)
        peer.post(ticket, command)
        if publisher is not None and isinstance(command, m.Bind):
            publisher.include(peer)
        self._watch(peer)

    def wait(self, timeout: float) -> None:
        super().wait(_NAPS_S[1] if self._arrived else timeout)

    def _send_stop(self, value: int) -> None:
        for node in list(self._peers.values()):
            if not node.gone:
                node.put(STOP + bytes([value]))

    def _poll(self, timeout: float | None) -> float | None:
        if timeout and self._arrived:  # replies without their data: nothing tells when these come
            interruptible(time.sleep, min(self._nap, timeout))
            self._nap, timeout = min(2 * self._nap, _NAPS_S[1]), 0.0
        for fd, events in interruptible(self._poller.poll, timeout):
            self._turn_to(fd, events)
        if self._first_complete() is not None:
            return None
        silent_in = self._next_silence()
        return self._nap if self._arrived else silent_in

    def _first_complete(self) -> int | None:
        """Return the place of the oldest reply whose data are here; those of a node keep order."""
        waiting: set[int] = set()
        for place, frame in enumerate(self._arrived):
            ticket, worker = head_of(frame)
            if worker not in waiting and self._peers[worker].has_arrived(ticket):
                return place
            waiting.add(worker)
        return None

    def _next(self) -> bytes | None:
        place = self._first_complete()
        if place is None:
            return None
        frame: bytes = self._arrived[place]
        ticket, worker = head_of(frame)
        try:
            self._peers[worker].land(ticket)
        except RuntimeError as err:
            reason = f"was lost in the middle of a rollout ({err})"
            raise self._died(self._peers[worker], reason) from None
        del self._arrived[place]
        self._nap = _NAPS_S[0]
        return frame

    def _has_announced(self, node: Node) -> bool:
        """Tell whether a reply of ``node`` waits for its data."""
        return any(head_of(frame)[1] == node.index for frame in self._arrived)

    def _turn_to(self, fd: int, events: int) -> None:
        if fd == self.admitter.bell:
            self._take_joined()
            return
        node = self._by_fd[fd]
        # Read first: messages that a node sent before its end are whole, as is their data.
        if events & ~select.EPOLLOUT:
            self._hear(node)
        if events & select.EPOLLOUT:
            node.flush()
        if not node.gone:
            self._watch(node)

    def _take_joined(self) -> None:
        """Put a node that has joined in its place; raise the error of one that has not."""
        node = self.admitter.pop()
        if isinstance(node, WorkerDied):
            raise node
        if node is not None:
            node.silence = Deadline(self.timeout_s)
            self._arrived += node.replies
            node.replies = self._arrived
            self._peers[node.index] = node
            self._watch(node)
            if self.stop_byte[0]:
                node.put(STOP + bytes([self.stop_byte[0]]))

    def _next_silence(self) -> float:
        """Return the seconds until some node has been silent for too long; raise if one has."""
        for node in self._by_fd.values():
            if node.end_reason is not None and not self._has_announced(node):
                raise self._died(node, node.end_reason)
            if node.silence.expired:
                raise self._died(
                    node,
                    f"showed no sign of life for {self.timeout_s:g} s: its host or the network is "
                    "down, or its process stands still",
                )
        return min((node.silence.left for node in self._by_fd.values()), default=self.timeout_s)

    def _hear(self, peer: Node) -> None:
        try:
            peer.read()
            if self._publisher is not None:
                self._publisher.supply(peer)
        except ForgedFrameError as err:
            peer.end_reason = f"was let go of: {err}"
            raise self._died(peer, peer.end_reason) from None
        except (EOFError, OSError) as err:
            peer.in_flight = peer.in_flight or Deadline(_IN_FLIGHT_S)
            # While data may arrive they come first; this is told again.
            if peer.in_flight.expired or not self._has_announced(peer):
                raise self._died(peer, f"closed its connection ({err})") from None

    def _exit_reason(self, peer: Node, reason: str) -> str:
        wait = 0.0 if peer.silence.expired or peer.gone else _NEWS_S
        return interruptible(peer.exit_reason, reason, wait)

    def _drop(self, peer: Node) -> None:
        """Hang up on ``peer`` and forget its data, weights and replies. Idempotent."""
        if self._publisher is not None:
            self._publisher.forget(peer)
        super()._drop(peer)
        peer.close()
        # Rollouts that it had announced cannot be fetched any more.
        others = [frame for frame in self._arrived if head_of(frame)[1] != peer.index]
        self._arrived.clear()
        self._arrived += others

    def end(self, worker: int) -> bool:
        """Hang up on ``worker``; that of its rollouts which has not landed never does."""
        super().end(worker)
        return True

    def stop(self, timeout: float) -> None:
        """End all nodes, including those that are joining. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # In a forked child the threads do not exist, and the nodes belong to another process.
        mine = self._owner == os.getpid()
        try:
            if mine:
                self.admitter.stop(min(timeout, _NODE_EXIT_S))
        finally:  # nodes end also where Ctrl-C ends the wait for threads
            self._end_nodes(mine, timeout)

    def _end_nodes(self, mine: bool, timeout: float) -> None:
        nodes = {*self._peers.values(), *self._by_fd.values()}
        self._peers = {}
        self._arrived.clear()
        if not mine:  # never destroyed: the threads of their process groups are another process's
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self, nodes)))
        for node in nodes:
            node.close(drop=mine)
        self.admitter.listener.close()
        self.launcher.stop(min(timeout, _NODE_EXIT_S))
        self._poller.close()
