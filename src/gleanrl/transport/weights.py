"""Weights on their way to workers that share no memory with the learner.

The weights of one model travel as one flat tensor:

    [version, serial: int64][padding to 64 bytes][tensors, each aligned to 64 bytes]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from gleanrl.core.messages import Snapshot, WeightsRef
from gleanrl.weights.shared import check_fit, planned, views_of

if TYPE_CHECKING:
    from gleanrl.transport.network import Node

_HEADER = 64
"""Bytes of a buffer before its tensors."""


def plan_flat(weights: Mapping[str, torch.Tensor]) -> WeightsRef:
    """Return where tensors like ``weights`` lie in a buffer, which begins at 0."""
    return planned(weights, _HEADER)


class FlatBuffer:
    """One buffer in ordinary memory, and its tensors as views."""

    def __init__(self, ref: WeightsRef) -> None:
        self.bytes = torch.zeros(ref.nbytes, dtype=torch.uint8)
        """uint8 ``[ref.nbytes]``."""
        self._words = self.bytes[:16].view(torch.int64)
        self._views = views_of(self.bytes, ref)

    def fill(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of the plan."""
        self._words[0], self._words[1] = version, serial
        with torch.no_grad():
            torch._foreach_copy_(list(self._views.values()), list(tensors))

    def snapshot(self, model_id: str) -> Snapshot:
        """Return what is in it as weights of ``model_id``, over the same memory."""
        version, serial = int(self._words[0]), int(self._words[1])
        return Snapshot(version, {model_id: self._views}, serial)


@dataclass(eq=False, slots=True)
class _Publication:
    """Weights of one version, and how many transfers still read from them."""

    buffer: FlatBuffer
    readers: int = 0


class FlatWeightPublisher:
    """Publishes the weights of one model to nodes: one copy here, one transfer to each.

    While weights are on their way to a worker it is sent no others, and then the newest. Before a
    command the newest are sent at once, because the worker carries it out with what had been
    published by then. So a learner that updates more often than a worker collects costs that
    worker's connection two transfers per rollout.
    """

    def __init__(self, ref: WeightsRef) -> None:
        """Publish to nobody yet; `include` adds nodes. ``ref`` says where tensors lie."""
        self.ref = ref
        self._free: list[FlatBuffer] = []
        self._newest: _Publication | None = None
        self._in_flight: dict[Node, int] = {}
        """Per node, how many transfers it has not taken yet."""
        self._behind: set[Node] = set()

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and send them; waits for nobody.

        Raises:
            WeightsError: a shape that is not the plan's; nothing is published.
        """
        check_fit(self.ref, tensors)
        buffer = self._free.pop() if self._free else FlatBuffer(self.ref)
        buffer.fill(tensors, version, serial)
        older, self._newest = self._newest, _Publication(buffer)
        self._recycle(older)
        for node, in_flight in self._in_flight.items():
            if in_flight:
                self._behind.add(node)
            else:
                self._send(node)

    def include(self, node: Node) -> None:
        """Publish to ``node`` as well, from the newest on."""
        self._in_flight[node] = 0
        if self._newest is not None:
            self._send(node)

    def catch_up(self, node: Node) -> None:
        """Send the newest now if ``node`` is behind."""
        if node in self._behind:
            self._send(node)

    def forget(self, node: Node) -> None:
        """Publish to ``node`` no more; a buffer that it may still be sent is not used again."""
        self._in_flight.pop(node, None)
        self._behind.discard(node)

    def _send(self, node: Node) -> None:
        publication = self._newest
        assert publication is not None
        self._behind.discard(node)
        self._in_flight[node] += 1
        publication.readers += 1
        taken = partial(self._taken, node, publication)
        if not node.send_weights(publication.buffer.bytes, taken):
            self._in_flight[node] -= 1
            publication.readers -= 1

    def _taken(self, node: Node, publication: _Publication) -> None:
        publication.readers -= 1
        self._recycle(publication)
        self._in_flight[node] -= 1
        if node in self._behind and not self._in_flight[node]:
            self._send(node)

    def _recycle(self, publication: _Publication | None) -> None:
        if publication is None or publication is self._newest:
            return
        if not publication.readers:
            self._free.append(publication.buffer)
