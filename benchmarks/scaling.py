"""Frames per second against the number of nodes: a model, simulated, beside closed-form bounds.

``python -m benchmarks.scaling`` simulates every case and publishes the results. Nothing here runs a
collector: `docs/scaling.md` says what the model leaves out.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks import picture
from benchmarks.picture import short

INF = math.inf
NODES = (1, 4, 16, 64, 256, 1024, 4096)
SPREADS = (0.1, 0.2, 0.5)
_QUANTILES = 4001
_ROLLOUTS, _MOST_ROLLOUTS = 24, 120
_AHEAD = 2
"""Rollouts that the learner requests from a node beyond those delivered."""
_WARM = 0.25
"""Share of the rollouts that are delivered before counting begins."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The parameters of a run: seconds, bytes, and bytes per second of links."""

    nodes: int = 1
    envs: int = 16
    """Environments of a node, stepped together."""
    step_s: float = 1e-3
    """One step of all of them, with the policy's."""
    steps: int = 64
    """Steps of a rollout."""
    spread: float = 0.0
    """Standard deviation of a rollout's duration over its mean (log-normal): stragglers."""
    frame_bytes: float = 0.0
    """Bytes of the layout that cross the link per frame."""
    sync: bool = False
    link_in: float = INF
    """Of a learner, from all its nodes together."""
    link_out: float = INF
    weight_bytes: float = 0.0
    update_every: int = 1
    """Batches from one update to the next."""
    one_object: bool = False
    """An update crosses the learner's link once and not once per node: Ray's object store."""
    latency_s: float = 0.0
    """Of a control message, one way."""
    learn_frame_s: float = 0.0
    """The learner's time per frame."""

    @property
    def rollout_frames(self) -> int:
        """Frames of one node's rollout."""
        return self.envs * self.steps

    @property
    def rollout_s(self) -> float:
        """Mean duration of a rollout."""
        return self.steps * self.step_s

    @property
    def moved_s(self) -> float:
        """Duration of a rollout on the learner's link in."""
        return _ratio(self.frame_bytes * self.rollout_frames, self.link_in)

    @property
    def sent_s(self) -> float:
        """Duration of one copy of an update on the learner's link out."""
        return _ratio(self.weight_bytes, self.link_out)

    @property
    def copies(self) -> int:
        """How often an update crosses the learner's link."""
        return 1 if self.one_object else self.nodes

    @property
    def batch_rollouts(self) -> int:
        """Rollouts of one batch."""
        return self.nodes if self.sync else 1

    @property
    def learn_s(self) -> float:
        """The learner's time for one batch."""
        return self.batch_rollouts * self.rollout_frames * self.learn_frame_s


@dataclass(frozen=True, slots=True)
class Measured:
    """The results of a run."""

    frames_per_s: float
    lag: float
    """Updates that were published between the weights of a rollout and its delivery."""


# -- bounds ----------------------------------------------------------------------------------------


def straggler_factor(nodes: int, spread: float) -> float:
    """Return the mean of the slowest of ``nodes`` rollouts, over the mean of one."""
    if spread == 0 or nodes == 1:
        return 1.0
    sigma = math.sqrt(math.log1p(spread**2))
    normal = NormalDist()
    middle = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    quantiles = [normal.inv_cdf(u ** (1 / nodes)) for u in middle]
    return float(np.mean(np.exp(sigma * np.array(quantiles) - sigma**2 / 2)))


def bounds(cluster: Cluster) -> dict[str, float]:
    """Return the upper bounds of frames per second, by the part that binds."""
    found = {
        "node": cluster.nodes * cluster.envs / cluster.step_s,
        "link in": _ratio(cluster.link_in, cluster.frame_bytes),
        "learner": _ratio(cluster.batch_rollouts * cluster.rollout_frames, cluster.learn_s),
    }
    if cluster.sync:
        frames, sent = cluster.nodes * cluster.rollout_frames, cluster.sent_s
        rollout = cluster.rollout_s * straggler_factor(cluster.nodes, cluster.spread)
        found["straggler"] = frames / rollout
        found["weight out"] = _ratio(frames * cluster.update_every, cluster.copies * sent)
        least = rollout + 2 * cluster.latency_s + cluster.learn_s + sent / cluster.update_every
        found["round"] = frames / (least + cluster.moved_s)
    return found


def binding(cluster: Cluster) -> str:
    """Return the lowest bound, without the sum of a synchronous round."""
    found = bounds(cluster)
    found.pop("round", None)
    return min(found, key=found.__getitem__)


def _ratio(amount: float, rate: float) -> float:
    """Return ``amount / rate``; infinite for a rate of zero, zero for an infinite one."""
    if rate == 0:
        return INF
    return 0.0 if math.isinf(rate) else amount / rate


# -- the simulation --------------------------------------------------------------------------------


