"""Does memory stay flat? Resident size over many batches, in a process of its own.

``python -m benchmarks.memory 1000`` prints one line of JSON.
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

WARM_UP = 100
"""Batches before the first reading: allocators and caches fill up in them."""
ALLOWED_MIB = 2.0
"""Growth that counts as flat: about a tenth of a percent of a torch process."""


def measure_elsewhere(batches: int) -> dict[str, Any]:
    """Run `measure` in a fresh interpreter, where no other case has stretched the heap."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory", str(batches)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {"skipped": done.stderr.strip().splitlines()[-1:] or ["failed"]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(batches: int) -> dict[str, Any]:
    """Collect ``batches`` batches of CartPole x16 with an MLP and read the resident size."""
    import torch

    from benchmarks import envs, policies
    from benchmarks.ours import Ours

    torch.set_num_threads(1)
    policy = policies.categorical_policy(policies.mlp(4, 2))
    system = Ours(envs.seeded(envs.cartpole, 16), policy, 1024)
    for _ in range(WARM_UP):
        system.collect_batch()
    readings = [_resident_mib()]
    every = max(batches // 20, 1)
    for number in range(1, batches + 1):
        system.collect_batch()
        if number % every == 0:
            readings.append(_resident_mib())
    system.close()
    growth = readings[-1] - readings[0]
    return {
        "batches": batches,
        "rss_mib": readings,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "growth_mib": growth,
        "met": growth <= ALLOWED_MIB,
    }


def _resident_mib() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)))
