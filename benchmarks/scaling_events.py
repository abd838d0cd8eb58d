"""The events of an asynchronous run of `benchmarks.scaling`."""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

_AHEAD = 2
"""Rollouts that a node is asked for beyond those delivered."""
_WARM = 0.25
"""Share of the rollouts that are delivered before counting begins."""


class Queues:
    """Nodes, the learner's link in both directions, and the learner, each serving one at a time."""

    def __init__(
        self,
        *,
        durations: Any,
        moved: float,
        sent: float,
        one_object: bool,
        latency: float,
        learn: float,
        update_every: int,
    ) -> None:
        """Set the run up.

        Args:
            durations: Of rollouts, ``[rollouts, nodes]``; used again from the start if need be.
            moved: Seconds a rollout takes on the learner's link in.
            sent: Seconds weights take on the learner's link out.
            one_object: Whether weights cross it once and not once per node.
            latency: Of a control message.
            learn: Seconds the learner takes per batch.
            update_every: Batches from one update to the next.
        """
        self._durations = durations.T.tolist()
        self._count = len(self._durations)
        self._moved, self._sent, self._one = moved, sent, one_object
        self._latency, self._learn, self._every = latency, learn, update_every
        nodes = range(self._count)
        self._events: list[tuple[float, int, Any, int, int]] = []
        self._order = 0
        self._asked = [0] * self._count
        self._busy = [False] * self._count
        self._made = [0] * self._count
        self._has = [0] * self._count  # the version a node acts with
        self._lies = [-1] * self._count  # the version that has come and waits for a rollout
        self._newest = 0
        self._current = list(nodes)  # nodes that have the newest version
        self._waiting: deque[int] = deque()  # nodes to send to
        self._out_busy = False
        self._in_free = 0.0
        self._arrived: deque[tuple[int, int]] = deque()
        self._learning = False
        self._delivered = 0
        self._lag = 0
        self._from: tuple[float, int] | None = None

    def run(self, rollouts: int) -> tuple[float, float]:
        """Deliver ``rollouts``; return rollouts per second and the mean lag in updates."""
        for node in range(self._count):
            for _ in range(_AHEAD):
                self._at(self._latency, self._ask, node)
        warm, now, counted = max(1, int(rollouts * _WARM)), 0.0, 0
        while self._delivered < rollouts:
            now, _, what, node, number = heapq.heappop(self._events)
            before = self._delivered
            what(now, node, number)
            if before < warm <= self._delivered:
                self._from = (now, self._delivered)
                self._lag = 0
        assert self._from is not None
        begin, first = self._from
        counted = self._delivered - first
        return counted / (now - begin), self._lag / counted

    def _at(self, time: float, what: Any, node: int, number: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, what, node, number))

    # -- nodes -----------------------------------------------------------------------------------

    def _ask(self, now: float, node: int, number: int) -> None:
        self._asked[node] += 1
        if not self._busy[node]:
            self._begin(now, node)

    def _begin(self, now: float, node: int) -> None:
        """Begin a rollout, with the newest weights that have come whole."""
        self._asked[node] -= 1
        self._busy[node] = True
        if self._lies[node] >= 0:
            self._has[node], self._lies[node] = self._lies[node], -1
            self._wants(now, node)  # only now may more be sent to it
        own = self._durations[node]
        took = own[self._made[node] % len(own)]
        self._made[node] += 1
        self._at(now + took, self._rolled, node, self._has[node])

    def _rolled(self, now: float, node: int, version: int) -> None:
        self._busy[node] = False
        self._in_free = max(self._in_free, now) + self._moved
        self._at(self._in_free + self._latency, self._arrives, node, version)
        if self._asked[node]:
            self._begin(now, node)

    # -- the learner -----------------------------------------------------------------------------

    def _arrives(self, now: float, node: int, version: int) -> None:
        self._arrived.append((node, version))
        if not self._learning:
            self._take(now)

    def _take(self, now: float) -> None:
        node, version = self._arrived.popleft()
        self._learning = True
        self._lag += self._newest - version
        self._at(now + self._latency, self._ask, node)
        self._at(now + self._learn, self._learnt, node)

    def _learnt(self, now: float, node: int, number: int) -> None:
        self._learning = False
        self._delivered += 1
        if self._delivered % self._every == 0:
            self._publish(now)
        if self._arrived:
            self._take(now)

    # -- weights ---------------------------------------------------------------------------------

    def _publish(self, now: float) -> None:
        self._newest += 1
        self._waiting.extend(self._current)
        self._current.clear()
        self._send(now)

    def _wants(self, now: float, node: int) -> None:
        if self._has[node] == self._newest:
            self._current.append(node)
            return
        self._waiting.append(node)
        self._send(now)

    def _send(self, now: float) -> None:
        """Send the newest weights to one who waits, or one copy to all; one at a time."""
        if self._out_busy or not self._waiting:
            return
        self._out_busy = True
        first = -1 if self._one else self._waiting.popleft()
        self._at(now + self._sent, self._came, first, self._newest)

    def _came(self, now: float, node: int, version: int) -> None:
        self._out_busy = False
        if node >= 0:
            self._lies[node] = version
        else:
            for waiting in self._waiting:
                self._lies[waiting] = version
            self._waiting.clear()
        self._send(now)