def simulate(cluster: Cluster, rollouts: int = _ROLLOUTS) -> Measured:
    """Run the model until every node has made about ``rollouts`` rollouts."""
    durations = _durations(cluster, rollouts)
    if cluster.sync:
        return _rounds(cluster, durations)
    return _FirstCome(cluster, durations).run(rollouts * cluster.nodes)


def _durations(cluster: Cluster, rollouts: int) -> Any:
    """Return the duration of every rollout, ``[rollouts, nodes]``; the mean is exact."""
    shape = (rollouts, cluster.nodes)
    if cluster.spread == 0:
        return np.full(shape, cluster.rollout_s)
    sigma = math.sqrt(math.log1p(cluster.spread**2))
    drawn = np.exp(np.random.default_rng(0).normal(-(sigma**2) / 2, sigma, shape))
    return cluster.rollout_s * drawn / drawn.mean()


def _rounds(cluster: Cluster, durations: Any) -> Measured:
    """Each node gets the weights, makes a rollout and sends it; then the learner learns."""
    count = cluster.nodes
    turns = np.ones(count) if cluster.one_object else np.arange(1, count + 1)
    behind = np.arange(count, 0, -1) * cluster.moved_s
    now, every = 0.0, cluster.update_every
    rounds = -(-len(durations) // every) * every  # whole intervals between updates
    for number in range(rounds):
        row, updated = durations[number % len(durations)], number % every == 0
        begun = now + cluster.latency_s + (turns * cluster.sent_s if updated else 0.0)
        ended = np.sort(begun + row) + cluster.latency_s
        # The link serves in order of arrival: the last byte of all is that of the busiest stretch.
        now = float(np.max(ended + behind)) + cluster.learn_s
    frames = rounds * count * cluster.rollout_frames
    return Measured(frames / now if now else INF, 0.0)


@dataclass(slots=True, eq=False)
class _Node:
    durations: Iterator[float]
    """Of its rollouts."""
    asked: int = 0
    """Rollouts that it is to make."""
    busy: bool = False
    version: int = 0
    """Of the weights that it acts with."""
    ready: int = -1
    """The version that has come and waits for the next rollout; -1 for none."""


class _FirstCome:
    """An asynchronous run: the learner takes rollouts in order of arrival.

    The learner and its link, in each direction, serve one at a time.
    """

    def __init__(self, cluster: Cluster, durations: Any) -> None:
        self._nodes = [_Node(itertools.cycle(own)) for own in durations.T.tolist()]
        self._cluster, self._learn_s = cluster, cluster.learn_s
        self._moved_s, self._sent_s = cluster.moved_s, cluster.sent_s
        self._events: list[tuple[float, int, Any, _Node | None, int]] = []
        self._order = itertools.count()
        self._now = self._in_free = 0.0
        self._newest = self._delivered = self._lag = 0
        self._current = list(self._nodes)  # nodes with the newest version
        self._waiting: deque[_Node] = deque()  # nodes that need a version
        self._arrived: deque[tuple[_Node, int]] = deque()
        self._sending = self._learning = False

    def run(self, rollouts: int) -> Measured:
        """Deliver ``rollouts``."""
        for node in self._nodes * _AHEAD:
            self._at(self._cluster.latency_s, self._ask, node)
        warm, begin, first = max(1, int(rollouts * _WARM)), 0.0, 0
        while self._delivered < rollouts:
            self._now, _, happens, of, version = heapq.heappop(self._events)
            happens(of, version)
            if not first and self._delivered == warm:
                begin, first, self._lag = self._now, warm, 0
        counted = rollouts - first
        rate = counted / (self._now - begin)
        return Measured(rate * self._cluster.rollout_frames, self._lag / counted)

    def _at(self, time: float, happens: Any, node: _Node | None, version: int = 0) -> None:
        heapq.heappush(self._events, (time, next(self._order), happens, node, version))

    # -- nodes

    def _ask(self, node: _Node, _: int) -> None:
        node.asked += 1
        if not node.busy:
            self._begin(node)

    def _begin(self, node: _Node) -> None:
        """Begin a rollout, with the newest weights that have come whole."""
        node.asked -= 1
        node.busy = True
        if node.ready >= 0:
            node.version, node.ready = node.ready, -1
            # Only now may more be sent to it.
            (self._current if node.version == self._newest else self._waiting).append(node)
            self._send()
        self._at(self._now + next(node.durations), self._rolled, node, node.version)

    def _rolled(self, node: _Node, version: int) -> None:
        node.busy = False
        self._in_free = max(self._in_free, self._now) + self._moved_s
        self._at(self._in_free + self._cluster.latency_s, self._arrives, node, version)
        if node.asked:
            self._begin(node)

    # -- the learner

    def _arrives(self, node: _Node, version: int) -> None:
        self._arrived.append((node, version))
        if not self._learning:
            self._take()

    def _take(self) -> None:
        node, version = self._arrived.popleft()
        self._learning = True
        self._lag += self._newest - version
        self._at(self._now + self._cluster.latency_s, self._ask, node)
        self._at(self._now + self._learn_s, self._learnt, node)

    def _learnt(self, _: _Node, __: int) -> None:
        self._learning = False
        self._delivered += 1
        if self._delivered % self._cluster.update_every == 0:
            self._newest += 1
            self._waiting.extend(self._current)
            self._current.clear()
            self._send()
        if self._arrived:
            self._take()

    def _send(self) -> None:
        """Send the newest weights to a node that waits, or one copy to all; one at a time."""
        if not self._sending and self._waiting:
            self._sending = True
            first = None if self._cluster.one_object else self._waiting.popleft()
            self._at(self._now + self._sent_s, self._came, first, self._newest)

    def _came(self, node: _Node | None, version: int) -> None:
        self._sending = False
        for each in self._waiting if node is None else (node,):
            each.ready = version
        if node is None:
            self._waiting.clear()
        self._send()


# -- cases and tables ------------------------------------------------------------------------------

TEN_GIGABIT = 1.25e9
NETWORK = Cluster(
    envs=64, link_in=TEN_GIGABIT, link_out=TEN_GIGABIT, latency_s=100e-6, learn_frame_s=2e-6
)
CASES: dict[str, Cluster] = {
    "small frames, cheap steps (CartPole)": replace(
        NETWORK, envs=16, step_s=100e-6, steps=512, spread=0.1, frame_bytes=60, weight_bytes=40e3,
        learn_frame_s=0.1e-6,
    ),
    "simulated robots (1 KB, weights of 4 MB)": replace(
        NETWORK, step_s=10e-3, spread=0.2, frame_bytes=1e3, weight_bytes=4e6, learn_frame_s=0.5e-6
    ),
    "images, stored once (28 KB, weights of 7 MB)": replace(
        NETWORK, step_s=20e-3, steps=32, spread=0.1, frame_bytes=28e3, weight_bytes=7e6
    ),
    "large policy (1 KB, weights of 400 MB)": replace(
        NETWORK, step_s=50e-3, spread=0.2, frame_bytes=1e3, weight_bytes=400e6
    ),
}  # fmt: skip
WAYS = {
    "sync": {"sync": True},
    "async": {},
    "sync, one object": {"sync": True, "one_object": True},
    "async, one object": {"one_object": True},
}


def table(case: Cluster) -> list[dict[str, Any]]:
    """Return one row per number of nodes: rates, lags, and the bound that binds."""
    rows = []
    for count in NODES:
        row: dict[str, Any] = {"nodes": count}
        for name, way in WAYS.items():
            cluster = replace(case, nodes=count, **way)
            if not cluster.sync:  # as often as in rounds: once per rollout of every node
                cluster = replace(cluster, update_every=count * case.update_every)
            found = simulate(cluster, _rollouts(cluster))
            row[name] = found.frames_per_s
            row[f"{name} lag"] = found.lag
            row[f"{name} binds"] = binding(cluster)
        rows.append(row)
    return rows


def _rollouts(cluster: Cluster) -> int:
    """Return a number of rollouts in which every node gets weights a few times."""
    round_s = cluster.nodes * cluster.rollout_frames / min(bounds(cluster).values())
    sent = cluster.copies * cluster.sent_s
    return int(min(_MOST_ROLLOUTS, max(_ROLLOUTS, 3 * sent / round_s)))


def show(document: dict[str, Any], name: str) -> list[str]:
    """Return a case's rows as lines of Markdown, or the straggler factors."""
    if name == "stragglers":
        factors = document[name]
        columns = [[f"{factor:.2f}" for factor in column] for column in factors.values()]
        nodes = (f"{count:,}" for count in NODES)
        return picture.markdown(["nodes", *factors], zip(nodes, *columns, strict=True), "---:")
    head = "nodes", "sync", "binds", "sync, one object", "async", "binds", "lag", "lag, one object"
    cells = (
        (
            f"{row['nodes']:,}",
            *(short(row["sync"]), row["sync binds"], short(row["sync, one object"])),
            *(short(row["async"]), row["async binds"]),
            *(f"{row[f'{way} lag']:.1f}" for way in ("async", "async, one object")),
        )
        for row in document["tables"][name]
    )
    return picture.markdown(head, cells, "---:")


def main() -> None:
    """Simulate every case and publish the results."""
    factors = {f"{spread}": [straggler_factor(n, spread) for n in NODES] for spread in SPREADS}
    tables = {name: table(case) for name, case in CASES.items()}
    text = json.dumps({"stragglers": factors, "tables": tables}, indent=1)
    Path(__file__).with_name("published").joinpath("scaling.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
