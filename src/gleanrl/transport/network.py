"""Workers on nodes: messages over a connection of our own, data over torch.distributed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import ClosedError, CollectorTimeout, WorkerDied
from gleanrl.core.protocols import SourceFactory
from gleanrl.transport.frames import BEAT, LEAVE, STOP, WEIGHTS, head_of, read_weights, reply_in
from gleanrl.transport.handshake import Guest, Invitation, keep_alive, new_secret
from gleanrl.transport.joining import LOOK, Admission, NodeAdmitter, listen
from gleanrl.transport.launchers import Launcher
from gleanrl.transport.node import Boot, NodeBoot
from gleanrl.transport.peer import NEWS, RemoteFlag, RemoteNode
from gleanrl.transport.pickling import pickled
from gleanrl.transport.process_group import check_kind
from gleanrl.transport.stream import ForgedFrameError
from gleanrl.transport.waiting import interruptible
from gleanrl.transport.weights import NetworkBoard
from gleanrl.transport.worker import OpenWindow
from gleanrl.weights.flat import plan_flat

_GRACE = 1.0
"""Seconds within which a node that was told to end has to be gone."""
_IN_FLIGHT = 1.0
"""Seconds that what a node had sent may take to arrive once its connection has ended."""
_NAPS = 50e-6, 1e-3
"""Seconds between two looks at whether an announced rollout is here: at first, in the end."""


class NetworkBackend:
    """One node per worker, wherever a launcher starts them.

    Nodes connect here and show that they know the secret. Commands, replies and signs of life
    travel on that connection, so that it tells at once when a node's process or host is gone;
    rollouts and weights travel as flat tensors through a process group of two.
    """

    inline = False
    memory = None
    _node_class = RemoteNode

    def __init__(
        self,
        open_window: OpenWindow,
        launcher: Launcher,
        *,
        kind: str = "gloo",
        host: str | None = None,
        ports: Sequence[int] = (0,),
        threads: int = 1,
        patience: float = 60.0,
        start_timeout: float = 120.0,
    ) -> None:
        """Listen for nodes.

        Args:
            open_window: Maps windows of the learner's arenas.
            launcher: Starts the nodes.
            kind: Of process group.
            host: Address to listen on, and that nodes are told; the launcher's choice by default.
            ports: To listen on the first of these that is free; any by default.
            threads: torch threads of each node.
            patience: Seconds without a sign of life after which a node counts as dead.
            start_timeout: Seconds all nodes together may take to join.

        Raises:
            ConfigError: the process group is not available, or the port cannot be listened on.
        """
        check_kind(kind)
        self._open_window, self._launcher = open_window, launcher
        self._kind, self._threads = kind, threads
        self._patience, self._start_timeout = patience, start_timeout
        self._owner = os.getpid()
        self._secret = new_secret()
        self._nodes: list[RemoteNode] = []
        self._by_fd: dict[int, RemoteNode] = {}
        self._frames: deque[tuple[RemoteNode, bytes]] = deque()
        self._boards: list[NetworkBoard] = []
        self._closed = False
        self.stop_byte = RemoteFlag(self._tell_stop)
        self._host = host or launcher.address()
        listener = listen(self._host, ports)
        host, port = listener.getsockname()[:2]
        self.address = str(host), int(port)
        """Where nodes connect to."""
        self._admission = Admission(listener, self._secret, patience)
        self._poller = select.epoll()

    # -- start -----------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Have one node started per factory, and let them in.

        Raises:
            ConfigError: something that cannot be sent to another process.
            WorkerDied: a node ended before it joined.
            CollectorTimeout: not all had joined in time.
        """
        blobs = [pickled(worker, factory) for worker, factory in enumerate(factories)]
        self._launcher.launch([self._invitation(node) for node in range(len(blobs))])
        joined: dict[int, RemoteNode] = {}
        deadline = time.monotonic() + self._start_timeout
        while missing := [worker for worker in range(len(blobs)) if worker not in joined]:
            left = deadline - time.monotonic()
            if left <= 0:
                host, port = self.address
                raise CollectorTimeout(
                    f"nodes {missing} did not join {host}:{port} within {self._start_timeout} s"
                )
            self._check_started(missing)
            for guest in self._admission.wait(min(left, LOOK)):
                if guest.node in missing and guest.node not in joined:
                    node = self._welcome(self._remote(guest), blobs[guest.node])
                    joined[guest.node] = node
                else:
                    guest.sock.close()
        self._nodes.extend(joined[worker] for worker in range(len(blobs)))
        self._all_in(blobs)

    def _invitation(self, node: int) -> Invitation:
        return Invitation(*self.address, node, self._secret, self._start_timeout)

    def _all_in(self, factories: Sequence[bytes]) -> None:
        """Do what can be done once all nodes have joined."""
        self._admission.close()

    def _check_started(self, missing: Sequence[int]) -> None:
        for fd, events in self._poller.poll(0):  # of nodes that have joined: are they still there?
            self._serve(self._by_fd[fd], events)
        for worker in missing:
            fate = self._launcher.fate(worker, 0.0)
            if fate is not None:
                error = WorkerDied(
                    f"worker {worker} {fate} before it joined; what it printed last tells why"
                )
                error.worker = worker
                raise error

    def _remote(self, guest: Guest) -> RemoteNode:
        """Take over the connection of a node that was let in."""
        try:
            keep_alive(guest.sock, self._patience)
            return self._node_class(guest, self._open_window)
        except OSError as err:
            guest.sock.close()
            error = WorkerDied(f"worker {guest.node} was gone as soon as it had joined ({err})")
            error.worker = guest.node
            raise error from None

    def _welcome(self, node: RemoteNode, factory: bytes) -> RemoteNode:
        self._by_fd[node.channel.fileno()] = node
        self._poller.register(node.channel.fileno(), select.EPOLLIN)
        try:
            self._greet(node, factory)
        except (EOFError, OSError, RuntimeError) as err:
            raise self._died(node, str(err)) from None
        self._frames.extend((node, frame) for frame in node.early)
        return node

    def _greet(self, node: RemoteNode, factory: bytes, life: int = 0) -> None:
        node.channel.send(pickle.dumps(self._boot(node.index, factory, life)))
        node.connect(self._kind, self._patience)

    def _boot(self, index: int, factory: bytes, life: int) -> Boot:
        """Return what node ``index`` is told to be, which was lost ``life`` times."""
        return NodeBoot(self._threads, self._kind, tuple(sys.path), factory, life)

    def board(self, weights: Mapping[str, torch.Tensor]) -> NetworkBoard:
        """Prepare to send weights like these to all nodes."""
        board = NetworkBoard(plan_flat(len(self._boards), weights), self._nodes)
        self._boards.append(board)
        return board

    # -- messages --------------------------------------------------------------------------------

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Post ``command``; if the node is gone, `receive` says so, after what it had sent.

        Raises:
            ClosedError: after `stop`.
            WorkerDied: `receive` has said already that the node is gone.
        """
        if not self._nodes:
            raise ClosedError("the collector was shut down")
        node = self._nodes[worker]
        if node.channel.fileno() < 0:
            raise self._died(node, "is gone")
        if not isinstance(command, m.Load | m.Bind | m.Close):
            for board in self._boards:
                board.catch_up(node)
        node.post(ticket, command)
        self._watch(node)

    def _tell_stop(self, value: int) -> None:
        for node in self._nodes:
            if node.channel.fileno() >= 0:
                node.put(STOP + bytes([value]))

    def _watch(self, node: RemoteNode) -> None:
        pending = select.EPOLLOUT if node.channel.pending else 0
        self._poller.modify(node.channel.fileno(), select.EPOLLIN | pending)

    def receive(self, timeout: float | None) -> m.Reply:
        """Return the next reply of any node; a rollout is in its window by then.

        Raises:
            CollectorTimeout: none came within ``timeout`` seconds.
            WorkerDied: a node's process ended, or it showed no sign of life for too long.
        """
        place = self._whole()
        if place is None:
            place = self._await(timeout)
        node, frame = self._frames[place]
        reply = reply_in(frame)
        try:
            node.land(reply.ticket)
        except RuntimeError as err:
            del self._frames[place]
            raise self._died(node, f"was lost in the middle of a rollout ({err})") from None
        del self._frames[place]  # now: an interrupt while it was being read must not lose it
        return reply

    def _whole(self) -> int | None:
        """Return the place of the first reply that is here with all that belongs to it."""
        waiting: set[RemoteNode] = set()  # whose next reply is not: what follows has to wait, too
        for place in range(len(self._frames)):
            node, frame = self._frames[place]
            if node not in waiting:
                if node.is_here(head_of(frame)[0]):
                    return place
                waiting.add(node)
        return None

    def _owed(self, node: RemoteNode) -> bool:
        """Whether something ``node`` has announced is still to be handed over."""
        return any(each is node for each, _ in self._frames)

    def sound(self) -> bool:
        """Return False: `receive` also has to see how long nodes have been silent."""
        return False

    def wait(self, timeout: float) -> None:
        """Wait until there may be a reply; safe while another thread uses the backend."""
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._poller.poll(timeout)

    def _await(self, timeout: float | None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        left: float | None = 0.0  # first what is there: the learner may have been away for long
        nap, longest = _NAPS
        while True:
            for fd, events in interruptible(self._poller.poll, left):
                self._turn_to(fd, events)
            place = self._whole()
            if place is not None:
                return place
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise CollectorTimeout(f"no node replied within {timeout} s")
            limit = self._next_silence(now)
            left = limit if deadline is None else min(limit, deadline - now)
            if self._frames:  # announced but not here, and nobody tells when it is
                interruptible(time.sleep, nap)
                nap, left = min(2 * nap, longest), 0.0

    def _next_silence(self, now: float) -> float:
        """Return the seconds until some node has been silent for too long.

        Raises:
            WorkerDied: one has.
        """
        left = self._patience
        for node in list(self._by_fd.values()):
            if node.leaving is not None and not self._owed(node):
                raise self._died(node, node.leaving)
            quiet = now - node.heard
            if quiet >= self._patience:
                raise self._died(
                    node,
                    f"showed no sign of life for {quiet:.0f} s: its host or the network is down, "
                    "or its process stands still",
                    patience=0.0,
                )
            left = min(left, self._patience - quiet)
        return left

    def _turn_to(self, fd: int, events: int) -> None:
        self._serve(self._by_fd[fd], events)

    def _serve(self, node: RemoteNode, events: int) -> None:
        # Read first: what a node sent before it ended is whole, and so is what it is about.
        if events & ~select.EPOLLOUT:
            self._hear(node)
        if events & select.EPOLLOUT:
            node.flush()
        if node.channel.fileno() >= 0:
            self._watch(node)

    def _hear(self, node: RemoteNode) -> None:
        """Take in what ``node`` has sent.

        Raises:
            WorkerDied: its connection has ended, or is not its alone.
        """
        try:
            frames = node.channel.read()
        except ForgedFrameError as err:
            node.leaving = f"was let go of: {err}"
            raise self._died(node, node.leaving) from None
        except (EOFError, OSError) as err:
            if self._owed(node) and node.in_flight(_IN_FLIGHT):
                return  # what it had sent comes first; this is told again till then
            raise self._died(node, f"closed its connection ({err})") from None
        node.heard = time.monotonic()
        for frame in frames:
            if frame[:1] == WEIGHTS:
                self._boards[read_weights(frame)].taken(node)
            elif frame[:1] == LEAVE:
                node.leaving = frame[1:].decode()
            elif frame[:1] != BEAT:
                self._frames.append((node, frame))

    def _died(self, node: RemoteNode, how: str, patience: float = NEWS) -> WorkerDied:
        """Take leave of ``node``; its launcher may know more within ``patience`` seconds."""
        if node.channel.fileno() < 0:
            patience = 0.0
        else:
            node.listen()
        # Before it is dropped: an interrupt meanwhile must not lose the news.
        fate = interruptible(node.fate, self._launcher, how, patience)
        self._drop(node)
        error = WorkerDied(f"worker {node.index} on node {node.address} {fate}")
        error.worker = node.index
        return error

    def _drop(self, node: RemoteNode) -> None:
        """Hang up on ``node`` and forget what it has to do with. Idempotent."""
        if node.channel.fileno() >= 0:
            self._poller.unregister(node.channel.fileno())
            self._by_fd.pop(node.channel.fileno(), None)
            node.close()
            # Rollouts it had announced cannot be fetched any more.
            for _ in range(len(self._frames)):  # one by one: others may be put there meanwhile
                each = self._frames.popleft()
                if each[0] is not node:
                    self._frames.append(each)
        for board in self._boards:
            board.forget(node)

    def open(self, payload: m.Payload) -> Any:
        """Return the rollout, which travelled with the reply."""
        return payload.handle

    def stop(self, timeout: float) -> None:
        """End all nodes: let those that were asked go, kill the rest. Idempotent."""
        if self._closed:
            return
        self._closed = True
        nodes = {*self._nodes, *self._by_fd.values()}
        self._nodes.clear()
        self._frames.clear()
        self._by_fd.clear()
        foreign = self._owner != os.getpid()
        if foreign:
            _keep_for_ever((self, nodes))
        for node in nodes:
            node.close(drop=not foreign)
        self._admission.close()
        self._launcher.stop(min(timeout, _GRACE))
        self._poller.close()


def _keep_for_ever(held: object) -> None:
    """Never let ``held`` be destroyed: the threads of its process groups are another process's."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


