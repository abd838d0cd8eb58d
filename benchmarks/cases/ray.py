"""Two Ray actors: frames per second, against TorchRL's RayCollector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import checks, policies
from benchmarks.cases.cartpole import ENVS, STEPS, WORKERS, gleanrl, torchrl
from benchmarks.harness import Case, Reference, in_process
from benchmarks.suites import Suite


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
        lambda: gleanrl("ray", kind, policy),
        [Reference("TorchRL RayCollector", lambda: torchrl("ray", kind, policy), 5.0)],
        check=checks.RealBatches(net, WORKERS * ENVS, STEPS, WORKERS, in_process),
    )


@contextmanager
def started() -> Iterator[None]:
    """A Ray of our own."""
    import ray

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
    try:
        yield
    finally:
        ray.shutdown()


SUITE = Suite("benchmarks.ray", all_cases, around=started)
