"""Workers whose steps take very different times: how much of the environments' time is lost?"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.multi import collectors
from benchmarks.multi.envs import timed
from benchmarks.multi.figures import Figure, Tick

WORKERS = 4
MEAN = 0.002
STEPS = 16
LIMIT = 5.0


def lost(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Measure the share of wall time that environments were not stepping, in percent.

    The environments sleep, so that four of them do not compete for two cores; their time is what
    passes in `step`. All of a worker's time between its first and its last observation counts.
    """
    systems = {
        kind: collectors.ours(
            kind,
            timed(WORKERS, MEAN, True),
            None,
            STEPS * (WORKERS if kind == "sync" else 1),
            num_threads=1,
        )
        for kind in ("async", "sync")
    }
    shares: dict[str, list[float]] = {kind: [] for kind in systems}
    try:
        for _ in range(rounds):
            for kind, system in systems.items():
                shares[kind].append(100 * _lost(system, max(2.0, seconds)))
                tick(f"stragglers {kind}")
    finally:
        for system in systems.values():
            system.close()
    limits = {"async": LIMIT, "sync": None}
    return [
        Figure(f"busy time lost, {WORKERS} workers, {kind}", "%", values, limits[kind])
        for kind, values in shares.items()
    ]


def _lost(system: collectors.Batches, seconds: float) -> float:
    """Return the lost share of one window."""
    for _ in range(4 * WORKERS):  # what was made while others were measured
        system.collect_batch()
    first: dict[int, Any] = {}
    last: dict[int, Any] = {}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        system.collect_batch()
        fields = system.fields()
        rows = fields["observation"], fields["next.observation"]
        for roots, successors in zip(*rows, strict=True):
            first.setdefault(int(successors[0, 2]), roots[0].copy())
            last[int(successors[0, 2])] = successors[-1].copy()
    if len(first) != WORKERS:
        raise RuntimeError(f"WRONG only workers {sorted(first)} delivered")
    spans = [last[number] - first[number] for number in first]
    return float(1 - sum(span[1] for span in spans) / sum(span[0] for span in spans))
