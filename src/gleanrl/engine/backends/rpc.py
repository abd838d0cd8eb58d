"""Workers on nodes of a torch.distributed.rpc world."""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gleanrl.core import messages as m
from gleanrl.core.errors import CollectorTimeout
from gleanrl.core.protocols import SourceFactory
from gleanrl.engine.backends.admission import Guest
from gleanrl.engine.backends.network import NetworkBackend
from gleanrl.engine.backends.network_node import RemoteNode
from gleanrl.engine.backends.rpc_weights import RpcBoard
from gleanrl.engine.launchers.launcher import Launcher
from gleanrl.memory.landing import Landing
from gleanrl.rollout import link
from gleanrl.rollout.rpc_node import LEAVE, RpcBoot
from gleanrl.rollout.rpc_post import Data, Post, paste
from gleanrl.rollout.rpc_world import (
    LEARNER,
    World,
    check_interface,
    check_outside,
    leave,
    open_store,
    warn_of_strangers,
)
from gleanrl.rollout.wire import head_of
from gleanrl.rollout.worker import OpenWindow
from gleanrl.weights.flat import plan_flat

_LOOK = 0.2
"""Seconds between two looks at whether all nodes have entered the world."""


class RpcNode(RemoteNode):
    """One node, seen from the learner: messages go by RPC."""

    def __init__(self, guest: Guest, open_window: OpenWindow) -> None:
        """Take over the connection on which the node was let in."""
        super().__init__(guest, open_window)
        self.mail: Post | None = None
        """Carries messages, once the world was entered."""
        self.arrived: dict[int, Data] = {}
        """Rollouts that have come, by ticket."""
        self._windows: dict[int, m.WindowRef] = {}
        """Where those that are due belong."""

    def connect(self, kind: str, patience: float) -> None:
        """Do nothing: all nodes enter the world at once."""

    def post(self, ticket: int, command: m.Command) -> None:
        """Send ``command``."""
        assert self.mail is not None
        if isinstance(command, m.Collect):
            self._windows[ticket] = command.window
        self.mail.send(self.index + 1, self._writer.write(ticket, command))

    def is_here(self, ticket: int) -> bool:
        """Return True: rollouts travel with their reply."""
        return True

    def land(self, ticket: int) -> None:
        """If ``ticket`` is that of a rollout, copy it into its window."""
        data, reference = self.arrived.get(ticket), self._windows.get(ticket)
        if data is not None and reference is not None:
            landing = self._landings.get(reference.slot)
            if landing is None:
                landing = Landing(self._open_window(reference), reference)
                self._landings[reference.slot] = landing
            paste(data, landing.pieces)
            landing.settle()
        # Last: an interrupt meanwhile must not lose it.
        self.arrived.pop(ticket, None)
        self._windows.pop(ticket, None)


