"""Weights on their way to nodes by RPC: one copy here, one message to each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gleanrl.core.messages import BoardRef
from gleanrl.engine.backends.network_node import RemoteNode
from gleanrl.rollout.link import weights_frame
from gleanrl.rollout.rpc_post import Post
from gleanrl.weights.flat import FlatBuffer, check_fit


@dataclass(eq=False, slots=True)
class _Publication:
    """Weights of one version, and how many messages still read from them."""

    buffer: FlatBuffer
    readers: int = 0


class RpcBoard:
    """The weights of one model, published to all nodes.

    While weights are on their way to a node it is sent no others; when they have arrived it gets
    those that are the newest by then. A command does not wait for that: before it, the newest are
    sent, so that it is carried out with what had been published when it was given.
    """

    def __init__(self, ref: BoardRef, post: Post, nodes: Sequence[RemoteNode]) -> None:
        """Publish to ``nodes``.

        Args:
            ref: Where tensors lie; its offset is the board's number.
            post: Carries them.
            nodes: All of them.
        """
        self.ref = ref
        self._post, self._nodes = post, nodes
        self._lock = threading.RLock()  # messages may arrive while they are being sent
        self._free: list[FlatBuffer] = []
        self._newest: _Publication | None = None
        self._moving: dict[int, int] = {node.index: 0 for node in nodes}
        """Per node, how many messages are on their way."""
        self._behind: set[int] = set()

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and send them; waits for nobody.

        Raises:
            WeightsError: a shape that is not the board's; nothing is published.
        """
        check_fit(self.ref, tensors)
        with self._lock:
            buffer = self._free.pop() if self._free else FlatBuffer(self.ref)
        buffer.fill(tensors, version, serial)
        with self._lock:
            older, self._newest = self._newest, _Publication(buffer)
            if older is not None:
                self._recycle(older)
            for node in self._nodes:
                if node.channel.fileno() < 0:
                    continue
                if self._moving[node.index]:
                    self._behind.add(node.index)
                else:
                    self._send(node.index)

    def catch_up(self, node: int) -> None:
        """Before ``node`` is given a command: send it the newest weights if it was not."""
        with self._lock:
            if node in self._behind:
                self._send(node)

    def _send(self, node: int) -> None:
        publication = self._newest
        assert publication is not None
        self._behind.discard(node)
        self._moving[node] += 1
        publication.readers += 1
        self._post.send(
            node + 1,
            weights_frame(self.ref.offset),
            publication.buffer.bytes,
            lambda: self._arrived(node, publication),
        )

    def _arrived(self, node: int, publication: _Publication) -> None:
        with self._lock:
            self._moving[node] -= 1
            publication.readers -= 1
            self._recycle(publication)
            if node in self._behind and not self._moving[node]:
                self._send(node)

    def _recycle(self, publication: _Publication) -> None:
        if not publication.readers and publication is not self._newest:
            self._free.append(publication.buffer)
