"""Weights on their way to workers that share no memory with the learner.

The weights of one model travel as one flat tensor:

    [version, serial: int64][padding to 64 bytes][tensors, each aligned to 64 bytes]
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from gleanrl.core.messages import Snapshot, WeightsRef
from gleanrl.weights.shared import check_fit, planned, views_of

P = TypeVar("P", bound=Hashable)
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


# -- the learner's side ----------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Publication:
    """Weights of one version, and how many transfers still read from them."""

    buffer: FlatBuffer
    readers: int = 0


class FlatWeightPublisher(Generic[P]):
    """Publishes the weights of one model to workers: one copy here, one transfer to each.

    While weights are on their way to a worker it is sent no others, and then the newest. Before a
    command the newest are sent at once, because the worker carries it out with what had been
    published by then. So a learner that updates more often than a worker collects costs that
    worker's connection two transfers per rollout.
    """

    def __init__(
        self, ref: WeightsRef, send: Callable[[P, torch.Tensor, Callable[[], None]], bool]
    ) -> None:
        """Publish to nobody yet; `include` adds workers.

        Args:
            ref: Where tensors lie in a buffer.
            send: Sends a buffer to a worker and calls back, in any thread, once the buffer may
                change again; returns ``False`` if the worker is gone.
        """
        self.ref = ref
        self._send_to = send
        self._lock = threading.RLock()  # transfers may end in other threads, and during `send`
        self._free: list[FlatBuffer] = []
        self._newest: _Publication | None = None
        self._in_flight: dict[P, int] = {}
        """Per worker, how many transfers it has not taken yet."""
        self._behind: set[P] = set()

    def publish(self, tensors: Sequence[torch.Tensor], version: int, serial: int) -> None:
        """Copy ``tensors``, in the order of ``ref``, and send them; waits for nobody.

        Raises:
            WeightsError: a shape that is not the plan's; nothing is published.
        """
        check_fit(self.ref, tensors)
        with self._lock:
            buffer = self._free.pop() if self._free else FlatBuffer(self.ref)
        buffer.fill(tensors, version, serial)
        with self._lock:
            older, self._newest = self._newest, _Publication(buffer)
            self._recycle(older)
            for peer, in_flight in list(self._in_flight.items()):
                if in_flight:
                    self._behind.add(peer)
                else:
                    self._send(peer)

    def include(self, peer: P) -> None:
        """Publish to ``peer`` as well, from the newest on."""
        with self._lock:
            self._in_flight[peer] = 0
            if self._newest is not None:
                self._send(peer)

    def catch_up(self, peer: P) -> None:
        """Send the newest now if ``peer`` is behind."""
        with self._lock:
            if peer in self._behind:
                self._send(peer)

    def forget(self, peer: P) -> None:
        """Publish to ``peer`` no more; a buffer that it may still be sent is not used again."""
        with self._lock:
            self._in_flight.pop(peer, None)
            self._behind.discard(peer)

    def _send(self, peer: P) -> None:
        publication = self._newest
        assert publication is not None
        self._behind.discard(peer)
        self._in_flight[peer] += 1
        publication.readers += 1
        taken = partial(self._taken, peer, publication)
        if not self._send_to(peer, publication.buffer.bytes, taken):
            self._in_flight[peer] -= 1
            publication.readers -= 1

    def _taken(self, peer: P, publication: _Publication) -> None:
        with self._lock:
            publication.readers -= 1
            self._recycle(publication)
            if peer in self._in_flight:
                self._in_flight[peer] -= 1
                if peer in self._behind and not self._in_flight[peer]:
                    self._send(peer)

    def _recycle(self, publication: _Publication | None) -> None:
        if publication is None or publication is self._newest:
            return
        if not publication.readers:
            self._free.append(publication.buffer)


# -- the worker's side -----------------------------------------------------------------------------


class LatestWeights:
    """The newest weights that were put here and not taken over yet; a `WeightReceiver`."""

    def __init__(self, fetch: Callable[[Any, torch.Tensor], None]) -> None:
        self._fetch = fetch
        self._model_id = ""
        self._buffer: FlatBuffer | None = None
        self._newest: deque[Any] = deque(maxlen=1)

    def put(self, weights: Any) -> None:
        """Note the newest; those before are never fetched. Any thread may."""
        self._newest.append(weights)

    def bind(self, model_id: str, ref: WeightsRef) -> None:
        self._model_id, self._buffer = model_id, FlatBuffer(ref)

    def newest(self) -> Snapshot | None:
        if self._buffer is None or not self._newest:
            return None
        self._fetch(self._newest.pop(), self._buffer.bytes)
        return self._buffer.snapshot(self._model_id)
