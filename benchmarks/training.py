"""Seconds of a whole training: ``examples/ppo.py`` with either library's collector.

The example runs as it is, and with only its collector exchanged for TorchRL's, in turns, each in a
fresh process. The clock runs from the call of ``train``, so it includes the start of the workers,
until the mean return of the last 100 episodes reaches the target.
"""

from __future__ import annotations

import json
import runpy
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import summary
from benchmarks.processes import in_fresh_process

EXAMPLE = Path(__file__).parent.parent / "examples" / "ppo.py"
TARGET, FRAMES = 475.0, 300_000
"""Mean return to reach, and the most frames of a training."""
OURS, THEIRS = "GleanRL", "TorchRL"


class TorchRLCollector:
    """TorchRL's ``MultiSyncCollector`` behind the arguments and methods that the example uses."""

    def __init__(
        self, name: str, policy: Any, *, num_workers: int, num_envs: int, **frames: int
    ) -> None:
        """Start the workers, with all of TorchRL's options for speed."""
        from torchrl.collectors import MultiSyncCollector

        from benchmarks import envs
        from benchmarks.systems import ours, peers

        factories = [partial(envs.unchecked, name)] * num_envs
        workers = [partial(peers.torchrl_serial, factories)] * num_workers
        options = {"num_threads": 1, "cat_results": "stack", "init_fn": ours.quiet_worker}
        self._collector = MultiSyncCollector(
            workers, policy, **frames, **options, **peers.TORCHRL_SHORTCUTS
        )
        self._returns: deque[float] = deque(maxlen=100)
        self.set_seed = self._collector.set_seed
        self.update_policy_weights_ = self._collector.update_policy_weights_

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._collector.shutdown()

    def __iter__(self) -> Any:
        running: Any = 0.0
        for batch in self._collector:
            for step in batch["next"].unbind(-1):
                running = running + step["reward"]
                self._returns.extend(running[step["done"]].tolist())
                running = running * ~step["done"]
            yield batch

    def stats(self) -> dict[str, float]:
        """Return the number that the example reads."""
        return {"return_mean": sum(self._returns) / max(1, len(self._returns))}


def run(system: str, seed: int, longest: float) -> dict[str, Any]:
    """Train until the target, for ``longest`` seconds at most; return the last row and seconds."""
    train = runpy.run_path(str(EXAMPLE), run_name="ppo")["train"]
    if system == THEIRS:
        import torchrl.collectors  # imports are not measured
        import torchrl.envs  # noqa: F401

        train.__globals__["MultiSyncCollector"] = TorchRLCollector
    began = time.perf_counter()
    rows = train(frames=FRAMES, seed=seed)
    for row in rows:
        if row["return"] >= TARGET or time.perf_counter() - began > longest:
            break
    seconds = time.perf_counter() - began
    rows.close()
    return {"seed": seed, **row, "seconds": seconds, "reached": row["return"] >= TARGET}


def measure(seeds: int, longest: float) -> dict[str, Any]:
    """Run both in turns, one seed after another."""
    runs: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    for seed in range(seeds):
        for system in (OURS, THEIRS) if seed % 2 == 0 else (THEIRS, OURS):
            runs[system].append(in_fresh_process(__name__, "run", system, seed, longest))
            print(system, json.dumps(runs[system][-1]), flush=True)
    pairs = zip(runs[THEIRS], runs[OURS], strict=True)
    return {
        "target": TARGET,
        "runs": runs,
        "seconds": {system: summary([r["seconds"] for r in rs]) for system, rs in runs.items()},
        "ratio": summary([theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]),
    }
