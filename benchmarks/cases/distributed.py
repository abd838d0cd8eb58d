"""Two nodes on the loopback interface: throughput, and weights on their way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import checks, envs, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, gleanrl, torchrl
from benchmarks.harness import Build, Case, Figure, Measurement, Reference, Tick
from benchmarks.measurements import ballast_policy
from benchmarks.processes import Forked, grouped, turn
from benchmarks.suites import Suite
from benchmarks.systems import bare, ours

SIZES = {"1MB": (2**15, 16), "64MB": (2**20, 32)}
"""Bytes of an observation and steps of a rollout; each observation is delivered twice."""


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [
        *(delivered(kind, name) for kind in ("async", "sync") for name in SIZES),
        *(collected(name) for name in SIZES),
        cartpole(),
        *(theirs(kind) for kind in ("async", "sync")),
    ]


def _still(kind: str, size: int, frames: int) -> Build:
    made = envs.still(WORKERS, size)
    return grouped(lambda: ours.Bytes(ours.over("nodes", kind, made, None, frames), size))


def delivered(kind: str, name: str) -> Case:
    """Bytes per second that arrive over torch.distributed."""
    size, steps = SIZES[name]
    sends = grouped(lambda: bare.Sends(2 * size * steps))
    return Case(
        f"bytes-{name}-{kind}",
        f"no-op environment, {name} per rollout, 2 nodes, {kind}; bytes per second",
        _still(kind, size, steps * (WORKERS if kind == "sync" else 1)),
        [Reference("bare send and recv", sends, 0.8)],
        check=checks.real_bytes,
        turn=turn,
    )


def collected(name: str) -> Case:
    """The same, held against processes that have to make what they send, too."""
    size, steps = SIZES[name]
    made = grouped(lambda: bare.Collected(size, steps))
    return Case(
        f"collected-{name}-async",
        f"no-op environment, {name} per rollout, 2 nodes, async; bytes per second",
        _still("async", size, steps),
        [Reference("in-process collectors and bare send", made)],
        turn=turn,
    )


def cartpole() -> Case:
    """Two nodes against two collectors in two processes that nobody waits for."""
    policy = policies.categorical_policy(policies.mlp(4, 2))
    builds = [partial(_apart, policy, worker) for worker in range(WORKERS)]
    apart = grouped(lambda: Forked(builds, STEPS * ENVS))
    return Case(
        "cartpole-async",
        "CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, async",
        grouped(lambda: gleanrl("nodes", "async", policy)),
        [Reference("2 in-process collectors in 2 processes", apart, 0.9)],
        turn=turn,
    )


def _apart(policy: Any, worker: int) -> Any:
    ours.quiet_worker()
    factories = envs.seeded(envs.cartpole, WORKERS * ENVS)[worker * ENVS : (worker + 1) * ENVS]
    return ours.inline(factories, policy, STEPS * ENVS).collect_batch


def theirs(kind: str) -> Case:
    """The same work with TorchRL's collector of the same name."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        f"torchrl-{kind}",
        f"CartPole-v1 x16 per node, 2 nodes, 64-64 MLP, {kind}",
        grouped(lambda: gleanrl("nodes", kind, policy)),
        [
            Reference(
                "TorchRL DistributedCollector, mp, gloo",
                grouped(lambda: torchrl("nodes", kind, policy)),
                10.0,
            )
        ],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
        turn=turn,
    )


WEIGHTS = {"4MB": 2**22, "100MB": 100 * 2**20}
LIMIT = 1.25


def weights(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Time an update until both nodes act with it, less a batch without one."""
    figures: list[Figure] = []
    for name, size in WEIGHTS.items():
        policy: Any = ballast_policy(size)
        system = ours.over("nodes", "sync", envs.still(2, 16), policy, 2)

        def update(system: Any = system, policy: Any = policy) -> None:
            system.collector.update_policy_weights_()
            system.collect_batch()

        acts = {"update and batch": update, "batch alone": system.collect_batch}
        try:
            policy.module.train_step()
            bare = _beside(acts, size, False, rounds, seconds)
            copied = _beside(acts, size, True, rounds, seconds)
        finally:
            system.close()
        figures += [Figure(f"{name}: {what}", "ms", times) for what, times in bare.items()]
        figures += [
            Figure(f"{name}: broadcast of a copy, copied", "ms", copied["broadcast"]),
            Figure(f"{name}: update / broadcast", "x", _ratios(bare), LIMIT),
            Figure(f"{name}: update / broadcast with copies", "x", _ratios(copied)),
        ]
        tick(f"weights {name}")
    return figures


def _beside(
    acts: Mapping[str, Callable[[], Any]], size: int, copied: bool, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Time ``acts`` and broadcasts in turn."""
    broadcasts = bare.Broadcasts(size, copied)
    try:
        told = {**acts, "broadcast": broadcasts.once}
        times: dict[str, list[float]] = {what: [] for what in told}
        for _ in range(rounds):
            for what, act in told.items():
                times[what].append(_median(act, seconds))
        return times
    finally:
        broadcasts.close()


def _ratios(times: Mapping[str, list[float]]) -> list[float]:
    columns = (times["update and batch"], times["batch alone"], times["broadcast"])
    return [(u - b) / c for u, b, c in zip(*columns, strict=True)]


def _median(act: Callable[[], Any], seconds: float) -> float:
    """Return the median of at least five in milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def all_measurements() -> list[Measurement]:
    return [Measurement("weights", "weights to two nodes against a bare broadcast", weights)]


SUITE = Suite("benchmarks.distributed", all_cases, all_measurements, alone=True)
