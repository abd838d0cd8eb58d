"""How long until the first batch, in a fresh process each time.

``python -m benchmarks.multi.start sync|async`` prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from benchmarks.multi.figures import Figure, Tick


def starting(rounds: int, seconds: float, tick: Tick) -> list[Figure]:
    """Compare it with importing torch, in turns; at most five rounds, for they are slow."""
    found: dict[str, list[dict[str, float]]] = {"torch": [], "sync": [], "async": []}
    for number in range(min(rounds, 5)):
        for what in found if number % 2 == 0 else reversed(found):
            found[what].append(_elsewhere(what))
            tick(f"start {what}")
    imports = [item["first"] for item in found["torch"]]
    figures = [Figure("importing torch", "s", imports)]
    for kind in ("async", "sync"):
        firsts = [item["first"] for item in found[kind]]
        shares = [first / torch for first, torch in zip(firsts, imports, strict=True)]
        figures += [
            Figure(f"{kind}: start to first batch", "s", firsts),
            Figure(f"{kind}: the same / importing torch", "x", shares, 1.5),
        ]
        for which in ("second beside the first", "third after both were closed"):
            values = [item[which] for item in found[kind]]
            figures.append(Figure(f"{kind}: {which}", "s", values, 0.5))
    return figures


_IMPORT = """
import json, time
start = time.perf_counter()
import torch
print(json.dumps({"first": time.perf_counter() - start}))
"""


def _elsewhere(what: str) -> dict[str, float]:
    program = ["-c", _IMPORT] if what == "torch" else ["-m", "benchmarks.multi.start", what]
    command = [sys.executable, "-W", "ignore", *program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise RuntimeError(f"WRONG start {what}: {last}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(what: str) -> dict[str, float]:
    """Time three collectors, from the call to the first batch."""
    import torch

    from benchmarks import policies
    from benchmarks.multi import cases, collectors

    torch.set_num_threads(1)
    policy = policies.categorical_policy(policies.mlp(4, 2))

    def first_batch() -> tuple[float, collectors.Batches]:
        frames = cases.ROLLOUT * (2 if what == "sync" else 1)
        start = time.perf_counter()
        seeds = [cases.Seeds(0), cases.Seeds(cases.ENVS)]
        system = collectors.ours(what, seeds, policy, frames, num_envs=cases.ENVS, num_threads=1)
        system.collect_batch()
        return time.perf_counter() - start, system

    first, one = first_batch()
    second, two = first_batch()
    one.close()
    two.close()
    third, three = first_batch()
    three.close()
    return {
        "first": first,
        "second beside the first": second,
        "third after both were closed": third,
    }


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(measure(sys.argv[1])))
