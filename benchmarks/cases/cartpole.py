"""CartPole over workers of every kind: the same work for ours and for TorchRL's."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import envs
from benchmarks.systems import ours, peers

STEPS = 64
"""Steps per environment and rollout."""
ENVS = 16
"""Environments per worker."""
WORKERS = 2


def frames(kind: str, workers: int = WORKERS) -> int:
    """Return the frames of a batch."""
    return STEPS * ENVS * (workers if kind == "sync" else 1)


def seeds(workers: int = WORKERS) -> list[envs.Seeds]:
    """Return the factories of ``workers`` workers, for ``num_envs=``."""
    return [envs.Seeds(ENVS * worker) for worker in range(workers)]


def gleanrl(where: str, kind: str, policy: Any, workers: int = WORKERS) -> ours.Batches:
    """Return ours; ``where`` is as `ours.over` has it."""
    options = {"num_envs": ENVS, "init_fn": ours.quiet_worker}
    return ours.over(where, kind, seeds(workers), policy, frames(kind, workers), **options)


def still(where: str, kind: str, size: int, steps: int) -> ours.Bytes:
    """Return ours over workers with one `envs.Stamped` of ``size`` bytes each; it counts bytes."""
    frames = steps * (WORKERS if kind == "sync" else 1)
    return ours.Bytes(ours.over(where, kind, envs.stamped(WORKERS, size), None, frames), size)


def torchrl(where: str, kind: str, policy: Any, argument_checks: bool = False) -> ours.Batches:
    """Return TorchRL's, with a ``SerialEnv`` in each worker.

    ``argument_checks`` leaves those of `torch.distributions` on in its workers, where they are by
    default.
    """
    from torchrl import collectors

    some = envs.seeded(envs.cartpole, WORKERS * ENVS)
    parts = [some[first : first + ENVS] for first in range(0, len(some), ENVS)]
    options: dict[str, Any] = {"frames_per_batch": frames(kind)}
    if where == "process":
        kinds = {"sync": collectors.MultiSyncCollector, "async": collectors.MultiAsyncCollector}
        collector: Any = kinds[kind]
        options |= {"total_frames": -1, "num_threads": 1, **peers.TORCHRL_SHORTCUTS}
        options["init_fn"] = None if argument_checks else ours.quiet_worker
        options |= {"cat_results": "stack"} if kind == "sync" else {}
    else:
        from torchrl.collectors import distributed

        options |= {"total_frames": 1 << 40, "sync": kind == "sync"}
        options["collector_kwargs"] = dict(peers.TORCHRL_SHORTCUTS)
        if where == "ray":
            collector = distributed.RayCollector
            options["remote_configs"] = {"num_cpus": 1, "num_gpus": 0}
        else:
            collector = distributed.DistributedCollector
            options |= {"launcher": "mp", "backend": "gloo"}
    quiet = where != "process"  # nodes have no init_fn
    makers = [partial(peers.torchrl_serial, part, quiet) for part in parts]
    return ours.Batches(collector(makers, policy, **options))
