"""Sending weights to nodes, beside a bare broadcast of as many bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.distributed import raw
from benchmarks.distributed.cases import nodes
from benchmarks.multi.envs import still
from benchmarks.multi.figures import Figure, Tick
from benchmarks.multi.weights import ballast_policy

SIZES = {"4MB": 2**22, "100MB": 100 * 2**20}
LIMIT = 1.25


def sending(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Time an update until both nodes act with it, less a batch without one."""
    figures: list[Figure] = []
    for name, size in SIZES.items():
        policy: Any = ballast_policy(size)
        ours = nodes("sync", still(2, 16), policy, 2)
        broadcasts = raw.Broadcasts(size)

        def update(ours: Any = ours, policy: Any = policy) -> None:
            ours.collector.update_policy_weights_()
            ours.collect_batch()

        try:
            times: dict[str, list[float]] = {"update": [], "batch": [], "broadcast": []}
            for _ in range(rounds):
                policy.module.train_step()
                times["update"].append(_median(update, seconds))
                times["batch"].append(_median(ours.collect_batch, seconds / 4))
                times["broadcast"].append(_median(broadcasts.once, seconds))
            over = [
                (u - b) / c
                for u, b, c in zip(times["update"], times["batch"], times["broadcast"], strict=True)
            ]
        finally:
            ours.close()
            broadcasts.close()
        figures += [
            Figure(f"{name}: update and batch", "ms", times["update"]),
            Figure(f"{name}: batch alone", "ms", times["batch"]),
            Figure(f"{name}: bare broadcast", "ms", times["broadcast"]),
            Figure(f"{name}: update / broadcast", "x", over, LIMIT),
        ]
        tick(f"weights {name}")
    return figures


def _median(act: Callable[[], Any], seconds: float) -> float:
    """Return the median of at least five in milliseconds."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        act()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)
