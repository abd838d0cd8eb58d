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
from gleanrl.transport.data_plane import (
    ROLLOUT_TAG,
    WEIGHTS_TAG,
    Arrival,
    DataPlane,
    Landing,
    Pair,
    Transfer,
)
from gleanrl.transport.handshake import Guest, new_secret
from gleanrl.transport.interrupts import Deferred, interruptible
from gleanrl.transport.joining import LOOK_S, NodeAdmitter, listen
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.peer import ChannelPeer, Channels, RemoteBackend, RemoteFlag
from gleanrl.transport.pickling import pickled_each
from gleanrl.transport.process_group import ProcessGroups
from gleanrl.transport.wire import (
    BEAT,
    KEY,
    LEAVE,
    STOP,
    WEIGHTS,
    Channel,
    ForgedFrameError,
    head_of,
    key_frame,
    read_key,
)
from gleanrl.transport.worker_loop import Boot, OpenWindow
from gleanrl.weights.buffers import FlatBuffer, check_fit, planned

_EXIT_GRACE_S = 1.0
"""Seconds within which a node that was told to end has to be gone."""
_NAPS_S = 50e-6, 1e-3
"""Seconds between two looks at whether an announced rollout is here: at first, in the end."""
_NEWS_S = 2.0
"""Seconds within which a launcher has heard how a process ended that is gone."""
_IN_FLIGHT_S = 1.0
"""Seconds that what a node had sent may take to arrive once its connection has ended."""


class Node(ChannelPeer):
    """A node, seen from the learner."""

    def __init__(self, guest: Guest, backend: NetworkBackend) -> None:
        """Take over the connection of ``guest``, which was let in.

        Raises:
            OSError: the connection has ended.
        """
        sock = guest.sock
        super().__init__(guest.node, Channel(sock, guest.keys))
        self.channel.keep_alive(backend.timeout_s)
        self._backend = backend
        self.address = str(sock.getpeername()[0])
        self.here = str(sock.getsockname()[0])
        self.heard = time.monotonic()
        """When it last gave a sign of life."""
        self.leaving: str | None = None
        """Why it ends, if it has said so or this side ends it."""
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
        self._weights: deque[tuple[Transfer, FlatBuffer]] = deque()
        """Those on their way, oldest first."""

    # -- joining ---------------------------------------------------------------------------------

    def greet(self, life: int) -> None:
        """Tell it what to be; returns once it and this side have agreed on how data travel."""
        self.channel.send(pickle.dumps(self._backend.boot(self.index, life)))
        self._pair = self._backend.plane.pair(self)

    def tell(self, key: str, value: bytes) -> None:
        self.channel.send(key_frame(key, value))

    def key(self, key: str) -> bytes:
        """Return what the node tells of ``key``; what else comes meanwhile is kept for later.

        Raises:
            CollectorTimeout: it did not in time.
            EOFError: it is gone.
        """
        self._read_until(lambda: key in self._keys, self._backend.timeout_s)
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
        deadline = Deadline(timeout)
        while not there():
            if deadline.expired:
                raise CollectorTimeout(f"node {self.index} did not answer within {timeout} s")
            readable.poll(None if timeout is None else 1000 * deadline.left)
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
            landing = Landing(self._backend.open_window(reference), reference)
            self._landings[reference.slot] = landing
        pair = self._pair
        return Arrival(ticket, landing, lambda piece: pair.receive(piece, ROLLOUT_TAG))

    def is_here(self, ticket: int) -> bool:
        """Whether `land` would not have to wait."""
        arrival = self._arriving.get(ticket)
        return arrival is None or arrival.here

    def land(self, ticket: int) -> None:
        """If ``ticket`` is that of a rollout, wait until the rollout is in its window.

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
        with contextlib.suppress(RuntimeError):  # it is gone: whoever waits for a rollout is told
            self._weights.append((self._pair.send(buffer.bytes, WEIGHTS_TAG), buffer))
            self.put(WEIGHTS)

    def is_sent(self, buffer: FlatBuffer | None = None) -> bool:
        """Tell whether weights are on their way to it, those in ``buffer`` or any."""
        return any(buffer is None or each is buffer for _, each in self._weights)

    def _weights_taken(self) -> None:
        transfer, _ = self._weights.popleft()
        with contextlib.suppress(RuntimeError):  # the node has them, whatever was lost afterwards
            transfer.finish()

    # -- the end ---------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """End the connection for both sides; whoever waits for it is told. Any thread may."""
        self.channel.hang_up()

    def in_flight(self) -> bool:
        """Whether what it sent before its connection ended may still be on its way."""
        now = time.monotonic()
        self._ended = self._ended or now
        return bool(self.announced) and now - self._ended < _IN_FLIGHT_S

    def exit_reason(self, reason: str, timeout: float = _NEWS_S) -> str:
        """Return why it is gone: its own word, its launcher's within a while, or ``reason``."""
        return self.leaving or self._backend.launcher.exit_reason(self.index, timeout) or reason

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