class RPCBackend(NetworkBackend):
    """A `NetworkBackend` whose commands, replies, rollouts and weights travel by RPC.

    Nodes are let in on connections of their own, which tell who is gone; they and the learner then
    enter an RPC world. Every RPC puts one message down and returns, however many are under way.
    """

    _node_class = RpcNode

    def __init__(
        self,
        open_window: OpenWindow,
        launcher: Launcher,
        *,
        options: Mapping[str, Any] | None = None,
        devices: Sequence[Sequence[Any] | None] | None = None,
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
            options: For `TensorPipeRpcBackendOptions`, in every process.
            devices: Per node, the CUDA devices whose tensors its RPCs may carry.
            host: Address to listen on, and that nodes are told; the launcher's choice by default.
            ports: To listen on the first of these that is free; any by default.
            threads: torch threads of each node.
            patience: Seconds without a sign of life after which a node counts as dead, and that
                any RPC may take.
            start_timeout: Seconds all nodes together may take to join.

        Raises:
            ConfigError: RPC is initialised in this process already, or the port is taken.
        """
        check_outside()
        address = socket.gethostbyname(host or launcher.address())
        check_interface(address)
        warn_of_strangers(address)
        super().__init__(
            open_window,
            launcher,
            host=host,
            ports=ports,
            threads=threads,
            patience=patience,
            start_timeout=start_timeout,
        )
        self._options = dict(options or {})
        self._devices = devices
        self._published: list[RpcBoard] = []
        self._lost: list[tuple[RemoteNode, str]] = []
        self._store: Any = None
        self._entering: threading.Thread | None = None
        self._post: Post | None = None
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._event, select.EPOLLIN)

    # -- start -----------------------------------------------------------------------------------

    def start(self, factories: Sequence[SourceFactory]) -> None:
        """Have one node started per factory, let them in and enter an RPC world with them.

        Raises:
            ConfigError: something that cannot be sent to another process.
            WorkerDied: a node ended before it joined.
            CollectorTimeout: not all had joined in time.
        """
        self._store = open_store(self._host, self._patience)
        self._world = World(
            size=len(factories) + 1,
            host=self._host,
            port=self._store.port,
            patience=self._patience,
            token=secrets.token_hex(8),
            options=self._options,
        )
        super().start(factories)

    def _boot(self, index: int, factory: bytes, life: int) -> RpcBoot:
        world = self._world
        if self._devices is not None:
            own = {**self._options, "devices": list(self._devices[index] or [])}
            world = replace(world, options=own)
        return RpcBoot(self._threads, tuple(sys.path), factory, world)

    def _all_in(self, factories: Sequence[bytes]) -> None:
        """Enter the world; a node that goes away meanwhile is noticed."""
        super()._all_in(factories)
        timeout = self._world.timeout(LEARNER)
        post = Post(self._world, LEARNER, timeout, self._take, self._note_lost)
        self._post = post
        for node in self._nodes:
            assert isinstance(node, RpcNode)
            node.mail = post
        self._enter()

    def _enter(self) -> None:
        """Enter in another thread, and look after the nodes meanwhile."""
        address, timeout = socket.gethostbyname(self._host), self._patience
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                self._world.enter(LEARNER, self._store, address)
                outcome.append(None)
            except BaseException as err:
                outcome.append(err)

        thread = threading.Thread(target=run, name="gleanrl rpc", daemon=True)
        self._entering = thread
        thread.start()
        deadline = time.monotonic() + timeout
        while thread.is_alive():
            thread.join(_LOOK)
            for fd, events in self._poller.poll(0):
                self._turn_to(fd, events)
            if time.monotonic() > deadline:
                raise CollectorTimeout(f"the nodes did not enter an RPC world in {timeout} s")
        if outcome[0] is not None:
            raise outcome[0]

    def board(self, weights: Mapping[str, torch.Tensor]) -> RpcBoard:  # type: ignore[override]
        """Prepare to send weights like these to all nodes."""
        assert self._post is not None
        board = RpcBoard(plan_flat(len(self._published), weights), self._post, self._nodes)
        self._published.append(board)
        return board

    # -- messages --------------------------------------------------------------------------------

    def send(self, worker: int, ticket: int, command: m.Command) -> None:
        """Post ``command``; if the node is gone, `receive` says so.

        Raises:
            ClosedError: after `stop`.
            WorkerDied: `receive` has said already that the node is gone.
        """
        if not isinstance(command, m.Load | m.Bind | m.Close):
            for board in self._published:
                board.catch_up(worker)
        super().send(worker, ticket, command)

    def _take(self, sender: int, frame: bytes, data: Data) -> None:
        """Take in a reply, in a thread of the RPC agent."""
        node = self._nodes[sender - 1]
        ticket, _ = head_of(frame)
        if data:
            assert isinstance(node, RpcNode)
            node.arrived[ticket] = data
        self._frames.append((node, frame))
        self._wake()

    def _note_lost(self, peer: int, problem: str) -> None:
        """Note that a message did not arrive, in a thread of the RPC agent."""
        self._lost.append((self._nodes[peer - 1], problem))
        self._wake()

    def _wake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._event, 1)

    def _turn_to(self, fd: int, events: int) -> None:
        if self._frames:  # what a node sent before it ended comes before its end
            return
        if fd != self._event:
            super()._turn_to(fd, events)
            return
        os.eventfd_read(fd)
        while self._lost and not self._frames:
            node, problem = self._lost.pop()
            if node.channel.fileno() >= 0:
                raise self._died(node, f"cannot be reached by RPC ({problem})")

    # -- the end ---------------------------------------------------------------------------------

    def stop(self, timeout: float) -> None:
        """End all nodes: let those that were asked go, kill the rest. Idempotent."""
        if self._closed:
            return
        mine = self._owner == os.getpid()  # in a forked child it is somebody else's world
        if mine:
            leave()
            for node in {*self._nodes, *self._by_fd.values()}:
                if node.channel.fileno() >= 0:
                    node.put(link.key_frame(LEAVE, b""))
        super().stop(timeout)
        if mine:
            if self._entering is not None:  # it fails now that the nodes are gone
                self._entering.join(_LOOK)
            leave()
            if self._post is not None:
                self._post.close()
            self._store = None  # a forked child has not the thread that this would wait for
        os.close(self._event)
