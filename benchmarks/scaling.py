"""Frames per second against the number of nodes: a model, simulated, beside closed-form bounds.

``python -m benchmarks.scaling`` prints one table per case and writes them as JSON, from which
``python -m benchmarks.publish`` makes the tables and the plot of `docs/scaling.md`. Nothing here
runs a collector: that page says what the model leaves out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from benchmarks import picture
from benchmarks.picture import short
from benchmarks.scaling_events import Queues

INF = math.inf
NODES = (1, 4, 16, 64, 256, 1024, 4096)
SPREADS = (0.1, 0.2, 0.5)
PUBLISHED = Path(__file__).with_name("published") / "scaling.json"
_QUANTILES = 4001
_ROLLOUTS, _MOST_ROLLOUTS = 24, 120


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a run is made of. Times in seconds, sizes in bytes, links in bytes per second."""

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
    """Of the layout: what crosses per frame."""
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
    learn_batch_s: float = 0.0
    """The learner's time per batch, whatever its size."""
    learners: int = 1
    """Each with its share of the nodes, and a link of its own."""

    @property
    def rollout_frames(self) -> int:
        """Frames of one node's rollout."""
        return self.envs * self.steps

    @property
    def rollout_s(self) -> float:
        """Mean duration of a rollout."""
        return self.steps * self.step_s

    @property
    def batch_rollouts(self) -> int:
        """Rollouts of one batch."""
        return self.nodes if self.sync else 1

    @property
    def copies(self) -> int:
        """How often an update crosses the learner's link."""
        return 1 if self.one_object else self.nodes

    def learn_s(self) -> float:
        """Return the learner's time for one batch."""
        return self.learn_batch_s + self.batch_rollouts * self.rollout_frames * self.learn_frame_s

    def split(self) -> Cluster:
        """Return the part of one learner."""
        return replace(self, nodes=-(-self.nodes // self.learners), learners=1)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a run."""

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
    """Return what frames per second cannot exceed, by what it is that binds."""
    one = cluster.split()
    rollout = one.rollout_s * (straggler_factor(one.nodes, one.spread) if one.sync else 1.0)
    found = {
        "node": one.nodes * one.envs / one.step_s,
        "link in": _ratio(one.link_in, one.frame_bytes),
        "learner": _ratio(one.batch_rollouts * one.rollout_frames, one.learn_s()),
    }
    if one.sync:
        frames = one.nodes * one.rollout_frames
        sent = _ratio(one.weight_bytes, one.link_out)
        found["straggler"] = frames / rollout
        found["weight out"] = _ratio(frames * one.update_every, one.copies * sent)
        least = rollout + 2 * one.latency_s + one.learn_s() + sent / one.update_every
        found["round"] = frames / (
            least + _ratio(one.frame_bytes * one.rollout_frames, one.link_in)
        )
    return {name: value * cluster.learners for name, value in found.items()}


def binding(cluster: Cluster) -> str:
    """Return which bound is the lowest, the sum of a synchronous round aside."""
    found = bounds(cluster)
    found.pop("round", None)
    return min(found, key=found.__getitem__)


def one_after_another(cluster: Cluster) -> float:
    """Return the frames per second of synchronous rounds in which nothing overlaps."""
    one = cluster.split()
    rollout = one.rollout_s * straggler_factor(one.nodes, one.spread)
    frames = one.nodes * one.rollout_frames
    moved = _ratio(frames * one.frame_bytes, one.link_in)
    sent = one.copies * _ratio(one.weight_bytes, one.link_out) / one.update_every
    round_s = rollout + moved + sent + 2 * one.latency_s
    learnt = one.learn_batch_s + frames * one.learn_frame_s
    return cluster.learners * frames / (round_s + learnt)


def _ratio(amount: float, rate: float) -> float:
    """Return ``amount / rate``, where nothing over nothing takes no time and is no limit."""
    if rate == 0:
        return INF
    return 0.0 if math.isinf(rate) else amount / rate


# -- the simulation --------------------------------------------------------------------------------


def simulate(cluster: Cluster, rollouts: int = _ROLLOUTS, seed: int = 0) -> Measured:
    """Run the model until every node has made about ``rollouts`` rollouts."""
    one = cluster.split()
    durations = _durations(one, rollouts, seed)
    found = _rounds(one, durations) if one.sync else _first_come(one, durations)
    return replace(found, frames_per_s=found.frames_per_s * cluster.learners)


def _durations(cluster: Cluster, rollouts: int, seed: int) -> Any:
    """Return the duration of every rollout, ``[rollouts, nodes]``; the mean is exact."""
    shape = (rollouts, cluster.nodes)
    if cluster.spread == 0:
        return np.full(shape, cluster.rollout_s)
    sigma = math.sqrt(math.log1p(cluster.spread**2))
    drawn = np.exp(np.random.default_rng(seed).normal(-(sigma**2) / 2, sigma, shape))
    return cluster.rollout_s * drawn / drawn.mean()


def _rounds(cluster: Cluster, durations: Any) -> Measured:
    """Everybody gets the weights, makes a rollout, sends it; then the learner learns."""
    count = cluster.nodes
    sent = _ratio(cluster.weight_bytes, cluster.link_out)
    moved = _ratio(cluster.frame_bytes * cluster.rollout_frames, cluster.link_in)
    turns = np.ones(count) if cluster.one_object else np.arange(1, count + 1)
    behind = np.arange(count, 0, -1) * moved
    now, every = 0.0, cluster.update_every
    rounds = -(-len(durations) // every) * every  # whole intervals between updates
    for number in range(rounds):
        row, updated = durations[number % len(durations)], number % every == 0
        begun = now + cluster.latency_s + (turns * sent if updated else 0.0)
        ended = np.sort(begun + row) + cluster.latency_s
        # The link serves in order of arrival: the last byte of all is that of the busiest stretch.
        now = float(np.max(ended + behind)) + cluster.learn_s()
    frames = rounds * count * cluster.rollout_frames
    return Measured(frames / now if now else INF, 0.0)


def _first_come(cluster: Cluster, durations: Any) -> Measured:
    """Nodes have two rollouts ahead of them; the learner takes whatever was first."""
    queues = Queues(
        durations=durations,
        moved=_ratio(cluster.frame_bytes * cluster.rollout_frames, cluster.link_in),
        sent=_ratio(cluster.weight_bytes, cluster.link_out),
        one_object=cluster.one_object,
        latency=cluster.latency_s,
        learn=cluster.learn_s(),
        update_every=cluster.update_every,
    )
    rate, lag = queues.run(len(durations) * cluster.nodes)
    return Measured(rate * cluster.rollout_frames, lag)


# -- cases, tables and the picture -----------------------------------------------------------------

TEN_GIGABIT = 1.25e9
CASES: dict[str, Cluster] = {
    "small frames, cheap steps (CartPole)": Cluster(
        envs=16, step_s=100e-6, steps=512, spread=0.1, frame_bytes=60, weight_bytes=40e3,
        link_in=TEN_GIGABIT, link_out=TEN_GIGABIT, latency_s=100e-6, learn_frame_s=0.1e-6,
    ),
    "simulated robots (1 KB, weights of 4 MB)": Cluster(
        envs=64, step_s=10e-3, steps=64, spread=0.2, frame_bytes=1e3, weight_bytes=4e6,
        link_in=TEN_GIGABIT, link_out=TEN_GIGABIT, latency_s=100e-6, learn_frame_s=0.5e-6,
    ),
    "images, stored once (28 KB, weights of 7 MB)": Cluster(
        envs=64, step_s=20e-3, steps=32, spread=0.1, frame_bytes=28e3, weight_bytes=7e6,
        link_in=TEN_GIGABIT, link_out=TEN_GIGABIT, latency_s=100e-6, learn_frame_s=2e-6,
    ),
    "large policy (1 KB, weights of 400 MB)": Cluster(
        envs=64, step_s=50e-3, steps=64, spread=0.2, frame_bytes=1e3, weight_bytes=400e6,
        link_in=TEN_GIGABIT, link_out=TEN_GIGABIT, latency_s=100e-6, learn_frame_s=2e-6,
    ),
}  # fmt: skip
WAYS = {
    "sync": {"sync": True},
    "async": {},
    "sync, one object": {"sync": True, "one_object": True},
    "async, one object": {"one_object": True},
}


def table(case: Cluster, nodes: Sequence[int] = NODES) -> list[dict[str, Any]]:
    """Return one row per number of nodes: rates, lags, and what binds."""
    rows = []
    for count in nodes:
        row: dict[str, Any] = {"nodes": count}
        for name, way in WAYS.items():
            cluster = replace(case, nodes=count, **way)
            if not cluster.sync:  # as often as in rounds: once per rollout of every node
                cluster = replace(cluster, update_every=count * case.update_every)
            found = simulate(cluster, _rollouts(cluster))
            row[name] = found.frames_per_s
            row[f"{name} lag"] = found.lag
            row[f"{name} binds"] = binding(cluster)
            row[f"{name} bounds"] = bounds(cluster)
        rows.append(row)
    return rows


def _rollouts(cluster: Cluster) -> int:
    """Return how many rollouts a run takes in which weights have gone round a few times."""
    round_s = cluster.nodes * cluster.rollout_frames / min(bounds(cluster).values())
    sent = cluster.copies * _ratio(cluster.weight_bytes, cluster.link_out)
    return int(min(_MOST_ROLLOUTS, max(_ROLLOUTS, 3 * sent / round_s)))


def show(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as lines of Markdown."""
    head = "nodes", "sync", "binds", "sync, one object", "async", "binds", "lag", "lag, one object"
    lines = [f"| {' | '.join(head)} |", "|" + "---:|" * len(head)]
    for row in rows:
        cells = (
            f"{row['nodes']:,}",
            short(row["sync"]),
            row["sync binds"],
            short(row["sync, one object"]),
            short(row["async"]),
            row["async binds"],
            f"{row['async lag']:.1f}",
            f"{row['async, one object lag']:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def show_stragglers(factors: dict[str, list[float]]) -> list[str]:
    """Return straggler factors, by spread and then by number of nodes, as lines of Markdown."""
    lines = [f"| nodes | {' | '.join(factors)} |", "|---:|" + "---:|" * len(factors)]
    for count, row in zip(NODES, zip(*factors.values(), strict=True), strict=True):
        lines.append(f"| {count:,} | {' | '.join(f'{factor:.2f}' for factor in row)} |")
    return lines


def draw(tables: dict[str, Sequence[dict[str, Any]]]) -> str:
    """Return rates over nodes as SVG, with the bounds of the asynchronous way as dashed lines."""
    panels = {}
    for name, rows in tables.items():
        curves = {way: [(row["nodes"], row[way]) for row in rows] for way in list(WAYS)[:3]}
        for bound in ("node", "link in", "learner"):
            values = [(row["nodes"], row["async bounds"][bound]) for row in rows]
            top = 4 * max(row["async"] for row in rows)
            curves[f"bound: {bound}"] = [point for point in values if point[1] <= top]
        panels[name] = {key: curve for key, curve in curves.items() if curve}
    notes = ["Simulated, not measured. Across: nodes. Up: frames per second."]
    return picture.curves("Frames per second over nodes", panels, notes)


def main() -> None:
    """Simulate every case and write what came of it."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--out", type=Path, default=PUBLISHED)
    out: Path = read.parse_args().out
    factors = {f"{spread}": [straggler_factor(n, spread) for n in NODES] for spread in SPREADS}
    tables = {name: table(case) for name, case in CASES.items()}
    out.write_text(json.dumps({"stragglers": factors, "tables": tables}, indent=1) + "\n")
    for name, rows in tables.items():
        print("\n".join([name, *show(rows), ""]))


if __name__ == "__main__":
    main()