class FlatWeightPublisher:
    """Publishes the weights of one model to nodes: one copy here, one transfer to each.

    While weights are on their way to a worker it is sent no others, and then the newest. Before a
    command the newest are sent at once, because the worker carries it out with what had been
    published by then. So a learner that updates more often than a worker collects costs that
    worker's connection two transfers per rollout.
    """

    def __init__(self, ref: m.WeightsRef) -> None:
        """Publish to nobody yet; `include` adds nodes. ``ref`` says where tensors lie."""
        self.ref = ref
        self._buffers: list[FlatBuffer] = []
        self._newest: FlatBuffer | None = None
        self._number = 0
        """Of the newest publication."""
        self._sent: dict[Node, int] = {}
        """Per node, the publication that it was sent last."""

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and send them; waits for nobody.

        Raises:
            WeightsError: a shape that is not the plan's; nothing is published.
        """
        check_fit(self.ref, tensors)
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


class NetworkBackend(RemoteBackend[Node]):
    """One node per worker, wherever a launcher starts them.

    Nodes connect here and authenticate. Commands, replies and signs of life travel on that
    connection, so that it tells at once when a node's process or host is gone. Data travel beside
    it, on a data plane.
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

        Raises:
            ConfigError: the port cannot be listened on.
        """
        super().__init__()
        self.open_window, self.launcher, self.timeout_s = open_window, launcher, timeout_s
        self.plane = ProcessGroups(timeout_s=timeout_s) if plane is None else plane
        self._channels: Channels[Node] = Channels()
        self._threads, self._start_timeout, self._replaces = threads, start_timeout, replaces
        self._secret = new_secret()
        self._factories: list[bytes] = []
        self._publisher: FlatWeightPublisher | None = None
        self._closed = False
        self.stop_byte: Stop = RemoteFlag(self._send_stop)
        self._nap = _NAPS_S[0]
        self._listener = listen(host or launcher.address(), ports)
        host, port = self._listener.getsockname()[:2]
        self.address = str(host), int(port)
        """Where nodes connect to."""
        self._admitter = NodeAdmitter(
            self._listener,
            self._secret,
            launcher,
            lambda guest: Node(guest, self),
            heartbeat=timeout_s,
            timeout_s=start_timeout,
        )

    # -- start -----------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Have one node started per factory, and let them in.

        Raises:
            ConfigError: something that cannot be sent to another process.
            WorkerDied: a node ended before it joined.
            CollectorTimeout: not all had joined in time.
        """
        self._factories = pickled_each(factories)
        self._admitter.launch_first(len(factories))
        joined: dict[int, Node] = {}
        deadline = Deadline(self._start_timeout)
        while missing := [worker for worker in range(len(factories)) if worker not in joined]:
            if deadline.expired:
                host, port = self.address
                raise CollectorTimeout(
                    f"nodes {missing} did not join {host}:{port} within {self._start_timeout} s"
                )
            self._look()
            node = self._next_joined(min(deadline.left, LOOK_S))
            if node is not None:
                joined[node.index] = node
        self._peers = [joined[worker] for worker in range(len(factories))]
        if self._replaces:
            self._channels.poller.register(self._admitter.bell, select.EPOLLIN)
        else:
            self._admitter.stop(_EXIT_GRACE_S)
            self._listener.close()

    def boot(self, index: int, life: int) -> Boot:
        """Return what node ``index`` is to be, which was lost ``life`` times."""
        connect = self.plane.connect(index)
        return Boot(index, self._factories[index], self._threads, life, connect)

    def _look(self) -> None:
        """Look whether nodes that have joined are still there."""
        for fd, events in self._channels.poller.poll(0):
            self._turn_to(fd, events)

    def _next_joined(self, timeout: float = 0.0) -> Node | None:
        """Return a node that has joined, ``None`` if none does within ``timeout`` seconds.

        Raises:
            WorkerDied: one is lost before it has joined.
        """
        node = self._admitter.pop(timeout)
        if isinstance(node, WorkerDied):
            raise node
        if node is not None:
            node.heard = time.monotonic()
            self._channels.watch(node)
        return node

    def replace(self, worker: int, life: int) -> None:
        """Let go of ``worker`` and have another node started in its place, without waiting.

        Once it is up, `receive` returns its `Ready`; if it does not get that far, `receive` raises
        `WorkerDied`.

        Args:
            worker: The node's index.
            life: How many were lost before the new one.
        """
        self._drop(self._peers[worker])
        self._admitter.want(worker, life)

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
        self._channels.watch(peer)

    def wait(self, timeout: float) -> None:
        # Nothing tells when a rollout that was announced has landed.
        landing = any(node.announced for node in self._channels.peers())
        self._channels.wait(_NAPS_S[1] if landing else timeout)

    def _send_stop(self, value: int) -> None:
        for node in self._peers:
            if not node.gone:
                node.put(STOP + bytes([value]))

    def _poll(self, timeout: float | None) -> float | None:
        waiting = [node for node in self._channels.peers() if node.announced]
        if waiting and timeout:  # announced but not here, and nobody tells when it is
            interruptible(time.sleep, min(self._nap, timeout))
            self._nap, timeout = min(2 * self._nap, _NAPS_S[1]), 0.0
        for fd, events in interruptible(self._channels.poller.poll, timeout):
            self._turn_to(fd, events)
        for node in self._channels.peers():
            self._deliver(node)
        if self._arrived:
            self._nap = _NAPS_S[0]
            return None
        silent_in = self._next_silence(time.monotonic())
        if any(node.announced for node in self._channels.peers()):
            return self._nap
        return silent_in

    def _turn_to(self, fd: int, events: int) -> None:
        if fd == self._admitter.bell:
            self._replace()
            return
        node = self._channels.by_fd[fd]
        # Read first: what a node sent before it ended is whole, and so is what it is about.
        if events & ~select.EPOLLOUT:
            self._hear(node)
        if events & select.EPOLLOUT:
            node.flush()
        if not node.gone:
            self._channels.watch(node)

    def _replace(self) -> None:
        node = self._next_joined()
        if node is not None:
            self._peers[node.index] = node
            if self.stop_byte[0]:
                node.put(STOP + bytes([self.stop_byte[0]]))

    def _deliver(self, node: Node) -> None:
        """Hand over the replies of ``node`` that are here with all that belongs to them."""
        while node.announced:
            ticket, _ = head_of(node.announced[0])
            if not node.is_here(ticket):
                return
            try:
                node.land(ticket)
            except RuntimeError as err:
                node.announced.clear()
                raise self._died(node, f"was lost in the middle of a rollout ({err})") from None
            self._arrived.append(node.announced[0])
            node.announced.popleft()

    def _next_silence(self, now: float) -> float:
        """Return the seconds until some node has been silent for too long.

        Raises:
            WorkerDied: one has.
        """
        left = self.timeout_s
        for node in self._channels.peers():
            if node.leaving is not None and not node.announced:
                raise self._died(node, node.leaving)
            silent_for_s = now - node.heard
            if silent_for_s >= self.timeout_s:
                raise self._died(
                    node,
                    f"showed no sign of life for {silent_for_s:.0f} s: its host or the network is "
                    "down, or its process stands still",
                )
            left = min(left, self.timeout_s - silent_for_s)
        return left

    def _hear(self, peer: Node) -> None:
        try:
            peer.read()
            if self._publisher is not None:
                self._publisher.supply(peer)
        except ForgedFrameError as err:
            peer.leaving = f"was let go of: {err}"
            raise self._died(peer, peer.leaving) from None
        except (EOFError, OSError) as err:
            if not peer.in_flight():  # else what it had sent comes first; this is told again
                raise self._died(peer, f"closed its connection ({err})") from None

    def _exit_reason(self, peer: Node, reason: str) -> str:
        silent = time.monotonic() - peer.heard >= self.timeout_s
        if not peer.gone:
            peer.listen()
        wait = 0.0 if silent or peer.gone else _NEWS_S
        return f"on node {peer.address} {interruptible(peer.exit_reason, reason, wait)}"

    def _drop(self, peer: Node) -> None:
        """Hang up on ``peer`` and forget what it has to do with. Idempotent."""
        if self._publisher is not None:
            self._publisher.forget(peer)
        self._channels.drop(peer)
        peer.close()
        peer.announced.clear()  # rollouts it had announced cannot be fetched any more
        self._arrived = deque(f for f in self._arrived if head_of(f)[1] != peer.index)

    def stop(self, timeout: float) -> None:
        """End all nodes, also those that are just joining. Idempotent."""
        if self._closed:
            return
        self._closed = True
        # In a forked child the threads do not exist, and nodes are somebody else's.
        mine = self._owner == os.getpid()
        try:
            if mine:
                self._admitter.stop(min(timeout, _EXIT_GRACE_S))
        finally:  # nodes end also where Ctrl-C ends the wait for threads
            self._end_nodes(mine, timeout)

    def _end_nodes(self, mine: bool, timeout: float) -> None:
        nodes = {*self._peers, *self._channels.peers()}
        self._peers = []
        self._arrived.clear()
        if not mine:
            _keep_for_ever((self, nodes))
        for node in nodes:
            node.close(drop=mine)
        self._listener.close()
        self.launcher.stop(min(timeout, _EXIT_GRACE_S))
        self._channels.poller.close()


def _keep_for_ever(held: object) -> None:
    """Never let ``held`` be destroyed: the threads of its process groups are another process's."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
