"""Does anything grow? Ten thousand batches in a process of its own.

``python -m benchmarks.multi.flat sync|async BATCHES`` prints one line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.multi.figures import Figure, Tick
from benchmarks.multi.processes import Group, descriptors, page_faults, private_mib, workers

BATCHES = 10_000
WARM_UP = 1_000
"""Batches before the first reading: allocators and caches fill up in them."""
ALLOWED_MIB = 2.0


def growth(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Run `measure` of both kinds in fresh interpreters; rounds and seconds do not matter."""
    figures = []
    for kind in ("async", "sync"):
        found = _elsewhere(kind)
        tick(f"flat {kind}")
        figures += [
            Figure(f"{kind}: {name}", unit, [found[name]], limit)
            for name, unit, limit in (
                ("learner grew", "MiB", ALLOWED_MIB),
                ("workers grew", "MiB", ALLOWED_MIB),
                ("descriptors more", "", 0.0),
                ("/dev/shm entries more", "", 0.0),
                ("page faults per batch", "", 0.1),
                ("batches copied", "", 0.0),
                ("left after shutdown: descriptors", "", 0.0),
                ("left after shutdown: processes", "", None),
                ("left after shutdown: /dev/shm entries", "", 0.0),
            )
        ]
    return figures


def _elsewhere(kind: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.multi.flat", kind, str(BATCHES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise RuntimeError(f"WRONG flat {kind}: {last}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(kind: str, batches: int) -> dict[str, Any]:
    """Collect ``batches`` batches, publishing weights before every tenth."""
    import torch

    from benchmarks.multi import collectors
    from benchmarks.multi.envs import still
    from benchmarks.multi.weights import ballast_policy

    torch.set_num_threads(1)

    def build() -> collectors.Batches:
        return collectors.ours(kind, still(2, 1024), ballast_policy(17 * 2**10), 64, num_threads=1)

    # One collector before: what is started once per process is no leak of a collector.
    before = Group(build)
    before.wake()
    before.collect_batch()
    before.close()
    del before
    gc.collect()
    at_first = _counts(set())
    group = Group(build)
    group.wake()
    system: Any = group.system
    readings = []
    for number in range(WARM_UP + batches + 1):
        if number >= WARM_UP and (number - WARM_UP) % 1000 == 0:
            readings.append(_counts(group.pids))
        if number % 10 == 0:
            system.collector.update_policy_weights_()
        group.collect_batch()
    copied = system.collector.stats().get("batches_copied", 0)
    group.close()
    del group, system
    gc.collect()
    at_last = _counts(set())
    start, end = readings[0], readings[-1]
    return {
        "learner grew": end["learner"] - start["learner"],
        "workers grew": end["workers"] - start["workers"],
        "descriptors more": end["descriptors"] - start["descriptors"],
        "/dev/shm entries more": end["shm"] - start["shm"],
        "page faults per batch": (end["faults"] - start["faults"]) / batches,
        "batches copied": copied,
        "left after shutdown: descriptors": at_last["descriptors"] - at_first["descriptors"],
        "left after shutdown: processes": len(workers()),
        "left after shutdown: /dev/shm entries": at_last["shm"] - at_first["shm"],
        "readings": readings,
    }


def _counts(pids: set[int]) -> dict[str, float]:
    gc.collect()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "learner": private_mib([os.getpid()]),
        "workers": private_mib(pids),
        "descriptors": descriptors([os.getpid(), *pids]),
        "shm": len(list(Path("/dev/shm").iterdir())),
        "faults": usage.ru_minflt + usage.ru_majflt + page_faults(pids),
    }


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
