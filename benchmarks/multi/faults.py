"""Large observations: is memory used again, or does every batch cost new pages and copies?"""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.multi import cases
from benchmarks.multi.figures import Figure, Tick
from benchmarks.multi.processes import Group, page_faults

LIMIT = 1.0
"""Page faults per batch that count as none; fresh memory would cost hundreds to thousands."""


def page_faults_per_batch(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Count page faults of learner and workers, and batches that had to be copied."""
    figures = []
    for kind in ("async", "sync"):
        for name, size in cases.SIZES.items():
            group = Group(lambda kind=kind, size=size: cases.still_collector(kind, size))  # type: ignore[misc]
            group.wake()
            try:
                values, copied = _count(group, rounds, min(seconds, 0.5))
            finally:
                group.close()
            tick(f"faults {name} {kind}")
            figures += [
                Figure(f"{name} {kind}: page faults per batch", "", values, LIMIT),
                Figure(f"{name} {kind}: batches copied", "", [copied], 0.0),
            ]
    return figures


def _count(group: Group, rounds: int, seconds: float) -> tuple[list[float], float]:
    pids = [os.getpid(), *group.pids]
    for _ in range(12):
        group.collect_batch()
    values = []
    for _ in range(rounds):
        before, batches = page_faults(pids), 0
        end = time.perf_counter() + seconds
        while batches < 10 or time.perf_counter() < end:
            group.collect_batch()
            batches += 1
        values.append((page_faults(pids) - before) / batches)
    system: Any = group.system
    return values, float(system.batches.collector.stats()["batches_copied"])
