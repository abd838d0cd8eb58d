"""A network backend whose lost nodes are replaced."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence

from gleanrl.core import messages as m
from gleanrl.core.errors import WorkerDied
from gleanrl.engine.backends.joining import Joining
from gleanrl.engine.backends.network import NetworkBackend
from gleanrl.engine.backends.network_node import RemoteNode
from gleanrl.rollout import link

_GRACE = 1.0
"""Seconds that threads which let nodes in get to end."""


class ReplacingBackend(NetworkBackend):
    """A `NetworkBackend` that can have single nodes started anew; its port stays open for them.

    That happens in threads of its own, which hand over a node once it is up: everything else of
    the backend is the learner's, as before.
    """

    _joining: Joining | None = None

    def _all_in(self, factories: Sequence[bytes]) -> None:
        def greet(node: RemoteNode, life: int) -> None:
            self._greet(node, factories[node.index], life)

        self._joining = Joining(
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

    def _take_over(self, joining: Joining) -> None:
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
            node.put(link.STOP + bytes([self.stop_byte[0]]))
        self._frames.extend((node, frame) for frame in node.early)

    def stop(self, timeout: float) -> None:
        """End all nodes, also those that are just joining. Idempotent."""
        # In a forked child the threads do not exist, and nodes are somebody else's.
        if not self._closed and self._joining is not None and self._owner == os.getpid():
            self._joining.stop(min(timeout, _GRACE))
        super().stop(timeout)
