"""Sending weights to nodes, beside a bare broadcast of as many bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
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

        def update(ours: Any = ours, policy: Any = policy) -> None:
            ours.collector.update_policy_weights_()
            ours.collect_batch()

        acts = {"update and batch": update, "batch alone": ours.collect_batch}
        try:
            policy.module.train_step()
            bare = _beside(acts, size, False, rounds, seconds)
            copied = _beside(acts, size, True, rounds, seconds)
        finally:
            ours.close()
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
    broadcasts = raw.Broadcasts(size, copied)
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
