"""A whole training: ``python -m benchmarks.training [--seeds N] [--target 475] [--frames N]``.

Runs ``examples/ppo.py`` as it is, and with only its collector exchanged for TorchRL's, in turns,
each in a fresh process. What counts is the seconds from the call of ``train``, so with starting the
workers, until the mean return of the last 100 episodes reaches the target.
"""

from __future__ import annotations

import argparse
import json
import runpy
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import summary
from benchmarks.machine import origin
from benchmarks.processes import in_fresh_process

EXAMPLE = Path(__file__).parent.parent / "examples" / "ppo.py"
PUBLISHED = Path(__file__).parent / "published" / "training.json"
OURS, THEIRS = "GleanRL", "TorchRL"


class TorchRLCollector:
    """TorchRL's ``MultiSyncCollector`` behind the arguments and methods that the example uses."""

    def __init__(
        self, name: str, policy: Any, *, num_workers: int, num_envs: int, **frames: int
    ) -> None:
        """Start the workers, with all that TorchRL offers to be faster."""
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
        """Return what the example asks for."""
        return {"return_mean": sum(self._returns) / max(1, len(self._returns))}


def run(system: str, seed: int, target: float, frames: int) -> dict[str, Any]:
    """Train until the target and return frames, seconds and the return that was reached."""
    train = runpy.run_path(str(EXAMPLE), run_name="ppo")["train"]
    if system == THEIRS:
        import torchrl.collectors  # imports are not what is measured
        import torchrl.envs  # noqa: F401

        train.__globals__["MultiSyncCollector"] = TorchRLCollector
    began = time.perf_counter()
    rows = train(frames=frames, seed=seed)
    for row in rows:
        if row["return"] >= target:
            break
    seconds = time.perf_counter() - began
    rows.close()
    return {"seed": seed, **row, "seconds": seconds, "reached": row["return"] >= target}


def main() -> None:
    """Run both in turns, one seed after another, and write what they took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--frames", type=int, default=300_000)
    parser.add_argument("--out", type=Path, default=PUBLISHED)
    given = parser.parse_args()
    here = origin()  # the load before anything runs
    runs: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    for seed in range(given.seeds):
        for system in (OURS, THEIRS) if seed % 2 == 0 else (THEIRS, OURS):
            arguments = system, seed, given.target, given.frames
            runs[system].append(in_fresh_process("benchmarks.training", "run", *arguments))
            print(system, json.dumps(runs[system][-1]), flush=True)
    pairs = zip(runs[THEIRS], runs[OURS], strict=True)
    doc = {
        **here,
        "target": given.target,
        "runs": runs,
        "seconds": {system: summary([r["seconds"] for r in rs]) for system, rs in runs.items()},
        "ratio": summary([theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]),
    }
    given.out.write_text(json.dumps(doc, indent=1) + "\n")
    print(json.dumps({"seconds": doc["seconds"], "ratio": doc["ratio"]}, indent=1))


if __name__ == "__main__":
    main()
