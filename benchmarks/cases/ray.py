"""Two Ray actors: frames per second, against TorchRL's RayCollector."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks import checks, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, gleanrl, torchrl
from benchmarks.harness import Case, Reference
from benchmarks.systems.ours import Batches


def all_cases() -> list[Case]:
    """Return every case, in the order in which they run."""
    return [cartpole(kind) for kind in ("sync", "async")]


def cartpole(kind: str) -> Case:
    """Frames per second of two actors with sixteen environments each."""
    net = policies.mlp(4, 2)
    policy = policies.categorical_policy(net)
    return Case(
        f"cartpole-{kind}",
        f"CartPole-v1 x16 in each of {WORKERS} actors, 64-64 MLP, {kind}; frames per second",
        lambda: _on_ray(gleanrl, kind, policy),
        [Reference("TorchRL RayCollector", lambda: _on_ray(torchrl, kind, policy), 5.0)],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS),
    )


def _on_ray(make: Any, kind: str, policy: Any) -> Batches:
    """Return a collector on a Ray of our own."""
    import ray

    if not ray.is_initialized():
        # Actors import what they run from here.
        here = str(Path(__file__).parents[2])
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        ray.init(
            num_cpus=8,
            object_store_memory=2 * 10**9,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    batches: Batches = make("ray", kind, policy)
    return batches