_JOINING_GRACE = 1.0
"""Seconds that threads which let nodes in get to end."""


class ReplacingBackend(NetworkBackend):
    """A `NetworkBackend` that can have single nodes started anew; its port stays open for them.

    That happens in threads of its own, which hand over a node once it is up: everything else of
    the backend is the learner's, as before.
    """

    _joining: NodeAdmitter | None = None

    def _all_in(self, factories: Sequence[bytes]) -> None:
        def greet(node: RemoteNode, life: int) -> None:
            self._greet(node, factories[node.index], life)

        self._joining = NodeAdmitter(
            self._launcher,
            self._admission,
            self._remote,
            greet,
            self._invitation,
            self._start_timeout,
        )
        self._poller.register(self._joining.bell, select.EPOLLIN)

    def replace(self, worker: int, life: int) -> None:
        """Let go of ``worker`` and have another node started in its place, without waiting.

        Once it is up, `receive` returns its `Ready`; if it does not get that far, `receive` raises
        `WorkerDied`.

        Args:
            worker: The node's index.
            life: How many were lost before the new one.
        """
        assert self._joining is not None
        self._drop(self._nodes[worker])
        self._joining.want(worker, life)

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Post ``command``; a node that takes the place of another gets the newest with `Bind`.

        Raises:
            ClosedError: after `stop`.
            WorkerDied: `receive` has said already that the node is gone.
        """
        super().send(worker, ticket, command)
        if isinstance(command, m.Bind):
            self._boards[command.board.offset].include(self._nodes[worker])
            self._watch(self._nodes[worker])

    def _turn_to(self, fd: int, events: int) -> None:
        if self._joining is not None and fd == self._joining.bell:
            self._take_over(self._joining)
        else:
            super()._turn_to(fd, events)

    def _take_over(self, joining: NodeAdmitter) -> None:
        """Take in what has become of a node that is to replace another.

        Raises:
            WorkerDied: it is lost, too.
        """
        node = joining.pop()
        if isinstance(node, WorkerDied):
            raise node
        if node is None:
            return
        node.heard = time.monotonic()
        self._nodes[node.index] = self._by_fd[node.channel.fileno()] = node
        self._poller.register(node.channel.fileno(), select.EPOLLIN)
        if self.stop_byte[0]:
            node.put(STOP + bytes([self.stop_byte[0]]))
        self._frames.extend((node, frame) for frame in node.early)

    def stop(self, timeout: float) -> None:
        """End all nodes, also those that are just joining. Idempotent."""
        # In a forked child the threads do not exist, and nodes are somebody else's.
        if not self._closed and self._joining is not None and self._owner == os.getpid():
            self._joining.stop(min(timeout, _JOINING_GRACE))
        super().stop(timeout)
