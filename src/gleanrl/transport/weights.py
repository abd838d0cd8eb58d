"""Weights on their way to nodes: one copy here, one transfer to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from gleanrl.core.messages import BoardRef
from gleanrl.transport.peer import RemoteNode
from gleanrl.transport.process_group import Transfer
from gleanrl.weights.flat import FlatBuffer, check_fit


@dataclass(eq=False, slots=True)
class _Publication:
    """Weights of one version, and the nodes that have not taken them yet."""

    buffer: FlatBuffer
    moving: dict[int, Transfer] = field(default_factory=dict)


class NetworkBoard:
    """The weights of one model, published to all nodes.

    A node gets the next weights whatever it does, and takes them over when its next command begins;
    until it has done so it is sent no others, and then the newest. What it is asked to do is done
    with what had been published by then: before a command the newest are sent. So a learner that
    updates more often than a node collects costs that node's link two transfers per rollout.
    """

    def __init__(self, ref: BoardRef, nodes: Sequence[RemoteNode]) -> None:
        """Publish to ``nodes``.

        Args:
            ref: Where tensors lie; its offset is the board's number.
            nodes: All of them; may grow.
        """
        self.ref = ref
        self._nodes = nodes
        self._free: list[FlatBuffer] = []
        self._newest: _Publication | None = None
        self._moving: dict[int, list[_Publication]] = {}
        """Per node what it has not taken yet, oldest first."""
        self._behind: set[int] = set()
        self._absent: set[int] = set()
        """Nodes that are lost, or take the place of those and do not know of this board yet."""

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and send them; waits for nobody.

        Raises:
            WeightsError: a shape that is not the board's; nothing is published.
        """
        check_fit(self.ref, tensors)
        buffer = self._free.pop() if self._free else FlatBuffer(self.ref)
        buffer.fill(tensors, version, serial)
        older, self._newest = self._newest, _Publication(buffer)
        if older is not None:
            self._recycle(older)
        for node in self._nodes:
            if node.channel.fileno() < 0 or node.index in self._absent:
                continue
            if self._moving.get(node.index):
                self._behind.add(node.index)
            else:
                self._send(node)

    def include(self, node: RemoteNode) -> None:
        """Publish to ``node`` as well, which has been told of this board, from the newest on."""
        if node.index in self._absent:
            self._absent.discard(node.index)
            if self._newest is not None:
                self._send(node)

    def catch_up(self, node: RemoteNode) -> None:
        """Send the newest now: before a command that is to be carried out with it."""
        if node.index in self._behind:
            self._send(node)

    def taken(self, node: RemoteNode) -> None:
        """Note that ``node`` has taken over the oldest weights that were sent to it."""
        publication = self._moving[node.index].pop(0)
        publication.moving.pop(node.index).finish()
        self._recycle(publication)
        if node.index in self._behind and not self._moving[node.index]:
            self._send(node)

    def forget(self, node: RemoteNode) -> None:
        """Expect nothing more of ``node``."""
        self._absent.add(node.index)
        self._behind.discard(node.index)
        for publication in self._moving.pop(node.index, []):
            # What the transfer was reading from is not used again: nobody knows when it lets go.
            publication.moving.pop(node.index)

    def _send(self, node: RemoteNode) -> None:
        publication = self._newest
        assert publication is not None
        self._behind.discard(node.index)
        transfer = node.send_weights(self.ref.offset, publication.buffer.bytes)
        if transfer is None:
            return
        publication.moving[node.index] = transfer
        self._moving.setdefault(node.index, []).append(publication)

    def _recycle(self, publication: _Publication) -> None:
        if not publication.moving and publication is not self._newest:
            self._free.append(publication.buffer)
